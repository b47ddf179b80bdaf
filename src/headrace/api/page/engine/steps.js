// The steps as strips, the newest on top: what each request has in it, and how much of the budget all together.

import { html } from "../vendor/htm-preact.js";
import { Drawing, colours } from "./canvas.js";
import { Panel } from "./panel.js";
import { DRAFTED, PREFILL } from "./state.js";
import { count, plural, seconds } from "./words.js";

const STRIP = 10, GAP = 2, LEFT = 90, TOP = 16, HEIGHT = 246, RIGHT = 14, BETWEEN = 10;
const PITCH = STRIP + GAP;
const ROWS = Math.floor((HEIGHT - TOP) / PITCH);
const DECODES = 0.42; // of the width: a cell for each request that decodes; the rest is for prompts, by their tokens
const WIDEST = 14;

/** Draws the last steps of `source.state`; what is there already moves down, and only the new ones are drawn. */
class Strips {
  constructor(canvas, source) {
    this.canvas = canvas;
    this.source = source;
    this.last = null;
  }

  get #middle() {
    return LEFT + DECODES * (this.canvas.width - LEFT - RIGHT);
  }

  #cell(state) {
    return Math.min(WIDEST, (this.#middle - BETWEEN - LEFT) / state.slotsMost);
  }

  /** Where the token of this number in a step is, on the scale of the prompts. */
  #x(tokens, state) {
    return this.#middle + ((this.canvas.width - RIGHT - this.#middle) * Math.min(tokens, state.budget)) / state.budget;
  }

  draw() {
    const { canvas, source } = this, { state, picked } = source, { context, width, height, scale } = canvas;
    const steps = state ? state.steps : [];
    const newest = steps.at(-1) ?? null;
    const fresh = this.last ? steps.length - 1 - steps.lastIndexOf(this.last) : ROWS;
    if (canvas.all || !this.last || fresh >= ROWS || !steps.includes(this.last) || picked !== this.picked) {
      canvas.clear();
      if (state) this.#axis(state);
      for (let i = 0; i < ROWS && i < steps.length; i++) this.#strip(state, steps[steps.length - 1 - i], i);
    } else {
      const shift = fresh * PITCH;
      if (shift) {
        const rows = Math.round((height - TOP - shift) * scale), top = Math.round(TOP * scale);
        context.drawImage(canvas.element, 0, top, width * scale, rows, 0, TOP + shift, width, rows / scale);
      }
      const again = Math.min(fresh + 2, steps.length, ROWS); // the drafts of those before have been verified by now
      for (let i = 0; i < again; i++) this.#strip(state, steps[steps.length - 1 - i], i);
    }
    this.last = newest;
    this.picked = picked;
    canvas.all = false;
  }

  #axis(state) {
    const { canvas } = this, { context } = canvas, colour = colours();
    const all = LEFT + this.#cell(state) * state.slotsMost;
    canvas.text(`${count(state.slotsMost)} slots`, all, 6, { align: "right", size: 9.5 });
    context.fillStyle = colour.line;
    context.fillRect(all, TOP - 3, 1, HEIGHT);
    for (const tick of [0, state.budget / 4, state.budget / 2, state.budget]) {
      const x = Math.round(this.#x(tick, state)), budget = tick === state.budget;
      context.fillStyle = budget ? colour.warn : colour.line;
      context.fillRect(x, TOP - 3, 1, budget ? HEIGHT : 3);
      if (budget) canvas.text(`budget ${count(tick)}`, x + 6, 6, { align: "right", colour: colour.warn, size: 9.5 });
      else if (tick && x - this.#middle > 30) canvas.text(count(tick), x, 6, { align: "center", size: 9.5 });
    }
  }

  #strip(state, step, place) {
    const { canvas, source } = this, { context } = canvas, colour = colours();
    const y = TOP + place * PITCH, cell = this.#cell(state);
    for (const [from, to] of [[0, LEFT + cell * state.slotsMost], [this.#middle - 2, this.#x(state.budget, state)]]) {
      context.fillStyle = colour.raised;
      context.fillRect(from, y - 1, to - from, PITCH);
    }
    canvas.text(`${step.n}`, 38, y + STRIP / 2, { align: "right", size: 9.5 });
    const took = step.times.slice(0, 4).reduce((sum, part) => sum + part, 0) / 1e6;
    canvas.text(seconds(took), LEFT - 8, y + STRIP / 2, { align: "right", size: 9.5, colour: colour.fg });
    const faint = (request) => source.picked !== null && request?.id !== source.picked;
    const tone = (request, hue) => (faint(request) ? colour.pale : colour.owners)[hue] ?? colour.muted;
    let x = LEFT, drawn = LEFT;
    for (let i = 0; i < step.hues.length; i++) {
      x += cell;
      const own = source.picked !== null && !faint(step.seats[i]);
      if (x - drawn < 1 && i < step.hues.length - 1 && !own) continue; // finer than can be seen
      context.fillStyle = tone(step.seats[i], step.hues[i]);
      context.fillRect(drawn, y, Math.max(1, x - drawn - (cell > 3 ? 1 : 0)), STRIP);
      drawn = x;
    }
    let tokens = step.hues.length;
    for (const row of step.rows) {
      if (row.kind === PREFILL) continue;
      context.fillStyle = tone(row.request, row.request?.hue ?? 0);
      this.#drafts(x, y, Math.max(1.5, cell - (cell > 3 ? 1 : 0)), row);
      x += cell;
      tokens += row.tokens;
    }
    let at = this.#x(tokens, state);
    context.fillStyle = colour.line; // what the decodes take of the budget
    context.fillRect(this.#middle, y + STRIP / 2 - 1, at - this.#middle - 1, 2);
    for (const row of step.rows) {
      if (row.kind !== PREFILL) continue;
      tokens += row.tokens;
      const end = this.#x(tokens, state);
      context.fillStyle = tone(row.request, row.request?.hue ?? 0);
      this.#chunk(at, y, Math.max(1.5, end - at - 1), row);
      at = end;
    }
    if (step.preempted.length) canvas.text(`▾${step.preempted.length}`, Math.min(at + 4, this.#x(state.budget, state) - 24), y + STRIP / 2, { colour: colour.warn, size: 10.5 });
  }

  #chunk(x, y, wide, row) {
    const { canvas } = this, { context } = canvas;
    context.fillRect(x, y, wide, STRIP);
    if (wide > 34) canvas.text(count(row.tokens), x + 5, y + STRIP / 2 + 0.5, { colour: colours().raised, size: 9.5 });
  }

  #drafts(x, y, wide, row) {
    const { context } = this.canvas, colour = colours();
    const each = wide / row.tokens, right = row.right < 0 ? row.drafts : row.right;
    context.fillRect(x, y, Math.max(1, each * (1 + right) - 0.5), STRIP);
    if (right >= row.drafts) return;
    const from = x + each * (1 + right);
    context.fillStyle = colour.raised;
    context.fillRect(from, y, wide - each * (1 + right), STRIP);
    context.strokeStyle = colour.warn;
    context.lineWidth = 1;
    context.strokeRect(from + 0.5, y + 0.5, Math.max(1, wide - each * (1 + right) - 1), STRIP - 1);
  }
}

export function describeStep(step) {
  const prefill = step.rows.filter((row) => row.kind === PREFILL), drafted = step.rows.filter((row) => row.kind === DRAFTED);
  const parts = [`step ${step.n}: ${plural(step.seats.length + drafted.length, "decode")}`, plural(prefill.length, "prompt chunk")];
  const drafts = drafted.reduce((sum, row) => sum + row.drafts, 0), right = drafted.reduce((sum, row) => sum + Math.max(0, row.right), 0);
  if (drafts) parts.push(`${right} of ${plural(drafts, "draft")} right`);
  return `${parts.join(", ")}, ${plural(step.tokens, "token")}`;
}

export function Steps({ state, register }) {
  const last = state?.steps.at(-1);
  const words = last ? describeStep(last) : "no step yet";
  return html`<${Panel} name="steps" title="Steps" figure=${words}>
    <${Drawing} height=${HEIGHT} label=${`Steps, the newest first; ${words}`} use=${(canvas) => register(canvas, (source) => new Strips(canvas, source))} />
    <ul class="legend" aria-hidden="true">
      <li><i class="cell decode"></i>decode</li><li><i class="cell prefill"></i>prompt chunk, as wide as its tokens</li>
      <li><i class="cell wrong"></i>wrong draft</li><li><b>▾</b>preempted</li>
    </ul>
  <//>`;
}
