// A line of the latest values; it knows nothing of what they mean.

import { make } from "./dom.js";

const POINTS = 60;

export class Plot {
  /** The scale reaches to the largest value on show, and to `least` at least. */
  constructor(least = 0) {
    this.least = least;
    this.values = [];
    this.area = make("path", { class: "area" });
    this.line = make("path", { class: "line" });
    const box = { class: "plot", viewBox: `0 0 ${POINTS - 1} 100`, preserveAspectRatio: "none", "aria-hidden": "true" };
    this.element = make("svg", box, this.area, this.line);
  }

  /** null leaves a gap. */
  push(value) {
    this.values = [...this.values, value].slice(-POINTS);
    const top = Math.max(this.least, ...this.values) || 1;
    const first = POINTS - this.values.length;
    const runs = [];
    let run = null;
    this.values.forEach((one, i) => {
      if (one === null) run = null;
      else if (run) run.push([first + i, 96 - (92 * one) / top]);
      else runs.push((run = [[first + i, 96 - (92 * one) / top]]));
    });
    const lines = runs.map((points) => `M${points.join("L")}${points.length === 1 ? "h0" : ""}`);
    this.line.setAttribute("d", lines.join(""));
    this.area.setAttribute("d", lines.map((line, i) => `${line}V100H${runs[i][0][0]}Z`).join(""));
  }
}
