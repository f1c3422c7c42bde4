// The numbers of the service and a lane for each rank, from one look to the next; it asks for nothing itself.

import { $, bytes, make, number } from "./dom.js";
import { growth, quantile, series, total } from "./numbers.js";
import { Plot } from "./plot.js";

const DEATHS = { peer: "rank died", rank: "rank died", deadline: "step too late", supervisor: "torchrun died" };
const WINDOW = 10; // looks over which times are taken: a lone request would be gone in a blink

const looks = []; // the latest, each {at, scrape, info}
const lanes = new Map(); // by group and rank
const known = new Map(); // a group: as the last info that had it says

// ---- the service

const rate = (now, before, name, where) => growth(now.scrape, before.scrape, name, where) / seconds(now, before);
const seconds = (now, before) => (now.at - before.at) / 1000;
const failed = ({ scrape }) => // a status other than 200
  total(scrape, "phalanx_requests_total") - total(scrape, "phalanx_requests_total", { code: "200" });
const milliseconds = (look, old, q) => scaled(quantile(look.scrape, old.scrape, "phalanx_request_seconds", q), 1000);
const scaled = (value, by) => (value === null ? null : value * by);

function counts(look, name, label, leave, words = {}) {
  const found = series(look.scrape, name).filter(({ labels, value }) => value && labels[label] !== leave);
  return found.map(({ labels, value }) => `${number(value)} ${words[labels[label]] ?? labels[label]}`);
}

// Each: name, unit, [the number shown, what is plotted, the small print] of a look, the one before and an old one.
const TILES = [
  ["Requests", "/s", (now, before) => {
    const value = rate(now, before, "phalanx_requests_total");
    return [value, value, `${number(total(now.scrape, "phalanx_requests_total") ?? 0)} in all`];
  }],
  ["Half answered in", "ms", (now, _, old) => {
    const value = milliseconds(now, old, 0.5);
    return [value, value, `p50 of the last ${WINDOW} s`];
  }],
  ["99 % answered in", "ms", (now, _, old) => {
    const value = milliseconds(now, old, 0.99);
    return [value, value, `p99 of the last ${WINDOW} s`];
  }],
  ["In the queue", "items", (now) => {
    const value = total(now.scrape, "phalanx_queue_items");
    return [value, value, `room for ${number(now.info.limits.queue_items)}`];
  }],
  ["Errors", "", (now, before) => {
    const items = counts(now, "phalanx_items_total", "outcome", "ok").map((text) => `items: ${text}`);
    const why = [...counts(now, "phalanx_rejected_requests_total", "reason"), ...items];
    return [failed(now), Math.max(0, failed(now) - failed(before)), why.join(", ") || "requests not answered in full"];
  }],
  ["Restarts", "", (now, before) => {
    const why = counts(now, "phalanx_restarts_total", "reason", null, DEATHS);
    const fresh = growth(now.scrape, before.scrape, "phalanx_restarts_total");
    return [total(now.scrape, "phalanx_restarts_total") ?? 0, fresh, why.join(", ") || "of the worker group"];
  }],
].map(([name, unit, values]) => {
  const tile = { values, plot: new Plot(1), value: make("b", {}, "–"), note: make("p", { class: "hint" }) };
  const shown = make("p", {}, tile.value, make("small", {}, unit));
  const parts = [make("h3", {}, name), shown, tile.plot.element, tile.note];
  $("tiles").append(make("div", { class: "card tile", "data-tile": name }, ...parts));
  return tile;
});

// ---- the ranks

// Each: name, unit, the least that the plot reaches to, the value of a rank.
const MEASURES = [
  ["Items", "/s", 1, (now, before, _, rank) => rate(now, before, "phalanx_rank_items_total", rank)],
  ["Forward", "ms", 1, (now, _, old, rank) => {
    const count = growth(now.scrape, old.scrape, "phalanx_forward_seconds_count", rank);
    return count ? (1000 * growth(now.scrape, old.scrape, "phalanx_forward_seconds_sum", rank)) / count : null;
  }],
  ["Busy", "%", 100, (now, before, _, rank) =>
    Math.min(100, 100 * rate(now, before, "phalanx_forward_seconds_sum", rank))],
];

function lane(id) {
  const made = { name: make("span"), state: make("span", { class: "pill" }), facts: make("p", { class: "hint" }) };
  made.measures = [];
  const head = make("div", {}, make("h3", {}, made.name, made.state), made.facts);
  made.element = make("li", { "data-rank": id }, head);
  for (const [title, unit, least, value] of MEASURES) {
    const measure = { value, plot: new Plot(least), shown: make("b", {}, "–") };
    const label = make("p", {}, make("span", { class: "hint" }, title), measure.shown, make("small", {}, unit));
    made.element.append(make("div", { class: "measure" }, label, measure.plot.element));
    made.measures.push(measure);
  }
  return made;
}

function stateOf(made, state) {
  made.element.dataset.state = made.state.dataset.state = state;
  made.state.textContent = state;
}

function showLanes(now, before, old) {
  const ids = new Set();
  const groups = [...known].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  const several = new Set(groups.map(([, { model }]) => model.name)).size > 1;
  for (const [group, { ranks, epoch, model }] of groups) {
    for (const { rank, device } of ranks) {
      const where = { group, rank: String(rank) };
      const id = group === "0" ? String(rank) : `${group}/${rank}`;
      ids.add(id);
      if (!lanes.has(id)) lanes.set(id, lane(id));
      const made = lanes.get(id);
      made.name.textContent = groups.length > 1 ? `Group ${group}, rank ${rank}` : `Rank ${id}`;
      stateOf(made, total(now.scrape, "phalanx_rank_up", where) ? "up" : "down");
      const memory = bytes(total(now.scrape, "phalanx_rank_memory_bytes", where));
      made.facts.textContent = `${several ? `${model.name} · ` : ""}${device} · ${memory} · epoch ${epoch}`;
      for (const { value, plot, shown } of made.measures) {
        const found = before ? value(now, before, old, where) : null;
        shown.textContent = number(found);
        plot.push(found);
      }
    }
  }
  for (const id of lanes.keys()) if (!ids.has(id)) lanes.delete(id);
  const elements = [...ids].map((id) => lanes.get(id).element);
  if (elements.length) $("lanes").replaceChildren(...elements);
  else $("lanes").replaceChildren(make("li", { class: "hint" }, "None yet: the worker group is starting."));
}

// ---- a look

export function show(look) {
  looks.push(look);
  if (looks.length > WINDOW + 1) looks.shift();
  remember(look.info);
  const [before, old] = [looks.at(-2), looks[0]];
  for (const { values, plot, value, note } of before ? TILES : []) {
    const [shown, plotted, text] = values(look, before, old);
    value.textContent = number(shown);
    note.textContent = note.title = text;
    plot.push(plotted);
  }
  showLanes(look, before, old);
  const gone = Object.entries(look.info.lost).map(([name, { since, why }]) => `Group ${name} is away since ${since}: ${why}`);
  const last = look.info.last_death && `The last group that ended: ${look.info.last_death}`;
  $("death").textContent = gone.join("; ") || last || "";
  $("death").hidden = !$("death").textContent;
}

/** Groups that died keep their lanes; those that left do too, until another takes steps. */
function remember({ groups, lost }) {
  for (const [name, group] of Object.entries(groups)) known.set(name, group);
  if (!Object.keys(groups).length) return;
  for (const name of known.keys()) if (!(name in groups) && !(name in lost)) known.delete(name);
}

/** Nobody answered. */
export function showGap() {
  for (const { plot } of TILES) plot.push(null);
  for (const made of lanes.values()) {
    stateOf(made, "unknown");
    for (const { plot, shown } of made.measures) {
      plot.push(null);
      shown.textContent = "–";
    }
  }
}
