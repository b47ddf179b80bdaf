// Where the guided scenes act: it sends their requests, times every token, and reads the server's counters before and after.

import { ask, askJson, events } from "./api.js";

const STORY = `A headrace leads the water of a river onto the wheel of a mill. Where the river runs low a weir holds it back, and a gate decides how
much of it may pass. The wheel turns a shaft, the shaft turns the stones, and between the stones the grain becomes flour. When more grain is brought
than one pair of stones can grind, the miller lets the sacks wait in a row, and takes from each a little, so that nobody goes home with nothing. `;

export class Stage {
  constructor(model) {
    this.model = model;
    this.server = null; // what it last said of itself
    this.controller = new AbortController();
  }

  async look() {
    this.server = await askJson(`glass/server?${new URLSearchParams({ model: this.model })}`, { signal: this.signal });
    return this.server;
  }

  get signal() {
    return this.controller.signal;
  }

  /** Tokens that all cores' caches hold, or null. */
  get capacity() {
    const { num_blocks, block_size, cores } = this.server;
    return num_blocks ? num_blocks * block_size * Math.max(1, cores) : null;
  }

  leave() {
    this.controller.abort();
  }

  /** Exactly so many token ids of a story; with a `salt` nobody has sent them before. */
  async ids(count, salt = "") {
    if (count < 1) return [];
    const body = { model: this.model, prompt: salt + STORY.repeat(2) };
    const { tokens } = await askJson("tokenize", { method: "POST", body, signal: this.signal });
    const all = [...tokens];
    while (all.length < count) all.push(...tokens.slice(1));
    return all.slice(0, count);
  }

  /** Sends a prompt (text or ids; several lists of ids are as many answers) and reads the stream to its end; `onToken(result)` at each
   * piece. The texts of the answer, and the times of its tokens in ms. */
  async complete(prompt, { max_tokens, onToken = () => {}, ...more }) {
    const body = {
      model: this.model, prompt, max_tokens, temperature: 0, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...more,
    };
    return this.stream("v1/completions", body, onToken);
  }

  async stream(path, body, onToken = () => {}) {
    const result = { id: null, texts: [], ends: [], times: [], output: 0, prompt: 0, cached: 0, began: performance.now() };
    const response = await ask(path, { method: "POST", body, signal: this.signal });
    for await (const { id, choices, usage } of events(response)) {
      result.id = id;
      for (const { index, text, delta, finish_reason } of choices) {
        result.texts[index] = (result.texts[index] ?? "") + (text ?? delta?.content ?? "");
        if (finish_reason) result.ends[index] = finish_reason;
      }
      if (!usage) continue;
      const now = performance.now();
      for (let n = result.output; n < usage.completion_tokens; n++) result.times.push(now);
      result.output = usage.completion_tokens;
      result.prompt = usage.prompt_tokens;
      result.cached = usage.prompt_tokens_details.cached_tokens;
      onToken(result);
    }
    result.over = true;
    return result;
  }

  async killCore() {
    await ask("glass/kill-core", { method: "POST", body: {}, signal: this.signal });
  }
}

/** ms from the request to its first token. */
export function ttft({ began, times }) {
  return times.length ? times[0] - began : NaN;
}

/** The longest pause between two tokens that came between these moments, in ms. */
export function longestPause({ times }, from = -Infinity, to = Infinity) {
  let longest = 0;
  for (let i = 1; i < times.length; i++) {
    if (times[i] >= from && times[i - 1] <= to) longest = Math.max(longest, times[i] - times[i - 1]);
  }
  return longest;
}

/** Its usual time between tokens, in ms. */
export function usualPause({ times }) {
  return times.length > 1 ? (times.at(-1) - times[0]) / (times.length - 1) : NaN;
}

export function tokensBetween({ times }, from, to) {
  return times.filter((time) => time >= from && time <= to).length;
}
