// A look at the service every second, the state it is in, and the API key; the rest is in live.js and try.js.

import { Locked, ask, hasKey, useKey } from "./api.js";
import { $ } from "./dom.js";
import { show, showGap } from "./live.js";
import { parse } from "./numbers.js";
import { offer } from "./try.js";

const EVERY = 1000; // ms
const PATIENCE = 5000; // ms
const REASONS = {
  draining: "The service is stopping: it finishes what it has and takes nothing new.",
  "no worker group yet": "The worker group is starting: requests wait for it.",
};

let locked = false;

async function look() {
  try {
    const signal = AbortSignal.timeout(PATIENCE);
    const { status, reason } = await (await ask("readyz", { signal })).json();
    if (!locked) {
      const answers = await Promise.all([ask("info", { signal }), ask("metrics", { signal })]);
      const [info, text] = await Promise.all([answers[0].json(), answers[1].text()]);
      $("main").hidden = false;
      describe(info);
      show({ at: performance.now(), scrape: parse(text), info });
    }
    if (status === "ready") state("ready", "Ready");
    else state("down", reason === "draining" ? "Draining" : "Not ready", REASONS[reason] ?? reason);
  } catch (error) {
    if (error instanceof Locked) lock();
    else {
      state("unknown", "No answer", "The service does not answer. This page tries again every second.");
      showGap();
    }
  }
  if (document.hidden) document.addEventListener("visibilitychange", look, { once: true });
  else setTimeout(look, EVERY);
}

function state(name, text, why = "") {
  if ($("state").textContent !== text) $("state").textContent = text; // a screen reader says it once
  $("state").dataset.state = name;
  $("why").hidden = !why;
  if ($("why").textContent !== why) $("why").textContent = why;
}

function describe({ groups, models }) {
  const all = Object.values(groups);
  if (!all.length) return;
  const ranks = all.flatMap((group) => group.ranks);
  const devices = [...new Set(ranks.map(({ device }) => device.replace(/:\d+$/, "")))].join(", ");
  const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
  const places = `${count(ranks.length, "rank")}${all.length > 1 ? ` in ${all.length} groups` : ""}`;
  const names = Object.keys(models).join(", ");
  $("what").textContent = `${names} on ${places} (${devices}): a batch is shared out, and the answers come back in order.`;
  document.title = `${names} · Phalanx`;
  const served = new Map(all.map(({ model }) => [model.name, model]));
  offer(served, Object.keys(models));
}

// ---- the API key

function lock() {
  if (hasKey()) $("key-error").textContent = "The service does not know this key.";
  useKey("");
  if (!locked) $("key").value = "";
  locked = true;
  $("lock").hidden = false;
  $("main").hidden = $("forget").hidden = $("links").hidden = true;
  state("unknown", "Locked");
  $("key").focus();
}

$("lock").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("key-error").textContent = "";
  useKey($("key").value.trim());
  try {
    await ask("info");
  } catch (error) {
    if (error instanceof Locked) return lock();
    $("key-error").textContent = "The service does not answer.";
    return;
  }
  locked = false;
  $("lock").hidden = true;
  $("forget").hidden = false;
});
$("forget").addEventListener("click", () => {
  useKey("");
  lock();
});

if (hasKey()) {
  $("forget").hidden = false;
  $("links").hidden = true; // a link carries no key
}
look();
