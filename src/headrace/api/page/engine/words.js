// Numbers, times and ids as they are written, and what each panel says of itself.

const grouped = new Intl.NumberFormat("en-US");

export const count = (value) => grouped.format(Math.round(value));

export function amount(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)}k`;
  return count(value);
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;

export function seconds(value) {
  if (value < 0.0995) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return `${Math.round(value)} s`;
}

/** The part of an id that tells it from others: it begins like all of its kind, and ends with its sample. */
export function short(id) {
  const parts = id.replace(/^\d+\./, "").split("-");
  const own = parts.length > 1 ? parts[1] : parts[0];
  return own.slice(0, 6);
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** What is to be seen, in at most 60 words, and where the tour tells more. */
export const EXPLAIN = {
  queue: [
    "Requests that have arrived and hold nothing yet. The first may start when a slot is free, the step has room in its budget, and the forecast peak of KV use, with it, fits the cache. Nobody overtakes the first, so nobody starves. Whoever was preempted waits here again, in its old place.",
    "4-a-step",
  ],
  steps: [
    "A strip is one step, the newest on top: all of it runs in one forward pass. On the left is a cell for each request that decodes a token, with its drafts; hollow ones were wrong. On the right are chunks of prompts, as wide as their tokens, up to the step's budget. ▾ counts who was preempted.",
    "4-a-step",
  ],
  blocks: [
    "The KV cache, one square for each block of tokens. A colour is the request that holds it; two colours are a prefix that several share. Grey ones belong to nobody but are kept for the next prompt that begins alike, paler the longer ago; empty ones are free. A new block flashes.",
    "blocks",
  ],
  tree: [
    "The prefix index: which prompts begin alike. Each bar is a run of blocks, as wide as all that hangs below it, and the bars under it are its continuations. Bright ones were used just now. A prompt that follows a path from the top finds its KV there and computes only the rest.",
    "blocks",
  ],
  request: [
    "All that ever happens to a request is two counters. The line below is how many of its tokens are computed, the one above how many exist. Prefill climbs in chunks, a prefix hit starts high, decode lets both rise together, preemption drops the lower one to nothing, speculation makes it jump.",
    "3-two-counters",
  ],
  figures: [
    "Tokens a second, out and in, and how long requests wait: p99 means that 99 of 100 were faster, of those that ended in the last minute. The bar is a turn of the loop: the host's work, and its wait for the device. The limit is the time to read weights and cache once, where that is known.",
    "5-the-loop-and-what-overlaps",
  ],
  timeline: [
    "Each line is one request: pale while it waits in the queue, striped while its prompt is computed, solid while it decodes. On top are the steps, dark where they computed prompts. Zoom in with the wheel or the buttons. The file opens in Perfetto, like the one that --trace writes.",
    "4-a-step",
  ],
};
