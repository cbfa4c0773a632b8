// What the pages have in common: elements made of text nodes only, numbers as people read them, theme, status and key.

export const $ = (id) => document.getElementById(id);
export const put = (id, ...children) => $(id).replaceChildren(...children);

const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) node.style.setProperty(`--${key}`, one);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};
export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

export const number = (value) => Math.round(value).toLocaleString("en");
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
export const tokens = (count) => plural(count, "token");
export const percent = (part, whole) => (whole ? Math.floor((100 * part) / whole) : 0);
export const words = (name) => String(name ?? "").replaceAll("_", " ");
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value < 1 ? value.toFixed(2) : value < 10 ? value.toFixed(1) : number(value)} ms`;
}

export const track = (share, colour) => el("span", { class: "track" }, el("i", { vars: { w: Math.max(0, Math.min(1, share)), c: colour } }));

/** A bar of shares with its legend below; kinds are [colour, words, count]. */
export function drawMix(kinds) {
  put("mix", ...kinds.filter(([, , count]) => count).map(([c, name, n]) => el("i", { vars: { c, n }, title: `${name}: ${number(n)}` })));
  put("legend", ...kinds.map(([c, name, count]) => el("span", {}, el("i", { vars: { c } }), name, el("b", {}, number(count)))));
}

/** Make `nodes` the children of the element, in order. What is in place stays there: focus, selection and a click survive. */
export function keepChildren(id, nodes) {
  const box = $(id);
  const wanted = new Set(nodes);
  for (const child of [...box.children]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, at) => { if (box.children[at] !== node) box.insertBefore(node, box.children[at] ?? null); });
}

/** A table of [name, "num" or another class] heads and rows of cells; cells are text or nodes. */
export function table(heads, rows) {
  const cells = (tag, row) => row.map((cell, at) => (cell instanceof HTMLTableCellElement ? cell : el(tag, { class: heads[at][1] ?? null, scope: tag === "th" ? "col" : null }, cell)));
  const line = (row) => (Array.isArray(row) ? el("tr", {}, ...cells("td", row)) : el("tr", row.attributes, ...cells("td", row.cells)));
  return [el("thead", {}, el("tr", {}, ...cells("th", heads.map(([name]) => name)))), el("tbody", {}, ...rows.map(line))];
}

export function showHealth(ok, text) {
  $("health").className = `health ${ok ? "ok" : "bad"}`;
  put("health", text);
}

/** The key that this tab knows; a visitor types another into the form, and `use` is called with it. */
export function keepKey(name, use) {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = $("key").value.trim();
    sessionStorage.setItem(name, key);
    use(key);
  });
  return sessionStorage.getItem(name) ?? "";
}

// Who draws on a canvas listens to "theme": a canvas knows no style sheet.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
root.dataset.theme = localStorage.getItem("semblend-theme") ?? "auto";
dark.addEventListener("change", () => document.dispatchEvent(new Event("theme")));
$("theme").addEventListener("click", () => {
  const now = root.dataset.theme;
  root.dataset.theme = (now === "auto" ? dark.matches : now === "dark") ? "light" : "dark";
  localStorage.setItem("semblend-theme", root.dataset.theme);
  document.dispatchEvent(new Event("theme"));
});
