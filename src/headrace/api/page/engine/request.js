// One request: its two counters, over its whole life.

import { html } from "../vendor/htm-preact.js";
import { Drawing, colours } from "./canvas.js";
import { Panel } from "./panel.js";
import { tokensOf } from "./state.js";
import { count, percent, plural, seconds, short } from "./words.js";

const OFFERED = 80; // requests, the latest
const HEIGHT = 180, LEFT = 52, BOTTOM = 20, TOP = 10, RIGHT = 10;

class Counters {
  constructor(canvas, source) {
    this.canvas = canvas;
    this.source = source;
  }

  draw() {
    const { canvas, source } = this, { state } = source, { context, width } = canvas, colour = colours();
    canvas.all = false;
    canvas.clear();
    const request = state && source.shown(state);
    if (!request) return;
    const end = request.ended || state.now, begin = request.arrived, most = Math.max(tokensOf(request), request.prompt, 1);
    const x = (time) => LEFT + ((width - LEFT - RIGHT) * (Math.min(time, end) - begin)) / Math.max(end - begin, 1e-3);
    const y = (tokens) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * tokens) / most;
    const points = [...request.trail];
    if (!request.ended && request.state === "running") points.push([state.now, request.scheduled, tokensOf(request)]);
    if (!points.length) points.push([state.now, 0, request.known]);
    // the prompt, and the part of it that was found in the cache
    context.fillStyle = colour.sunk;
    context.fillRect(LEFT, y(request.prompt), width - LEFT - RIGHT, y(0) - y(request.prompt));
    const hue = colour.owners[Math.max(0, request.hue)];
    context.fillStyle = hue;
    context.globalAlpha = 0.22;
    context.beginPath();
    context.moveTo(x(points[0][0]), y(0));
    for (const [time, scheduled] of points) context.lineTo(x(time), y(scheduled));
    context.lineTo(x(points.at(-1)[0]), y(0));
    context.fill();
    context.globalAlpha = 1;
    this.#line(points, x, y, 2, colour.fg, 1.2, [3, 3]);
    this.#line(points, x, y, 1, hue, 2, []);
    for (const [value, words] of [[0, "0"], [request.prompt, count(request.prompt)], [most, count(most)]]) {
      if (value === request.prompt && Math.abs(y(value) - y(most)) < 12 && value !== most) continue;
      canvas.text(words, LEFT - 8, y(value), { align: "right" });
    }
    if (request.cached) {
      context.fillStyle = colour.good;
      context.fillRect(LEFT - 3, y(request.cached), 3, y(0) - y(request.cached));
    }
    canvas.text("prompt", width - RIGHT - 4, y(request.prompt) + 8, { align: "right", size: 9.5 });
    canvas.text("arrived", LEFT, HEIGHT - 7, { size: 9.5 });
    canvas.text(seconds(end - begin), width - RIGHT, HEIGHT - 7, { align: "right", size: 9.5 });
    canvas.dirty = false;
  }

  #line(points, x, y, column, colour, wide, dash) {
    const { context } = this.canvas;
    context.strokeStyle = colour;
    context.lineWidth = wide;
    context.setLineDash(dash);
    context.beginPath();
    points.forEach((point, i) => context[i ? "lineTo" : "moveTo"](x(point[0]), y(point[column])));
    context.stroke();
    context.setLineDash([]);
  }
}

function describe(request) {
  const tokens = tokensOf(request);
  const parts = [`${count(request.scheduled)} of ${plural(tokens, "token")} computed`, `prompt ${count(request.prompt)}`];
  if (request.cached) parts.push(`${count(request.cached)} found in the cache`);
  if (request.preemptions) parts.push(`preempted ${plural(request.preemptions, "time")}`);
  return parts.join(", ");
}

const STATES = { waiting: "waits", running: "runs", ended: "has ended" };
const stateOf = (request) => STATES[request.state] + (request.reason ? `: ${request.reason}` : "");

export function Chosen({ state, source, register, pick, picked }) {
  const request = state ? source.shown(state) : null;
  const words = request ? describe(request) : "no request yet";
  const running = state ? [...state.requests.values()] : [];
  const tools = html`<select
    aria-label="Request" value=${picked ?? ""} onChange=${(event) => pick(event.target.value || null)}
  >
    <option value="">follow one</option>
    ${picked !== null && !running.some((one) => one.id === picked) && html`<option value=${picked}>${short(picked)}</option>`}
    ${running.slice(-OFFERED).map((one) => html`<option value=${one.id}>${short(one.id)}${one.state === "waiting" ? " (waits)" : ""}</option>`)}
  </select>`;
  return html`<${Panel} name="request" title="Two counters" figure=${request ? html`<code>${short(request.id)}</code> ${stateOf(request)}` : ""} tools=${tools}>
    ${picked !== null && !request && html`<p class="rest" role="status">This request is not here any more, or has not come yet.</p>`}
    <${Drawing} height=${HEIGHT} label=${`Two counters of a request: ${words}`} use=${(canvas) => register(canvas, (given) => new Counters(canvas, given))} />
    <ul class="legend" aria-hidden="true"><li><i class="cell"></i>computed</li><li><i class="cell exist"></i>exist</li><li><i class="cell found"></i>found in the cache</li></ul>
    ${request && html`<dl class="facts">
      <div><dt>computed</dt><dd>${count(request.scheduled)}</dd></div>
      <div><dt>exist</dt><dd>${count(tokensOf(request))}</dd></div>
      <div><dt>from the cache</dt><dd>${count(request.cached)} <small>${percent(request.cached / request.prompt)}</small></dd></div>
      <div><dt>in the queue</dt><dd>${seconds((request.admitted || state.now) - request.arrived)}</dd></div>
      <div><dt>first token</dt><dd>${request.first ? seconds(request.first - request.arrived) : "–"}</dd></div>
      <div><dt>preempted</dt><dd>${count(request.preemptions)}</dd></div>
    </dl>`}
  <//>`;
}
