// Prometheus text to numbers, and two scrapes to what happened between them; it knows no metric by name.

/** Name to its samples, each {labels, value}. */
export function parse(text) {
  const samples = new Map();
  for (const [, name, inside, value] of text.matchAll(/^(\w+)(?:\{(.*)\})? (\S+)/gm)) {
    const labels = {};
    for (const [, label, quoted] of (inside ?? "").matchAll(/(\w+)="((?:\\.|[^"\\])*)"/g)) labels[label] = quoted;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value: Number(value.replace("Inf", "Infinity")) });
  }
  return samples;
}

/** The samples of a metric that have these labels. */
export function series(scrape, name, where = {}) {
  const wanted = Object.entries(where);
  return (scrape.get(name) ?? []).filter(({ labels }) => wanted.every(([label, value]) => labels[label] === value));
}

/** Their sum; null where there is none. */
export function total(scrape, name, where) {
  const found = series(scrape, name, where);
  return found.length ? found.reduce((sum, { value }) => sum + value, 0) : null;
}

/** How much a counter grew; one that fell belongs to a process that began anew, and counts from 0. */
export function growth(now, before, name, where) {
  const [end, start] = [total(now, name, where) ?? 0, total(before, name, where) ?? 0];
  return end < start ? end : end - start;
}

/** Of what a histogram observed between two scrapes, as histogram_quantile does it; null where that is nothing. */
export function quantile(now, before, name, q) {
  const bounds = series(now, `${name}_bucket`).map(({ labels }) => labels.le);
  const buckets = bounds
    .map((le) => [le === "+Inf" ? Infinity : Number(le), growth(now, before, `${name}_bucket`, { le })])
    .sort(([a], [b]) => a - b);
  const wanted = q * (buckets.at(-1)?.[1] ?? 0);
  if (!wanted) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= wanted) return bound === Infinity ? low : low + ((bound - low) * (wanted - below)) / (count - below);
    [low, below] = [bound, count];
  }
  return null;
}
