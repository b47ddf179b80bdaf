// Pause, a step back or forward, slow motion, any of the last 1,000 steps; which core.

import { html } from "../vendor/htm-preact.js";
import { count } from "./words.js";

const ICONS = {
  pause: "M5 3v10M11 3v10", play: "M4.500 3v10l8-5z", back: "M12 3.500v9l-6-4.500zM4 3.500v9", forward: "M4 3.500v9l6-4.500zM12 3.500v9",
  slow: "M8 2a6 6 0 1 0 6 6M8 5v3l2 1.500",
};

function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;
}

const MODES = { live: "live", paused: "paused", slow: "slow motion" };

export function Controls({ feed, state }) {
  const stopped = feed.mode !== "live", none = !feed.live;
  const cores = feed.stats?.cores ?? [];
  const button = (name, words, act, rest = {}) =>
    html`<button class="plain" aria-label=${words} title=${words} disabled=${none} onClick=${act} ...${rest}><${Icon} name=${name} /></button>`;
  const behind = state && feed.live ? feed.live.n - state.n : 0;
  const words = feed.status === "live" ? MODES[feed.mode] : feed.words;
  return html`<div class="controls" role="toolbar" aria-label="Engine">
    <h2>Engine</h2>
    ${cores.length > 1 && html`<select aria-label="Core" value=${String(feed.core)} onChange=${(event) => feed.choose(Number(event.target.value))}>
      ${cores.map((core) => html`<option value=${String(core.core)}>core ${core.core}${core.up ? "" : " (down)"}</option>`)}
    </select>`}
    <span class="how" role="status" data-status=${feed.status}>${words}</span>
    <span class="spread"></span>
    ${button("back", "One step back", () => feed.stepBack())}
    ${button(stopped ? "play" : "pause", stopped ? "Go on live" : "Pause", () => (stopped ? feed.resume() : feed.pause()))}
    ${button("forward", "One step forward", () => feed.stepForward(), { disabled: none || !stopped })}
    ${button("slow", "Slow motion", () => (feed.mode === "slow" ? feed.resume() : feed.slow()), { "aria-pressed": String(feed.mode === "slow") })}
    <input
      type="range" aria-label="Step" min=${feed.first} max=${feed.live?.n ?? 0} value=${state?.n ?? 0} disabled=${none}
      onInput=${(event) => feed.seek(Number(event.target.value))}
    />
    <output class="figure" aria-label="Step shown">${state ? `step ${count(state.n)}${behind > 0 ? ` (−${count(behind)})` : ""}` : "no step"}</output>
  </div>`;
}
