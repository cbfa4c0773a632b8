// What the pages have in common: elements made of text nodes only, and numbers as people read them.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) node.style.setProperty(`--${key}`, one);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const number = (value) => Math.round(value).toLocaleString("en");
export const tokens = (count) => `${number(count)} token${count === 1 ? "" : "s"}`;
export const percent = (part, whole) => (whole ? Math.floor((100 * part) / whole) : 0);
export const words = (name) => String(name ?? "").replaceAll("_", " ");

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value < 10 ? value.toFixed(1) : number(value)} ms`;
}
