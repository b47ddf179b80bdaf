// What the engine does, as it happens: reads GET /glass/events, keeps the state, and the last 1,000 steps to go back to.
//   connect({apiKey, core, model, onState, onStatus}) -> a Feed; `model`: which of several
//     onState(feed) for each frame; onStatus("connecting" | "live" | "lost" | "off", words)

import { State } from "./engine/state.js";

const KEPT = 1000; // steps that can be gone back to
const BETWEEN = 100; // steps, or frames, between two states that are kept whole
const MOST_FRAMES = 4 * KEPT; // frames without steps count, too
const SAMPLES = 120; // of the figures: a minute
const RETRY = 1000;
const SLOW = 4; // steps a second in slow motion

export function connect(options) {
  const feed = new Feed(options);
  feed.open();
  return feed;
}

export class Feed {
  constructor({ apiKey = null, core = 0, model = null, onState = () => {}, onStatus = () => {} }) {
    Object.assign(this, { apiKey, core, model, onState, onStatus });
    this.status = "connecting";
    this.words = "connecting";
    this.live = null; // the newest State; null: none has come yet
    this.view = null; // the one that is shown: the newest, unless paused
    this.mode = "live"; // live | paused | slow
    this.stats = null; // the newest of all cores
    this.samples = []; // {time, in, out, running, waiting, kv, limit} each half second
    this.changes = 0; // counts all that could change a picture
    this.coreState = "loaded"; // died | loaded
    this.closed = false;
    this.#forget();
  }

  async open() {
    while (!this.closed) {
      const stop = (this.stop = new AbortController());
      this.chosen = false;
      try {
        await this.#read(stop.signal);
        if (!this.closed) this.#say("lost", "connection lost; trying again");
      } catch (error) {
        if (this.closed) return;
        if (this.chosen) continue; // another core
        if (error.final) {
          this.#say("off", error.message);
          return;
        }
        this.#say("lost", error.wait ? error.message : "the server cannot be reached; trying again");
      }
      await new Promise((done) => setTimeout(done, RETRY));
    }
  }

  close() {
    this.closed = true;
    clearInterval(this.timer);
    this.stop?.abort();
  }

  /** Look at another core. */
  choose(core) {
    if (core === this.core) return;
    this.core = core;
    this.live = this.view = null;
    this.samples = [];
    this.#forget();
    this.resume();
    this.#say("connecting", "connecting");
    this.chosen = true;
    this.stop?.abort(); // the loop opens another
  }

  /** What a request in flight says at these positions; null where the server hides texts, or the request has ended. */
  async text(id, start, stop) {
    if (!this.stats?.texts) return null;
    const query = new URLSearchParams({ id, start, stop });
    try {
      const response = await fetch(new URL(`../glass/text?${query}`, import.meta.url), { headers: this.#headers });
      return response.ok ? (await response.json()).text : null;
    } catch {
      return null;
    }
  }

  get #headers() {
    return this.apiKey ? { authorization: `Bearer ${this.apiKey}` } : {};
  }

  // ---- what is shown

  get first() {
    return this.frames.length ? this.frames[0].n : 0;
  }

  /** Stand still. What comes is kept, and seen later. */
  pause() {
    if (!this.live || this.mode === "paused") return;
    clearInterval(this.timer);
    if (this.view === this.live) this.view = this.live.clone();
    this.mode = "paused";
    this.#changed();
  }

  resume() {
    clearInterval(this.timer);
    this.mode = "live";
    this.view = this.live;
    this.#changed();
  }

  /** From where it is, a few steps a second, until it is told otherwise. */
  slow() {
    if (!this.live) return;
    this.pause();
    this.mode = "slow";
    this.timer = setInterval(() => this.#move(this.view.n + 1), 1000 / SLOW);
    this.#changed();
  }

  stepBack() {
    if (!this.live) return;
    this.pause();
    this.seek(this.view.n - 1);
  }

  stepForward() {
    if (!this.live) return;
    this.pause();
    this.seek(this.view.n + 1);
  }

  /** Show the state after step n, one of the last 1,000. */
  seek(n) {
    if (!this.live) return;
    this.pause();
    this.#move(n);
  }

  #move(n) {
    const wanted = Math.min(Math.max(n, this.first), this.live.n);
    const from = this.whole.findLast((kept) => kept.state.n <= wanted);
    if (!from || wanted === this.view.n) return;
    const state = from.state.clone();
    for (let i = from.at - this.dropped; i < this.frames.length && state.n < wanted; i++) state.apply(this.frames[i], wanted);
    this.view = state;
    this.#changed();
  }

  // ---- what comes

  async #read(signal) {
    const query = new URLSearchParams({ core: this.core, ...(this.model !== null && { model: this.model }) });
    const url = new URL(`../glass/events?${query}`, import.meta.url);
    const response = await fetch(url, { headers: this.#headers, signal, cache: "no-store" });
    if (!response.ok) throw await refusal(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) this.#block(block);
      this.#changed();
    }
  }

  #block(block) {
    let name = null, data = null;
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data = line.slice(6);
    }
    if (name !== null && data !== null) this.take(name, JSON.parse(data));
  }

  /** One event of the feed. */
  take(name, value) {
    if (name === "snapshot") this.#begin(new State(value));
    else if (name === "request") this.events = this.events.concat(value.events);
    else if (name === "step") this.#frame(value);
    else if (name === "stats") this.#sample(value);
    else if (name === "core") {
      this.coreState = value.state;
      if (value.state === "died") this.#say("lost", `core ${value.core} died: ${value.why}`);
      else this.#say("connecting", `core ${value.core} has loaded its model`);
    }
  }

  #begin(state) {
    this.#forget();
    this.live = state;
    this.begun = (this.begun ?? 0) + 1;
    this.coreState = "loaded";
    if (this.mode === "live" || !this.view || this.view.numBlocks !== state.numBlocks) this.resume();
    this.#keep();
    this.#say("live", "live");
  }

  #forget() {
    this.events = []; // that wait for their step
    this.frames = []; // {n, events, step} of the last steps
    this.dropped = 0; // frames that are not kept any more
    this.whole = []; // {state, at}: the state before frame number `at`
  }

  #keep() {
    this.whole.push({ state: this.live.clone(), at: this.dropped + this.frames.length });
  }

  #frame(step) {
    if (!this.live) return;
    const frame = { events: this.events, step, n: this.live.n };
    this.events = [];
    this.frames.push(frame);
    this.live.apply(frame);
    const last = this.whole.at(-1);
    if (this.live.n - last.state.n >= BETWEEN || this.dropped + this.frames.length - last.at >= BETWEEN) this.#keep();
    while (this.whole.length > 2 && (this.whole[1].state.n <= this.live.n - KEPT || this.frames.length > MOST_FRAMES)) {
      this.whole.shift();
      const count = this.whole[0].at - this.dropped;
      this.frames.splice(0, count);
      this.dropped += count;
    }
  }

  #sample(stats) {
    this.stats = stats;
    const state = this.live, last = this.samples.at(-1);
    if (!state) return;
    const total = { in: state.tokensIn, out: state.tokensOut };
    const seconds = last ? stats.now - last.time : 0;
    const rate = (name) => (seconds > 0.1 && last.begun === this.begun ? Math.max(0, total[name] - last.total[name]) / seconds : 0);
    let running = 0;
    for (const request of state.requests.values()) running += request.state === "running";
    this.samples.push({
      time: stats.now, begun: this.begun, total, in: rate("in"), out: rate("out"), running, waiting: state.requests.size - running,
      kv: state.inUse / state.numBlocks, limit: state.limit?.tokens ?? null,
    });
    if (this.samples.length > SAMPLES) this.samples.shift();
  }

  #say(status, words) {
    this.status = status;
    this.words = words;
    this.onStatus(status, words);
    this.#changed();
  }

  #changed() {
    this.changes += 1;
    this.onState(this);
  }
}

async function refusal(response) {
  let words = `the server answered ${response.status}`;
  try {
    words = (await response.json()).error.message;
  } catch {} // not the server's own words
  const error = new Error(response.status === 404 ? "this server sends no events of its engine" : words);
  error.final = [401, 403, 404].includes(response.status);
  error.wait = true;
  return error;
}
