// A file as the body of a request: .npy as it is, an image as the array that the model takes, else as a file.

import { bytes } from "./dom.js";

const CHANNELS = [1, 3, 4];
const MOST = 4e6; // numbers: more are better sent as .npy

/** {body, type, note}; an Error says why the file cannot be one. */
export async function toBody(file, model) {
  if (file.name.toLowerCase().endsWith(".npy")) {
    return { body: file, type: "application/x-npy", note: `${file.name}, ${bytes(file.size)}` };
  }
  if (!model.inputs) {
    const body = new FormData(); // the browser gives it its Content-Type, with the boundary
    body.append("file", file);
    return { body, type: null, note: `${file.name}, ${bytes(file.size)}, as a file` };
  }
  if (!file.type.startsWith("image/")) throw new Error(`${file.name} is neither an .npy file nor an image.`);
  const form = layout(model);
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`This browser cannot decode ${file.name}.`);
  });
  const [height, width] = [form.height ?? bitmap.height, form.width ?? bitmap.width];
  if (form.channels * height * width > MOST) throw new Error(`${file.name} is too large to be sent as JSON.`);
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  const whole = /int/.test(model.inputs.dtype);
  const value = (y, x, c) => {
    const at = 4 * (y * width + x);
    const grey = 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2];
    const shade = form.channels === 1 ? Math.round(grey) : data[at + c];
    return whole ? shade : Number((shade / 255).toFixed(4));
  };
  const array = (count, of) => Array.from({ length: count }, (_, i) => of(i));
  const item = form.first
    ? array(form.channels, (c) => array(height, (y) => array(width, (x) => value(y, x, c))))
    : array(height, (y) => array(width, (x) => array(form.channels, (c) => value(y, x, c))));
  const shape = form.first ? [form.channels, height, width] : [height, width, form.channels];
  const note = `${file.name} as ${model.inputs.dtype} [${shape.join(", ")}], values 0 to ${whole ? 255 : 1}`;
  return { body: JSON.stringify({ inputs: [item] }), type: "application/json", note };
}

/** Where the channels stand in the model's TensorSpec, and its size; a null there is the image's own. */
function layout({ inputs, name }) {
  const [a, b, c] = inputs.shape;
  if (inputs.shape.length === 3 && CHANNELS.includes(a)) return { first: true, channels: a, height: b, width: c };
  if (inputs.shape.length === 3 && CHANNELS.includes(c)) return { first: false, channels: c, height: a, width: b };
  const shape = `[${inputs.shape.map((size) => size ?? "any").join(", ")}]`;
  throw new Error(`${name} takes ${inputs.dtype} ${shape}, which is no image: that has a shape of C, H, W or H, W, C.`);
}
