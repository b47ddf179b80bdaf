// The engine's side of the page: panels over one feed, words drawn a few times a second and pictures with each frame.
//   mount(element, feed); showRequest(id): light up a request, by the engine's id or by what it begins with

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { Blocks } from "./engine/blocks.js";
import { Controls } from "./engine/controls.js";
import { Figures, Tiles } from "./engine/figures.js";
import { Queue } from "./engine/queue.js";
import { Chosen } from "./engine/request.js";
import { Steps } from "./engine/steps.js";
import { Timeline } from "./engine/timeline.js";
import { Tree } from "./engine/tree.js";

const WORDS = 200; // ms between two drawings of what is not a canvas
let current = null; // the Source of the mounted view
let wanted = null; // a request that was asked for before there was one

/** What all drawings read, and the loop that draws them. */
class Source {
  constructor(feed) {
    this.feed = feed;
    this.drawings = []; // {canvas, draws}
    this.picked = null; // id of the request that is lit up
    this.chosen = null; // block
    this.span = 30; // seconds of the timeline, and how far back it ends
    this.back = 0;
    this.moved = false;
    this.rerender = () => {};
    this.frames = 0; // that drew something, and how long they took: for measuring
    this.busy = 0;
    this.longest = 0;
    this.register = (canvas, make) => {
      const entry = { canvas, draws: make(this) };
      this.drawings.push(entry);
      return () => this.drawings.splice(this.drawings.indexOf(entry), 1);
    };
    this.pick = (id) => {
      this.picked = id;
      if (this.state) this.#recognize(this.state);
      this.touch();
      this.rerender();
    };
    this.#loop();
  }

  get state() {
    return this.feed.view;
  }

  /** The picked request; else one that runs, until it has ended, and then the one that came last. */
  shown(state) {
    if (this.picked !== null) return state.find(this.picked);
    const same = this.followed && (state.requests.get(this.followed) ?? (state.requests.size ? null : state.find(this.followed)));
    if (same) return same;
    const found = this.#latest(state);
    this.followed = found?.id ?? null;
    return found;
  }

  #latest(state) {
    let found = null;
    for (const request of state.requests.values()) if (request.state === "running" && request.admitted >= (found?.admitted ?? 0)) found = request;
    return found ?? state.ended.at(-1) ?? null;
  }

  touch() {
    for (const { canvas } of this.drawings) canvas.dirty = true;
  }

  #loop() {
    let seen = -1, spoken = 0;
    const frame = (time) => {
      if (this.over) return;
      this.frame = requestAnimationFrame(frame);
      const began = performance.now(), changed = seen !== this.feed.changes;
      if (changed && this.state) this.#recognize(this.state);
      let drawn = false;
      for (const { canvas, draws } of this.drawings) {
        if (!canvas.visible || !(changed || canvas.dirty)) continue;
        canvas.dirty = false;
        draws.draw(time);
        drawn = true;
      }
      seen = this.feed.changes;
      if (changed && time - spoken >= WORDS) {
        spoken = time;
        this.rerender();
        this.stale = false;
      } else if (changed) this.stale = true;
      else if (this.stale && time - spoken >= WORDS) {
        spoken = time;
        this.stale = false;
        this.rerender();
      }
      if (!drawn) return;
      const took = performance.now() - began;
      this.frames += 1;
      this.busy += took;
      this.longest = Math.max(this.longest, took);
    };
    this.frame = requestAnimationFrame(frame);
  }

  /** A request may have been picked by what its id begins with, before it came. */
  #recognize(state) {
    if (this.picked !== null && !state.requests.has(this.picked)) this.picked = state.find(this.picked)?.id ?? this.picked;
  }

  close() {
    this.over = true;
    cancelAnimationFrame(this.frame);
  }
}

function Engine({ source }) {
  const [, again] = useState(0);
  useEffect(() => {
    source.rerender = () => again((n) => n + 1);
    return () => (source.rerender = () => {});
  }, [source]);
  const { feed, register, pick, picked } = source, state = feed.view;
  const shared = { feed, state, source, register, pick, picked };
  return html`<div class="engine" data-status=${feed.status} data-mode=${feed.mode} data-core=${feed.coreState} data-step=${state ? state.n : 0}>
    <${Controls} ...${shared} />
    ${feed.status === "off"
      ? html`<p class="off" role="status">${feed.words}</p>`
      : html`
        <${Tiles} ...${shared} />
        <div class="grid">
          <${Queue} ...${shared} />
          <${Steps} ...${shared} />
          <${Blocks} ...${shared} />
          <${Tree} ...${shared} />
          <${Chosen} ...${shared} />
          <${Figures} ...${shared} />
          <${Timeline} ...${shared} />
        </div>`}
  </div>`;
}

export function mount(element, feed) {
  current?.close();
  render(null, element);
  const source = (current = new Source(feed));
  if (wanted !== null) source.picked = wanted;
  element.source = source; // for who measures
  // not at once: effects of what is rendered inside of an effect are lost
  queueMicrotask(() => source === current && render(html`<${Engine} source=${source} />`, element));
}

export function showRequest(id) {
  wanted = id;
  if (!current) return;
  current.pick(id);
  document.querySelector("[data-panel=request]")?.scrollIntoView({ block: "center", behavior: "smooth" });
}
