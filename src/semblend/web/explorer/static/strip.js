// The token strip: every token of the prompt is one cell on a canvas, so that a hundred thousand of them stay quick.

const CELLS = [[13, 17], [10, 14], [8, 11], [6, 9], [4, 6], [3, 4], [2, 3]]; // width and height, largest that fits wins
const MOST_ROWS_HEIGHT = 190;

export class TokenStrip {
  constructor(box, canvas, note, colour) {
    Object.assign(this, { box, canvas, note, colour, result: null, at: -1 });
    this.hint = note.textContent;
    new ResizeObserver(() => this.draw()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => this.select(-1));
    box.addEventListener("keydown", (event) => this.walk(event));
  }

  show(result) {
    this.result = result;
    this.at = -1;
    const reused = result.owners.filter((owner) => owner !== null).length;
    this.box.setAttribute("aria-label", `${result.owners.length} tokens, ${reused} of them held by donors`);
    this.draw();
    this.note.textContent = this.hint;
  }

  layout() {
    const width = this.canvas.clientWidth;
    const count = this.result.owners.length;
    for (const [w, h] of CELLS) {
      const columns = Math.max(1, Math.floor(width / w));
      const rows = Math.ceil(count / columns);
      if (rows * h <= MOST_ROWS_HEIGHT || w === CELLS.at(-1)[0]) return { w, h, columns, rows };
    }
  }

  draw() {
    if (!this.result || !this.canvas.clientWidth) return;
    const { w, h, columns, rows } = (this.grid = this.layout());
    const scale = window.devicePixelRatio || 1;
    const pen = this.canvas.getContext("2d");
    this.canvas.style.height = `${rows * h}px`;
    this.canvas.width = this.canvas.clientWidth * scale;
    this.canvas.height = rows * h * scale;
    pen.scale(scale, scale);
    const gap = w > 4 ? 1.5 : w > 2 ? 0.5 : 0;
    const paint = this.paints();
    this.result.owners.forEach((owner, index) => {
      pen.fillStyle = owner === null ? paint.cold : paint.donors[owner];
      const x = (index % columns) * w;
      const y = Math.floor(index / columns) * h;
      if (w > 6) {
        pen.beginPath();
        pen.roundRect(x, y, w - gap, h - gap, 2);
        pen.fill();
      } else pen.fillRect(x, y, w - gap, h - gap);
    });
    this.outline(pen);
  }

  outline(pen) {
    if (this.at < 0) return;
    const { w, h, columns } = this.grid;
    pen.strokeStyle = this.resolved("var(--ink)");
    pen.lineWidth = 2;
    pen.strokeRect((this.at % columns) * w - 0.5, Math.floor(this.at / columns) * h - 0.5, w, h);
  }

  /** A canvas knows no CSS variables: ask the browser what they mean in the present theme. */
  paints() {
    return { cold: this.resolved("var(--cold)"), donors: this.result.donor_ids.map((id) => this.resolved(this.colour(id))) };
  }

  resolved(value) {
    this.note.style.setProperty("outline-color", value);
    const found = getComputedStyle(this.note).outlineColor;
    this.note.style.removeProperty("outline-color");
    return found;
  }

  point(event) {
    if (!this.grid) return;
    const { w, h, columns } = this.grid;
    const column = Math.min(columns - 1, Math.floor(event.offsetX / w));
    const index = Math.floor(event.offsetY / h) * columns + column;
    this.select(index < this.result.owners.length ? index : -1);
  }

  walk(event) {
    if (!this.grid) return;
    const last = this.result.owners.length - 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.grid.columns, ArrowUp: -this.grid.columns, Home: -last - 1, End: last + 1 };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.select(Math.max(0, Math.min(last, this.at + steps[event.key])));
  }

  select(index) {
    if (index === this.at) return;
    this.at = index;
    this.draw();
    if (index < 0) {
      this.note.textContent = this.hint;
      return;
    }
    const owner = this.result.owners[index];
    const piece = document.createElement("code");
    piece.textContent = this.result.pieces[index].replaceAll("\n", "⏎").replaceAll("\t", "⇥");
    const where = owner === null ? " must be prefilled" : ` held by ${this.result.donor_ids[owner]}, position ${this.donorPosition(index)}`;
    this.note.replaceChildren(`token ${index} `, piece, where);
  }

  donorPosition(index) {
    const spans = this.result.explanation.decision.spans ?? [];
    const span = spans.find((one) => index >= one.target_start && index < one.target_start + one.length);
    return span ? span.donor_start + index - span.target_start : "–";
  }
}
