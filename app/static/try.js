// The form, and the answer to what it sent: results in order, the rank that had each, and where the time went.

import { ask } from "./api.js";
import { $, make, number } from "./dom.js";
import { toBody } from "./file.js";
import { Pad, picture } from "./pad.js";

const MOST = 256; // items of an answer on show

let models = new Map(); // by name
let several = false; // more than one is served: a request must say which
let model = null;
let example = ""; // as last put into the form
let chosen = null; // {body, type, note} of a file
let samples = null;
let sending = null;
let tried = 0;

// ---- what to send

/** The form for one of the models that some group runs now, and a choice where more than one is `listed`. */
export function offer(running, listed) {
  const stay = [...models].filter(([name]) => listed.includes(name)); // its group may be back soon
  [models, several] = [new Map([...stay, ...running]), listed.length > 1];
  $("which").hidden = !several;
  const names = [...models.keys()].sort();
  const there = [...$("model").options].map(({ value }) => value);
  if (JSON.stringify(names) !== JSON.stringify(there)) {
    const before = $("model").value;
    $("model").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    $("model").value = models.has(before) ? before : names[0];
  }
  become(models.get($("model").value));
}

$("model").addEventListener("change", () => {
  choice(null);
  $("answer").hidden = true; // it is of another model
  become(models.get($("model").value));
});

/** The form for this model, unless it is there already. */
function become(wanted) {
  if (JSON.stringify(wanted) === JSON.stringify(model)) return;
  model = wanted;
  const digits = model.name === "Digits" && String(model.inputs?.shape) === "64";
  $("draw").hidden = !digits;
  $("json").open = !digits || $("json").open;
  if ([example, ""].includes($("body").value)) {
    const item = model.example ?? zeros(model.inputs?.shape ?? [null]);
    example = JSON.stringify({ inputs: item === null ? [] : [item] });
    $("body").value = example;
  }
  const { inputs } = model;
  const takes = inputs ? `${inputs.dtype} [${inputs.shape.map((size) => size ?? "any").join(", ")}]` : "any JSON, or a file";
  const without = model.example === null ? " The model has no example." : "";
  $("takes").textContent = `An item of ${model.name} is ${takes}.${without}`;
}

/** An item of that shape, or null where a size is not fixed. */
function zeros([size, ...rest]) {
  if (size === undefined) return 0;
  return size === null || rest.includes(null) || size > 4096 ? null : new Array(size).fill(zeros(rest));
}

const pad = new Pad($("pad"), (numbers) => read([numbers]));

function read(items) {
  if (items.length === 1) picture(items[0], $("seen"));
  send({ body: JSON.stringify({ inputs: items }), type: "application/json", pictures: items });
}

async function withSamples(use) {
  try {
    samples ??= (await (await ask("static/digits.json")).json()).inputs;
    use(samples);
  } catch {
    showProblem("The samples did not come", "The service cannot be reached.");
  }
}

$("sample").addEventListener("click", () =>
  withSamples((all) => {
    const one = all[tried++ % all.length];
    pad.show(one);
    read([one]);
  }),
);
$("samples").addEventListener("click", () => withSamples(read));
$("clear").addEventListener("click", () => {
  sending?.abort();
  pad.clear();
  picture(new Array(64).fill(0), $("seen"));
  $("answer").hidden = true;
});

async function choose(file) {
  if (!file) return;
  try {
    choice(await toBody(file, model));
    $("answer").hidden = true; // it is of something else
  } catch (error) {
    choice(null);
    showProblem("The file cannot be sent", error.message);
  }
}

function choice(made) {
  chosen = made;
  $("file").value = "";
  $("chosen").hidden = !chosen;
  $("body").disabled = Boolean(chosen);
  $("chosen").firstElementChild.textContent = chosen?.note ?? "";
}

$("file").addEventListener("change", () => choose($("file").files[0]));
$("chosen").lastElementChild.addEventListener("click", () => choice(null));
for (const kind of ["dragover", "drop"]) {
  $("try").addEventListener(kind, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    $("json").open = true;
    choose(event.dataTransfer.files[0]);
  });
}
$("body").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send(chosen ?? { body: $("body").value, type: "application/json" });
});

async function send({ body, type, pictures }) {
  sending?.abort();
  const mine = (sending = new AbortController());
  $("answer").setAttribute("aria-busy", "true");
  const began = performance.now();
  try {
    const headers = { Accept: "application/json", ...(type && { "Content-Type": type }) };
    const path = several ? `infer?model=${encodeURIComponent(model.name)}` : "infer";
    const answer = await ask(path, { method: "POST", body, headers, signal: mine.signal });
    const value = await answer.json();
    showAnswer(answer, value, performance.now() - began, pictures);
  } catch (error) {
    if (mine.signal.aborted) return; // the next one is on its way
    const locked = error.constructor.name === "Locked";
    showProblem("No answer", locked ? "The API key is not known." : "The service cannot be reached now.");
  }
  $("answer").removeAttribute("aria-busy");
}

// ---- what came back

function showProblem(title, detail, ...more) {
  $("answer").hidden = false;
  $("answer").replaceChildren(make("h2", {}, title), make("p", { class: "error" }, detail), ...more);
  $("answer").removeAttribute("aria-busy");
}

function showAnswer(answer, value, took, pictures) {
  const time = timing(answer.headers.get("Server-Timing"), took);
  if (!value.outputs) {
    const id = make("p", { class: "hint" }, `${answer.status}, request ${value.request_id}`);
    return showProblem(value.title, value.errors?.[0]?.detail ?? value.detail, id, time);
  }
  const { outputs } = value;
  const errors = new Map((value.errors ?? []).map((error) => [error.index, error.detail]));
  const ranks = runs(answer.headers.get("X-Phalanx-Ranks") ?? "", outputs.length);
  const names = [...new Set(ranks.map(({ name }) => name))];
  const count = outputs.length === 1 ? "1 item" : `${number(outputs.length)} items`;
  const by = names.length > 4 ? `${names.length} ranks` : names.join(", ");
  const title = names.length ? `${count} by ${by}` : count;
  $("answer").hidden = false;
  const parts = [make("h2", {}, title)];
  if (pictures && outputs.length === 1 && outputs[0]) {
    const digit = make("output", {}, String(outputs[0].digit));
    parts.push(make("div", { class: "row read" }, digit, make("p", {}, sure(outputs[0]))));
  } else {
    for (const { name, start, stop } of ranks) {
      if (start >= MOST) break;
      const list = make("ol", { class: pictures ? "pictures" : "results", start });
      for (let i = start; i < Math.min(stop, MOST); i++) list.append(result(outputs[i], errors.get(i), pictures?.[i]));
      const range = stop - start === 1 ? `item ${start}` : `items ${start} to ${stop - 1}`;
      parts.push(make("h3", {}, name, " ", make("span", { class: "hint" }, range)), list);
    }
    const more = outputs.length - MOST;
    if (more > 0) parts.push(make("p", { class: "hint" }, `… and ${number(more)} more`));
  }
  $("answer").replaceChildren(...parts, time);
}

const sure = ({ score }) => `${(100 * score).toFixed(1)} % sure`;

function result(output, error, numbers) {
  if (error !== undefined) return make("li", { class: "error" }, error);
  if (numbers) return make("li", { title: sure(output) }, picture(numbers), String(output.digit));
  return make("li", {}, make("code", {}, JSON.stringify(output)));
}

/** `0*32,1/0*32` as runs of items; what the header does not tell is nobody's. */
function runs(header, count) {
  const made = [];
  let start = 0;
  for (const [, rank, length] of header.matchAll(/([^,*]+)\*(\d+)/g)) {
    const stop = start + Number(length);
    made.push({ name: rank === "-" ? "no rank" : `rank ${rank}`, start, stop });
    start = stop;
  }
  if (start < count) made.push({ name: "ranks not told", start, stop: count });
  return made;
}

/** Of a Server-Timing header, and of the whole way there and back. */
function timing(header, took) {
  const parts = [...(header ?? "").matchAll(/(\w+);dur=([\d.]+)/g)].map(([, name, dur]) => [name, Number(dur)]);
  const list = make("dl", { class: "timing", "aria-label": "Where the time went" });
  for (const [name, dur] of [...parts, ["round trip", took]]) {
    list.append(make("div", {}, make("dt", {}, name), make("dd", {}, number(dur), make("small", {}, " ms"))));
  }
  return list;
}
