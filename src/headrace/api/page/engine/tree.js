// The prefix index as an icicle: each bar is a run of blocks, under it its continuations; only the largest are drawn.

import { hierarchy, partition } from "../vendor/d3-hierarchy.js";
import { html } from "../vendor/htm-preact.js";
import { Drawing, ageShade, colours, mix, moving } from "./canvas.js";
import { Panel } from "./panel.js";
import { NO_NODE } from "./state.js";
import { count, plural } from "./words.js";

const HEIGHT = 216, MOST = 500, LOWEST = 14, TALLEST = 42, FADE = 0.7; // s

/** The index as runs: {blocks, below (blocks of the whole subtree), children, folded}, the largest MOST of them. */
export function runsOf(state) {
  const { above, numBlocks } = state;
  const first = new Int32Array(numBlocks + 1).fill(-1), next = new Int32Array(numBlocks).fill(-1), children = new Int32Array(numBlocks + 1);
  for (let block = 0; block < numBlocks; block++) {
    if (above[block] === NO_NODE) continue;
    const parent = above[block] < 0 ? numBlocks : above[block];
    next[block] = first[parent];
    first[parent] = block;
    children[parent] += 1;
  }
  const order = [], below = new Int32Array(numBlocks + 1);
  for (const stack = [numBlocks]; stack.length; ) {
    const node = stack.pop();
    order.push(node);
    for (let child = first[node]; child >= 0; child = next[child]) stack.push(child);
  }
  for (let i = order.length - 1; i > 0; i--) {
    const block = order[i];
    below[block] += 1;
    below[above[block] < 0 ? numBlocks : above[block]] += below[block];
  }
  const root = { blocks: [], last: numBlocks, below: below[numBlocks], children: [], folded: 0 };
  const open = [root];
  let shown = 0;
  while (open.length && shown < MOST) {
    let largest = 0;
    for (let i = 1; i < open.length; i++) if (open[i].below > open[largest].below) largest = i;
    const [run] = open.splice(largest, 1);
    const found = [];
    for (let child = first[run.last]; child >= 0; child = next[child]) {
      const blocks = [child];
      while (children[blocks.at(-1)] === 1) blocks.push(first[blocks.at(-1)]);
      found.push({ blocks, last: blocks.at(-1), below: below[child], children: [], folded: 0 });
    }
    found.sort((a, b) => b.below - a.below);
    run.children = found.slice(0, MOST - shown);
    run.folded = found.length - run.children.length;
    shown += run.children.length;
    open.push(...run.children.filter((child) => children[child.last]));
  }
  for (const run of open) run.folded = children[run.last];
  return root;
}

class Icicle {
  constructor(canvas, source) {
    this.canvas = canvas;
    this.source = source;
    this.version = -1;
    this.bars = new Map(); // first block -> {x0, x1, level, run}
    this.gone = []; // {x0, x1, level, when}
    this.due = 0;
  }

  #lay(state) {
    const root = hierarchy(runsOf(state)).sum((run) => run.blocks.length + (run.folded ? run.below - run.blocks.length : 0));
    partition().size([this.canvas.width, HEIGHT])(root);
    const bars = new Map();
    for (const node of root.descendants()) {
      if (node.depth) bars.set(node.data.blocks[0], { x0: node.x0, x1: node.x1, level: node.depth - 1, run: node.data });
    }
    for (const [block, bar] of this.bars) if (state.above[block] === NO_NODE) this.gone.push({ ...bar, when: state.now });
    this.bars = bars;
    this.level = Math.max(LOWEST, Math.min(TALLEST, Math.floor(HEIGHT / Math.max(1, root.height))));
    this.version = state.version;
    this.state = state;
  }

  draw(time) {
    const { canvas, source } = this, { state } = source, { context } = canvas, colour = colours();
    if (!state) return;
    if (state.now < (this.state?.now ?? 0)) this.gone = [];
    if (canvas.all || (this.version !== state.version && time >= this.due)) {
      const began = performance.now();
      this.#lay(state);
      this.due = time + Math.max(100, 20 * (performance.now() - began));
    }
    canvas.all = false;
    canvas.clear();
    const path = source.picked === null ? null : new Set(state.tables.get(state.requests.get(source.picked)?.slot) ?? []);
    const { level } = this, deepest = Math.floor(HEIGHT / level) - 1;
    for (const bar of this.bars.values()) {
      if (bar.level > deepest || bar.x1 - bar.x0 < 0.4) continue;
      const { blocks } = bar.run;
      let newest = 0, held = false, lit = false;
      for (const block of blocks) {
        newest = Math.max(newest, state.touched[block]);
        held ||= state.holders[block] > 0;
        lit ||= path !== null && path.has(block);
      }
      const shade = colour.ages[newest ? ageShade((state.now - newest) / 2) : 5];
      context.fillStyle = lit ? colour.fg : held ? mix(colour.accent, shade, 0.35) : shade;
      const wide = Math.max(0.7, bar.x1 - bar.x0 - 1);
      context.fillRect(bar.x0, bar.level * level, wide, level - 2);
      if (wide > 30) canvas.text(count(blocks.length), bar.x0 + 5, bar.level * level + level / 2 - 0.5, { colour: lit ? colour.raised : held ? colour.raised : colour.fg, size: 9.5 });
      if (bar.run.folded && wide > 3) {
        context.fillStyle = colour.muted;
        context.fillRect(bar.x0, (bar.level + 1) * level - 1, wide, 1);
      }
    }
    this.gone = this.gone.filter((bar) => state.now - bar.when < moving(FADE));
    for (const bar of this.gone) {
      context.globalAlpha = 0.7 * (1 - (state.now - bar.when) / FADE);
      context.fillStyle = colour.warn;
      context.fillRect(bar.x0, bar.level * level, Math.max(1, bar.x1 - bar.x0 - 1), level - 2);
    }
    context.globalAlpha = 1;
    canvas.dirty = this.version !== state.version;
  }
}

export function Tree({ state, register }) {
  const shared = state ? state.shared.size : 0;
  const words = state ? `${plural(state.nodes, "block")} in the index, ${count(shared)} of them shared by several requests now` : "nothing known yet";
  return html`<${Panel} name="tree" title="Prefix index" figure=${state ? html`<b data-count="nodes">${count(state.nodes)}</b> ${state.nodes === 1 ? "block" : "blocks"}` : ""}>
    <${Drawing} height=${HEIGHT} label=${`Prefix index: ${words}`} use=${(canvas) => register(canvas, (source) => new Icicle(canvas, source))} />
    <ul class="legend" aria-hidden="true">
      <li><i class="cell now"></i>in use</li><li><i class="cell recent"></i>used lately</li><li><i class="cell old"></i>long ago</li>
      <li><i class="cell evicted"></i>evicted</li>
    </ul>
  <//>`;
}
