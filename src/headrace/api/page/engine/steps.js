// The steps as strips, the newest on top: what each request has in it, and how much of the budget all together.

import { html } from "../vendor/htm-preact.js";
import { Drawing, colours } from "./canvas.js";
import { Panel } from "./panel.js";
import { DRAFTED, PREFILL } from "./state.js";
import { count, plural, seconds } from "./words.js";

const STRIP = 10, GAP = 2, LEFT = 86, TOP = 16, HEIGHT = 246, RIGHT = 14;
const PITCH = STRIP + GAP;
const ROWS = Math.floor((HEIGHT - TOP) / PITCH);

/** Draws the last steps of `source.state`; what is there already moves down, and only the new ones are drawn. */
class Strips {
  constructor(canvas, source) {
    this.canvas = canvas;
    this.source = source;
    this.last = null;
  }

  x(tokens, state) {
    return LEFT + (this.canvas.width - LEFT - RIGHT) * Math.sqrt(Math.min(1, tokens / state.budget));
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
    const { canvas } = this, { context, height } = canvas, colour = colours();
    const ticks = [state.budget];
    for (let tick = state.budget; (tick = tick > 4 ? Math.floor(tick / 4) : 0) >= 1; ) ticks.push(tick);
    for (const tick of ticks) {
      const x = Math.round(this.x(tick, state)) + 0.5, budget = tick === state.budget;
      context.fillStyle = budget ? colour.warn : colour.line;
      context.fillRect(x - 0.5, TOP - 3, 1, budget ? height : 3);
      canvas.text(budget ? `budget ${count(tick)}` : count(tick), x + (budget ? 6 : 0), 6, { align: budget ? "right" : "center", colour: budget ? colour.warn : colour.muted, size: 9.5 });
    }
  }

  #strip(state, step, place) {
    const { canvas, source } = this, { context } = canvas, colour = colours();
    const y = TOP + place * PITCH, edge = this.x(state.budget, state);
    context.fillStyle = colour.raised;
    context.fillRect(0, y - 1, edge, PITCH);
    canvas.text(`${step.n}`, 44, y + STRIP / 2, { align: "right", size: 9.5 });
    const [schedule = 0, launch = 0, wait = 0, settle = 0] = step.times;
    canvas.text(seconds((schedule + launch + wait + settle) / 1e6), LEFT - 8, y + STRIP / 2, { align: "right", size: 9.5, colour: colour.fg });
    const faint = (request) => source.picked !== null && request?.id !== source.picked;
    let tokens = 0, x = LEFT;
    for (let i = 0; i < step.hues.length; i++) {
      tokens += 1;
      const end = this.x(tokens, state);
      if (end - x < 1 && i < step.hues.length - 1) continue; // finer than can be seen
      context.fillStyle = (faint(step.seats[i]) ? colour.pale : colour.owners)[step.hues[i]] ?? colour.muted;
      context.fillRect(x, y, Math.max(1, end - x - (end - x > 3 ? 1 : 0)), STRIP);
      x = end;
    }
    for (const row of step.rows) {
      tokens += row.tokens;
      const end = this.x(tokens, state), hue = row.request?.hue ?? 0, wide = Math.max(1.5, end - x - 1);
      context.fillStyle = (faint(row.request) ? colour.pale : colour.owners)[hue] ?? colour.muted;
      if (row.kind === PREFILL) this.#chunk(x, y, wide, row);
      else this.#drafts(x, y, wide, row);
      x = end;
    }
    if (step.preempted.length) canvas.text(`▾${step.preempted.length}`, Math.min(x + 4, edge - 24), y + STRIP / 2, { colour: colour.warn, size: 10.5 });
  }

  #chunk(x, y, wide, row) {
    const { canvas } = this, { context } = canvas, colour = colours();
    context.fillRect(x, y, wide, STRIP);
    context.fillStyle = colour.raised;
    context.globalAlpha = 0.35;
    context.fillRect(x + 1, y + STRIP - 3, Math.max(0, wide - 2), 2); // told from a decode at any width
    context.globalAlpha = 1;
    if (wide > 34) canvas.text(count(row.tokens), x + 5, y + STRIP / 2 + 0.5, { colour: colour.raised, size: 9.5 });
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
      <li><i class="cell decode"></i>decode</li><li><i class="cell prefill"></i>prompt chunk</li>
      <li><i class="cell wrong"></i>wrong draft</li><li><b>▾</b>preempted</li>
    </ul>
  <//>`;
}
