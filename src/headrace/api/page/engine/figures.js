// How fast, how full, how long: the last minute in figures.

import { html, useEffect, useRef } from "../vendor/htm-preact.js";
import uPlot from "../vendor/uplot.js";
import { colours } from "./canvas.js";
import { Panel } from "./panel.js";
import { amount, count, percent, seconds } from "./words.js";

const CHART = 170;

/** The value below which a share of them lies; null without any. */
export function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}

/** Waiting, first token and time per token of those that ended in the last minute, sorted. */
export function latencies(state) {
  const found = { queue: [], first: [], token: [] };
  for (const request of state.ended) {
    if (request.admitted) found.queue.push(request.admitted - request.arrived);
    if (request.first) found.first.push(request.first - request.arrived);
    if (request.first && request.output > 1) found.token.push((request.ended - request.first) / (request.output - 1));
  }
  for (const values of Object.values(found)) values.sort((a, b) => a - b);
  return found;
}

/** Mean seconds of the loop's parts over the last steps. */
export function phases(state) {
  const steps = state.steps.slice(-40).filter((step) => step.times.length);
  const mean = (part) => steps.reduce((sum, step) => sum + step.times[part], 0) / Math.max(1, steps.length) / 1e6;
  return { schedule: mean(0), launch: mean(1), wait: mean(2), settle: mean(3), device: mean(4) };
}

export function Tiles({ feed, state }) {
  const last = feed.samples.at(-1), stats = feed.stats;
  const share = (part, whole) => (whole > 0 ? percent(part / whole) : "–");
  const running = state ? [...state.requests.values()].filter((request) => request.state === "running").length : 0;
  const tiles = [
    ["out", last ? amount(last.out) : "–", "tokens/s"],
    ["in", last ? amount(last.in) : "–", "tokens/s"],
    ["running", state ? count(running) : "–", state ? `of ${count(state.slotsMost)} slots` : ""],
    ["waiting", state ? count(state.requests.size - running) : "–", ""],
    ["KV in use", state ? percent(state.inUse / state.numBlocks) : "–", ""],
    ["prefix hits", stats ? share(stats.prefix_hits, stats.prefix_queries) : "–", "of prompts"],
    ["drafts right", stats && stats.draft_tokens ? share(stats.accepted_tokens, stats.draft_tokens) : "–", ""],
    ["preempted", stats ? count(stats.preemptions) : "–", ""],
  ];
  return html`<dl class="tiles" aria-label="Now">
    ${tiles.map(([name, value, unit]) => html`<div><dt>${name}</dt><dd><b>${value}</b> <small>${unit}</small></dd></div>`)}
  </dl>`;
}

function Chart({ feed }) {
  const host = useRef(null), chart = useRef(null);
  useEffect(() => {
    const make = () => {
      chart.current?.destroy();
      const colour = colours(), font = `10px ${colour.mono}`;
      const axis = { stroke: colour.muted, font, grid: { stroke: colour.line, width: 1 }, ticks: { show: false } };
      const line = (label, stroke) => ({ label, stroke, width: 1.5, points: { show: false } });
      chart.current = new uPlot(
        {
          width: host.current.clientWidth, height: CHART, legend: { show: false }, cursor: { show: false },
          scales: { x: { time: false }, y: { range: (_, __, most) => [0, Math.max(1, most * 1.1)] } },
          axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => (tick === 0 ? "now" : `${-tick} s`)), size: 24 }, { ...axis, values: (_, ticks) => ticks.map(amount), size: 46 }],
          series: [{}, line("out", colour.accent), line("in", colour.warn), { ...line("limit", colour.muted), dash: [4, 3] }],
        },
        dataOf(feed), host.current,
      );
    };
    make();
    const sized = new ResizeObserver(() => chart.current.setSize({ width: host.current.clientWidth, height: CHART }));
    sized.observe(host.current);
    const themed = () => requestAnimationFrame(make);
    window.addEventListener("themechange", themed);
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", themed);
    return () => {
      sized.disconnect();
      window.removeEventListener("themechange", themed);
      media.removeEventListener("change", themed);
      chart.current.destroy();
    };
  }, []);
  useEffect(() => chart.current?.setData(dataOf(feed)), [feed.samples.at(-1)?.time]);
  const last = feed.samples.at(-1);
  const limit = last?.limit ? `, ${amount(last.limit)} out at the limit of reading` : "";
  const words = last ? `${amount(last.out)} tokens a second out, ${amount(last.in)} in${limit}` : "nothing yet";
  return html`<div class="chart" role="img" aria-label=${`Throughput of the last minute: ${words}`} ref=${host}></div>`;
}

function dataOf(feed) {
  const now = feed.samples.at(-1)?.time ?? 0;
  return [feed.samples.map((sample) => sample.time - now), ...["out", "in", "limit"].map((name) => feed.samples.map((sample) => sample[name]))];
}

const PARTS = ["schedule", "launch", "wait", "settle"];
const PART_WORDS = { schedule: "schedule", launch: "launch", wait: "wait for the device", settle: "settle" };

function Loop({ state }) {
  const found = phases(state), whole = PARTS.reduce((sum, part) => sum + found[part], 0);
  const limit = state.limit?.seconds ?? null, least = limit === null ? "" : `; the limit of reading ${seconds(limit)}`;
  const words = PARTS.map((part) => `${PART_WORDS[part]} ${seconds(found[part])}`).join(", ") + least;
  return html`<figure class="loop">
    <figcaption>The loop, ${seconds(whole)} a step; the device ${seconds(found.device)}${least}</figcaption>
    <div class="stack" role="img" aria-label=${`A step of the loop: ${words}`}>
      ${PARTS.map((part) => html`<i class=${part} style=${{ flexGrow: whole ? found[part] / whole : 0 }}></i>`)}
      ${limit !== null && whole > 0 && html`<b style=${{ left: `${Math.min(100, (100 * limit) / whole)}%` }}></b>`}
    </div>
    <ul class="legend">${PARTS.map((part) => html`<li><i class=${`cell ${part}`}></i>${PART_WORDS[part]} <b>${seconds(found[part])}</b></li>`)}</ul>
  </figure>`;
}

export function Figures({ feed, state }) {
  const found = state ? latencies(state) : null;
  const rows = [["queue", "in the queue"], ["first", "first token (TTFT)"], ["token", "per token (TPOT)"]];
  const cell = (values, share) => {
    const value = quantile(values, share);
    return html`<td>${value === null ? "–" : seconds(value)}</td>`;
  };
  return html`<${Panel} name="figures" title="Figures" figure="the last minute">
    <${Chart} feed=${feed} />
    <ul class="legend" aria-hidden="true"><li><i class="cell out"></i>tokens/s out</li><li><i class="cell in"></i>tokens/s in</li>
      ${state?.reading && html`<li><i class="cell limit"></i>out, at the limit of reading</li>`}
    </ul>
    <div class="pair">
      <table class="latency">
        <caption class="hidden-words">Latency of requests that ended in the last minute</caption>
        <thead><tr><th scope="col"></th><th scope="col">p50</th><th scope="col">p90</th><th scope="col">p99</th></tr></thead>
        <tbody>
          ${rows.map(([name, words]) => html`<tr><th scope="row">${words}</th>${[0.5, 0.9, 0.99].map((share) => cell(found ? found[name] : [], share))}</tr>`)}
        </tbody>
      </table>
      ${state && html`<${Loop} state=${state} />`}
    </div>
  <//>`;
}
