// The drawing area, and a drawing as the 64 numbers 0..16 that the digits model takes; it sends nothing.

import { make } from "./dom.js";

// The training images were bitmaps of 32 × 32, the digit at full height, and count the inked dots in blocks of 4 × 4.
const [DOTS, BLOCK, SIDE] = [32, 4, 8];
const PEN = 5; // dots, about what the training images have
const WIDEST = 24; // dots
const WHITEST = 16;

export class Pad {
  /** `drawn` is called with the numbers after each stroke. */
  constructor(svg, drawn) {
    this.svg = svg;
    this.clear();
    svg.addEventListener("pointerdown", (event) => {
      if (!event.isPrimary) return;
      event.preventDefault();
      svg.setPointerCapture(event.pointerId);
      if (!this.strokes.length) this.clear();
      this.strokes.push([]);
      this.line = svg.appendChild(make("polyline", { class: "ink" }));
      this.add(event);
    });
    svg.addEventListener("pointermove", (event) => this.line && event.isPrimary && this.add(event));
    svg.addEventListener("lostpointercapture", () => {
      if (!this.line) return;
      this.line = null;
      drawn(values(this.strokes));
    });
  }

  add({ clientX, clientY }) {
    const { left, top, width, height } = this.svg.getBoundingClientRect();
    const points = this.strokes.at(-1);
    points.push([(100 * (clientX - left)) / width, (100 * (clientY - top)) / height]);
    this.line.setAttribute("points", [...points, points[0]].slice(0, Math.max(2, points.length)).join(" "));
  }

  clear() {
    this.strokes = [];
    this.line = null;
    this.svg.replaceChildren();
  }

  /** A sample in place of a drawing. */
  show(numbers) {
    this.clear();
    const size = 100 / SIDE;
    numbers.forEach((value, i) => {
      const place = { x: (i % SIDE) * size, y: Math.floor(i / SIDE) * size, width: size, height: size };
      if (value) this.svg.append(make("rect", { class: "ink", ...place, "fill-opacity": value / WHITEST }));
    });
  }
}

/** Drawn anew with a pen of one width, at full height and in the middle, whatever its size on the page. */
function values(strokes) {
  const [xs, ys] = [0, 1].map((axis) => strokes.flat().map((point) => point[axis]));
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const [width, height] = [right - left, bottom - top];
  const down = (DOTS - PEN) / Math.max(height, width / 3, 1);
  const across = Math.min(down, (WIDEST - PEN) / Math.max(width, 1));
  const context = make("canvas", { width: DOTS, height: DOTS }).getContext("2d");
  Object.assign(context, { lineWidth: PEN, lineCap: "round", lineJoin: "round" });
  for (const stroke of strokes) {
    context.beginPath();
    for (const [x, y] of [stroke[0], ...stroke]) {
      context.lineTo(DOTS / 2 + (x - (left + right) / 2) * across, DOTS / 2 + (y - (top + bottom) / 2) * down);
    }
    context.stroke();
  }
  const { data } = context.getImageData(0, 0, DOTS, DOTS);
  const blocks = new Array(SIDE * SIDE).fill(0);
  for (let dot = 0; dot < DOTS * DOTS; dot++) {
    const [x, y] = [dot % DOTS, Math.floor(dot / DOTS)];
    if (data[4 * dot + 3] > 127) blocks[SIDE * Math.floor(y / BLOCK) + Math.floor(x / BLOCK)]++;
  }
  return blocks;
}

/** The numbers as a picture on an 8 × 8 canvas, in a colour that both schemes bear. */
export function picture(numbers, canvas = make("canvas", { width: SIDE, height: SIDE, "aria-hidden": "true" })) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(SIDE, SIDE);
  numbers.forEach((value, i) => image.data.set([92, 124, 250, (255 * value) / WHITEST], 4 * i));
  context.putImageData(image, 0, 0);
  return canvas;
}
