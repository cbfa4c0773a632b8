// The token strip in its two sizes: a bar, and a canvas with one cell a token, so that a hundred thousand stay quick.
// Parts are [start, end, colour]: the tokens from start up to end, in a CSS colour; the rest must be prefilled.
import { svg } from "./dom.js";

const CELLS = [[13, 17], [10, 14], [8, 11], [6, 9], [4, 6], [3, 4], [2, 3]]; // width and height, largest that fits wins
const REST = "var(--prefill)";
const strips = new Set();

document.addEventListener("theme", () => {
  for (const strip of strips) {
    if (strip.box.isConnected) strip.draw();
    else strips.delete(strip);
  }
});

export function drawBar(count, parts, label) {
  const rects = parts.map(([x, end, c]) => svg("rect", { x, y: 0, width: end - x, height: 1, vars: { c } }));
  return svg("svg", { viewBox: `0 0 ${count || 1} 1`, preserveAspectRatio: "none", role: "img", "aria-label": label }, ...rects);
}

function* withRest(count, parts) {
  let at = 0;
  for (const [start, end, colour] of parts) {
    if (start > at) yield [at, start, REST];
    yield [start, end, colour];
    at = end;
  }
  if (at < count) yield [at, count, REST];
}

/** The cells from start up to end as at most three rectangles of cells: rest of a row, whole rows, beginning of a row. */
function* coverRows(start, end, columns) {
  while (start < end) {
    const [x, y] = [start % columns, Math.floor(start / columns)];
    const height = x ? 1 : Math.max(1, Math.floor((end - start) / columns));
    const width = Math.min(columns - x, end - start);
    yield [x, y, width, height];
    start += width * height;
  }
}

export class TokenStrip {
  /** The box holds the cells, at most `height` pixels high, and takes the keyboard; the note tells about one token. */
  constructor(box, note, height) {
    strips.add(this);
    Object.assign(this, { box, note, height, shown: null, at: -1 });
    this.canvas = box.appendChild(document.createElement("canvas"));
    this.canvas.style.height = "0"; // an empty canvas is half as high as it is wide: a hole in the page until the answer is there
    new ResizeObserver(() => this.draw()).observe(box);
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => this.select(-1));
    box.addEventListener("keydown", (event) => this.walk(event));
    box.addEventListener("blur", () => this.select(-1));
  }

  /** `describe` gives the nodes that tell about a token, or null where a cell is no particular token. */
  show({ count, parts, label, hint, describe }) {
    Object.assign(this, { shown: { count, parts, hint, describe }, at: -1 });
    this.box.setAttribute("aria-label", label);
    this.draw();
    this.note.textContent = hint;
  }

  layout() {
    for (const [w, h] of CELLS) {
      const columns = Math.max(1, Math.floor(this.canvas.clientWidth / w));
      const rows = Math.ceil(this.shown.count / columns);
      if (rows * h <= this.height || w === CELLS.at(-1)[0]) return { w, h, columns, rows };
    }
  }

  draw() {
    if (!this.shown || !this.canvas.clientWidth) return;
    const { w, h, columns, rows } = (this.grid = this.layout());
    const scale = window.devicePixelRatio || 1;
    const pen = this.canvas.getContext("2d");
    this.canvas.style.height = `${rows * h}px`;
    this.canvas.width = this.canvas.clientWidth * scale;
    this.canvas.height = rows * h * scale;
    pen.scale(scale, scale);
    this.box.style.maxHeight = rows * h > this.height ? `${this.height}px` : ""; // more rows than fit: the box scrolls
    const gap = w > 4 ? 1.5 : w > 2 ? 0.5 : 0;
    for (const [start, end, colour] of withRest(this.shown.count, this.shown.parts)) {
      pen.fillStyle = this.resolve(colour);
      if (!gap) { // cells that touch are drawn as rows: there may be a million of them
        for (const [x, y, width, height] of coverRows(start, end, columns)) pen.fillRect(x * w, y * h, width * w, height * h);
        continue;
      }
      for (let index = start; index < end; index += 1) {
        const cell = [(index % columns) * w, Math.floor(index / columns) * h, w - gap, h - gap];
        if (w > 6) {
          pen.beginPath();
          pen.roundRect(...cell, 2);
          pen.fill();
        } else pen.fillRect(...cell);
      }
    }
    if (this.at < 0) return;
    pen.strokeStyle = this.resolve("var(--ink)");
    pen.lineWidth = 2;
    pen.strokeRect((this.at % columns) * w - 0.5, Math.floor(this.at / columns) * h - 0.5, w, h);
  }

  /** A canvas knows no CSS variables: ask the browser what they mean in the present theme. */
  resolve(colour) {
    this.canvas.style.setProperty("outline-color", colour);
    const found = getComputedStyle(this.canvas).outlineColor;
    this.canvas.style.removeProperty("outline-color");
    return found;
  }

  point(event) {
    if (!this.grid) return;
    const { w, h, columns } = this.grid;
    const index = Math.floor(event.offsetY / h) * columns + Math.min(columns - 1, Math.floor(event.offsetX / w));
    this.select(index < this.shown.count ? index : -1);
  }

  walk(event) {
    if (!this.grid) return;
    const last = this.shown.count - 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.grid.columns, ArrowUp: -this.grid.columns, Home: -last - 1, End: last + 1 };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.select(Math.max(0, Math.min(last, this.at + steps[event.key])));
    const top = Math.floor(this.at / this.grid.columns) * this.grid.h;
    if (top < this.box.scrollTop || top > this.box.scrollTop + this.box.clientHeight - 20) this.box.scrollTop = top - this.box.clientHeight / 2;
  }

  select(index) {
    const told = index < 0 || !this.shown ? null : this.shown.describe(index);
    const at = told ? index : -1;
    if (at === this.at) return;
    this.at = at;
    this.draw();
    this.note.replaceChildren(...(told ?? [this.shown.hint]));
  }
}
