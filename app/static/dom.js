// Elements in one call, and numbers as people read them; it knows nothing of what is shown.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const space = ["svg", "path", "rect", "polyline"].includes(tag) ? "http://www.w3.org/2000/svg" : null;
  const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** 0.37, 4.2, 57, 12,345; a dash for what is not known. */
export function number(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const digits = value === 0 || value >= 20 || Number.isInteger(value) ? 0 : value >= 1 ? 1 : 2;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function bytes(value) {
  if (value === null) return "–";
  const unit = value >= 2 ** 30 ? 3 : value >= 2 ** 20 ? 2 : value >= 2 ** 10 ? 1 : 0;
  return `${number(value / 1024 ** unit)} ${["B", "KiB", "MiB", "GiB"][unit]}`;
}
