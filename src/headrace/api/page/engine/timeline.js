// The last seconds: requests as lines of queue, prefill and decode under the steps; to be zoomed, and saved for Perfetto.

import { html, useRef, useState } from "../vendor/htm-preact.js";
import { Drawing, colours } from "./canvas.js";
import { Panel } from "./panel.js";
import { PREFILL } from "./state.js";
import { plural } from "./words.js";

const HEIGHT = 300, STEPS = 16, AXIS = 16, WINDOW = 30, SHORTEST = 0.2;

const since = (state, from) => [...state.ended, ...state.requests.values()].filter((request) => (request.ended || state.now) >= from);

/** Requests with a line for each, so that two that overlap have different ones; [request, line]. */
function lines(state, from) {
  const alive = since(state, from).sort((a, b) => a.arrived - b.arrived);
  const ends = [], found = [];
  for (const request of alive) {
    let line = ends.findIndex((end) => end <= request.arrived);
    if (line < 0) line = ends.length;
    ends[line] = (request.ended || Infinity) + 0.02;
    found.push([request, line]);
  }
  return { found, number: ends.length };
}

class Lines {
  constructor(canvas, source) {
    this.canvas = canvas;
    this.source = source;
    this.due = 0;
    this.spots = [];
  }

  draw(time) {
    const { canvas, source } = this, { state, span } = source, { context, width } = canvas, colour = colours();
    if (!canvas.all && time < this.due && !source.moved) return;
    this.due = time + 60;
    canvas.all = canvas.dirty = source.moved = false;
    canvas.clear();
    if (!state) return;
    const end = state.now - source.back, begin = end - span;
    const x = (at) => (width * (at - begin)) / span;
    this.#axis(begin, end, x);
    for (let i = state.steps.length - 1; i >= 0; i--) {
      const step = state.steps[i];
      if (step.time > end) continue;
      if (step.time < begin) break;
      const wide = step.times.slice(0, 4).reduce((sum, part) => sum + part, 0) / 1e6;
      context.fillStyle = step.rows.some((row) => row.kind === PREFILL) ? colour.fg : colour.muted;
      context.fillRect(x(step.time), AXIS, Math.max(0.6, (width * wide) / span - 0.4), STEPS - 5);
    }
    const { found, number } = lines(state, begin);
    const pitch = Math.max(0.75, Math.min(12, (HEIGHT - AXIS - STEPS) / Math.max(1, number))), thick = Math.max(0.75, pitch - (pitch > 4 ? 2 : 0.5));
    this.spots = [];
    for (const [request, line] of found) {
      const y = AXIS + STEPS + line * pitch;
      if (y > HEIGHT) break;
      this.#request(request, y, thick, x, state.now, width);
      this.spots.push([request, y, x(request.arrived), x(request.ended || state.now)]);
    }
    this.pitch = pitch;
  }

  #axis(begin, end, x) {
    const { canvas } = this, { context } = canvas, colour = colours();
    const every = [0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10].find((step) => (end - begin) / step <= 8) ?? 10;
    for (let back = 0; back <= end - begin; back += every) {
      const at = Math.round(x(end - back));
      context.fillStyle = colour.line;
      context.fillRect(at, AXIS - 4, 1, HEIGHT);
      if (at < 24) continue;
      const ago = Number((back + this.source.back).toFixed(2));
      canvas.text(ago === 0 ? "now" : `−${ago} s`, back === 0 ? at - 4 : at, 6, { align: back === 0 ? "right" : "center", size: 9.5 });
    }
  }

  #request(request, y, thick, x, now, width) {
    const { canvas, source } = this, { context } = canvas, colour = colours();
    const hue = Math.max(0, request.hue), faint = source.picked !== null && source.picked !== request.id;
    const tones = faint ? colour.pale : colour.owners;
    request.phases.forEach(([at, phase], i) => {
      const until = request.phases[i + 1]?.[0] ?? (request.ended || now);
      const from = Math.max(-1, x(at)), wide = Math.max(0.6, Math.min(width + 1, x(until)) - from);
      if (x(until) < 0 || from > width) return;
      context.fillStyle = phase === "queue" ? colour.line : phase === "prefill" ? colour.fg : tones[hue];
      context.globalAlpha = phase === "prefill" && faint ? 0.3 : 1;
      context.fillRect(from, phase === "queue" ? y + thick * 0.3 : y, wide, phase === "queue" ? Math.max(1, thick * 0.4) : thick);
      context.globalAlpha = 1;
    });
  }

  requestAt(x, y) {
    return this.spots.find(([, top, from, to]) => y >= top && y < top + this.pitch && x >= from - 2 && x <= to + 2)?.[0] ?? null;
  }
}

/** What `--trace` writes, of the steps and requests that are known here. */
export function trace(state) {
  const events = [], us = (at) => Math.round((at - zero) * 1e6);
  const zero = Math.min(...[...state.steps.map((step) => step.time), ...state.ended.map((request) => request.arrived), state.now]);
  const name = (pid, words) => events.push({ ph: "M", name: "process_name", pid, tid: 0, args: { name: words } });
  name(1, "engine");
  name(2, "requests");
  for (const step of state.steps) {
    const args = { tokens: step.tokens, seqs: step.seats.length + step.rows.length };
    let at = us(step.time);
    const slice = (words, ts, dur) => events.push({ ph: "X", name: words, pid: 1, tid: 1, ts, dur, args });
    const parts = step.times.slice(0, 4);
    slice(`${args.seqs} seqs, ${args.tokens} tokens`, at, parts.reduce((sum, part) => sum + part, 0));
    ["schedule", "launch", "wait", "settle"].forEach((words, i) => {
      if (parts[i] > 0) slice(words, at, parts[i]);
      at += parts[i] ?? 0;
    });
  }
  for (const request of [...state.ended, ...state.requests.values()]) {
    const common = { cat: "request", id: request.id, pid: 2, tid: 0 }, end = request.ended || state.now;
    const phase = (words, from, to, args = {}) => {
      if (to <= from) return;
      events.push({ ph: "b", name: words, ...common, ts: us(from), args }, { ph: "e", name: words, ...common, ts: us(to) });
    };
    phase(request.id, request.arrived, end, { prompt_tokens: request.prompt, cached_tokens: request.cached, finish_reason: request.reason });
    request.phases.forEach(([at, words], i) => phase(words, at, request.phases[i + 1]?.[0] ?? end));
  }
  return { displayTimeUnit: "ms", traceEvents: events };
}

function save(state) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(trace(state))], { type: "application/json" }));
  link.download = "headrace-trace.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function Timeline({ state, source, register, pick }) {
  const drawing = useRef(null);
  const [, again] = useState(0);
  const move = (span, back = source.back) => {
    source.span = Math.min(WINDOW, Math.max(SHORTEST, span));
    source.back = Math.min(WINDOW - source.span, Math.max(0, back));
    source.moved = true;
    source.touch();
    again((n) => n + 1);
  };
  const use = (canvas) => {
    const wheel = (event) => {
      if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) < Math.abs(event.deltaY) && !event.altKey && document.activeElement !== canvas.element) return;
      event.preventDefault(); // only of who has chosen the drawing: the page scrolls with the wheel, too
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(source.span, source.back - (event.deltaX * source.span) / canvas.width);
      else move(source.span * Math.exp(event.deltaY / 300));
    };
    canvas.element.addEventListener("wheel", wheel, { passive: false });
    return register(canvas, (given) => (drawing.current = new Lines(canvas, given)));
  };
  const keyed = (event) => {
    const far = source.span / 4;
    const done = { "+": () => move(source.span / 1.5), "-": () => move(source.span * 1.5), ArrowLeft: () => move(source.span, source.back + far), ArrowRight: () => move(source.span, source.back - far) }[event.key];
    if (!done) return;
    event.preventDefault();
    done();
  };
  const clicked = (event) => pick(drawing.current.requestAt(event.offsetX, event.offsetY)?.id ?? null);
  const number = state ? since(state, state.now - WINDOW).length : 0;
  const tools = html`<span class="tools">
    <button class="plain" aria-label="Zoom in" title="Zoom in" onClick=${() => move(source.span / 1.5)}>+</button>
    <button class="plain" aria-label="Zoom out" title="Zoom out" onClick=${() => move(source.span * 1.5)}>−</button>
    <button class="plain" disabled=${!state} onClick=${() => save(state)}>Save as Perfetto</button>
  </span>`;
  return html`<${Panel} name="timeline" title="Timeline" figure=${`${Number(source.span.toFixed(1))} s`} tools=${tools}>
    <${Drawing} height=${HEIGHT} label=${`Timeline of the last ${WINDOW} seconds: ${plural(number, "request")} under ${plural(state ? state.steps.length : 0, "step")}`} use=${use} tabindex="0" onKeyDown=${keyed} onClick=${clicked} />
    <ul class="legend" aria-hidden="true"><li><i class="cell wait"></i>queue</li><li><i class="cell chunk"></i>prefill</li><li><i class="cell held"></i>decode</li></ul>
  <//>`;
}
