// The KV cache, a square for each block: whose it is, shared, cached or free. Only squares that have changed are drawn.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { Drawing, ageShade, colours, moving } from "./canvas.js";
import { Panel } from "./panel.js";
import { NO_NODE } from "./state.js";
import { count, percent, plural, seconds, short } from "./words.js";

const HEIGHT = 216, LARGEST = 26, SMALLEST = 2, FEWEST = 256, FLASH = 0.45; // s
const FREE = 0, CACHED = 1, HELD = 2, FLASHING = 3;

/** Blocks are taken from the lowest number on: what was never near to being used is not drawn. */
export function shownBlocks(state) {
  let number = FEWEST;
  while (number < state.highest + 1) number *= 2;
  return Math.min(number, state.numBlocks);
}

class Squares {
  constructor(canvas, source) {
    this.canvas = canvas;
    this.source = source;
    this.drawn = null; // what each square looks like
  }

  #lay(state) {
    const { canvas } = this, number = shownBlocks(state);
    let cell = Math.min(LARGEST, Math.floor(Math.sqrt((canvas.width * HEIGHT) / number)));
    for (cell = Math.max(SMALLEST, cell); cell > SMALLEST && Math.ceil(number / Math.floor(canvas.width / cell)) * cell > HEIGHT; ) cell -= 1;
    this.cell = cell;
    this.columns = Math.max(1, Math.floor(canvas.width / cell));
    canvas.fit(Math.max(cell, Math.ceil(number / this.columns) * cell));
    this.drawn = new Int32Array(number).fill(-1);
    canvas.clear();
  }

  draw() {
    const { canvas, source } = this, { state } = source;
    if (!state) return;
    if (canvas.all || this.drawn?.length !== shownBlocks(state)) {
      this.#lay(state);
      canvas.all = false;
    }
    const { owner, holders, above, touched, now } = state, { picked, chosen } = source, { drawn } = this;
    let flashing = false;
    const flashes = moving(FLASH);
    for (let block = 0; block < drawn.length; block++) {
      let look;
      if (holders[block]) {
        const request = state.slots[owner[block]];
        const flash = now - touched[block] < flashes && touched[block] > 0;
        const faint = picked !== null && request?.id !== picked && !(holders[block] > 1 && this.#holds(state, block, picked));
        flashing ||= flash;
        look = (flash ? FLASHING : HELD) + 4 * ((request?.hue ?? 0) + 16 * Math.min(holders[block], 255)) + (faint ? 1 << 20 : 0);
      } else if (above[block] !== NO_NODE) look = CACHED + 4 * (touched[block] ? ageShade((now - touched[block]) / 2) : 5);
      else look = FREE;
      if (block === chosen) look |= 1 << 21;
      if (look !== drawn[block]) {
        drawn[block] = look;
        this.#square(state, block, look);
      }
    }
    canvas.dirty = flashing; // to be drawn again when the flash is over
  }

  #holds(state, block, id) {
    for (const slot of state.shared.get(block) ?? []) if (state.slots[slot]?.id === id) return true;
    return false;
  }

  #square(state, block, look) {
    const { cell, columns, canvas } = this, { context } = canvas, colour = colours();
    const x = (block % columns) * cell, y = Math.floor(block / columns) * cell, gap = cell > 4 ? 1 : cell > 2 ? 0.5 : 0;
    const kind = look & 3, size = cell - gap, faint = look & (1 << 20);
    context.fillStyle = colour.raised;
    context.fillRect(x, y, cell, cell);
    if (kind === FREE) {
      context.fillStyle = colour.free;
      if (cell > 5) context.fillRect(x + size / 2 - 1, y + size / 2 - 1, 2, 2);
      else context.fillRect(x, y, size, size);
    } else if (kind === CACHED) {
      context.fillStyle = colour.cached[(look & 0xffff) >> 2];
      context.fillRect(x, y, size, size);
    } else {
      const tones = faint ? colour.pale : colour.owners, hue = (look >> 2) & 15, holders = (look >> 6) & 255;
      context.fillStyle = tones[hue];
      context.fillRect(x, y, size, size);
      if (holders > 1) this.#stripes(state, block, x, y, size, tones, holders);
      if (kind === FLASHING) {
        context.fillStyle = colour.fg;
        context.globalAlpha = 0.4;
        context.fillRect(x, y, size, size);
        context.globalAlpha = 1;
      }
    }
    if (look & (1 << 21)) {
      context.strokeStyle = colour.fg;
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, y + 0.75, Math.max(1, size - 1.5), Math.max(1, size - 1.5));
    }
  }

  /** In the colours of two who share it, and how many do where there is room. */
  #stripes(state, block, x, y, size, tones, holders) {
    const { context } = this.canvas;
    const others = [...(state.shared.get(block) ?? [])].filter((slot) => slot !== state.owner[block]);
    const own = state.slots[state.owner[block]]?.hue ?? 0;
    const other = others.map((slot) => state.slots[slot]?.hue ?? 0).find((hue) => hue !== own) ?? own;
    context.fillStyle = tones[other];
    context.beginPath();
    context.moveTo(x + size, y);
    context.lineTo(x + size, y + size);
    context.lineTo(x, y + size);
    context.fill();
    if (size >= 12) this.canvas.text(holders > 99 ? "99" : `${holders}`, x + size / 2, y + size / 2 + 0.5, { align: "center", size: 8.5, colour: colours().raised });
  }

  blockAt(x, y) {
    if (!this.drawn) return null;
    const column = Math.floor(x / this.cell), block = Math.floor(y / this.cell) * this.columns + column;
    return column < this.columns && block < this.drawn.length ? block : null;
  }
}

/** Blocks from a prompt's first down to this one. */
export function pathOf(state, block) {
  const path = [block];
  while (state.above[path[0]] >= 0 && path.length < state.numBlocks) path.unshift(state.above[path[0]]);
  return path;
}

function Details({ state, block, feed, pick }) {
  const [text, setText] = useState(null);
  const slots = state.holders[block] ? [...(state.shared.get(block) ?? [state.owner[block]])] : [];
  const owners = slots.map((slot) => state.slots[slot]).filter(Boolean);
  const indexed = state.above[block] !== NO_NODE;
  const column = slots.length ? state.tables.get(slots[0]).indexOf(block) : -1;
  useEffect(() => {
    let over = false;
    setText(null);
    if (owners.length && column >= 0) feed.text(owners[0].id, column * state.blockSize, (column + 1) * state.blockSize).then((found) => over || setText(found));
    return () => { over = true; };
  }, [block, owners[0]?.id]);
  const what = owners.length ? (owners.length > 1 ? `shared by ${owners.length}` : "held by one request") : indexed ? "cached: nobody holds it" : "free";
  return html`<div class="details" role="status">
    <p>
      <b>Block ${count(block)}</b> ${what}${column >= 0 && `, tokens ${count(column * state.blockSize)} to ${count((column + 1) * state.blockSize - 1)}`}${indexed && `; in the prefix index, ${plural(pathOf(state, block).length, "block")} deep`}${!owners.length && indexed && state.touched[block] > 0 && `, given back ${seconds(state.now - state.touched[block])} ago`}
    </p>
    <p class="owners">
      ${owners.slice(0, 12).map((request) => html`<button class="plain" onClick=${() => pick(request.id)}><i class=${`dot hue-${request.hue}`}></i><code>${short(request.id)}</code></button>`)}
      ${owners.length > 12 && html`<span>and ${owners.length - 12} more</span>`}
    </p>
    ${text !== null && html`<p class="text">${text}</p>`}
  </div>`;
}

export function Blocks({ state, feed, register, source, pick }) {
  const [chosen, setChosen] = useState(null);
  const choose = (block) => {
    source.chosen = block;
    source.touch();
    setChosen(block);
  };
  const squares = useRef(null);
  const use = (canvas) => register(canvas, (given) => (squares.current = new Squares(canvas, given)));
  const clicked = (event) => choose(squares.current.blockAt(event.offsetX, event.offsetY));
  const keyed = (event) => {
    const { columns } = squares.current;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (event.key === "Escape") choose(null);
    else if (by) {
      event.preventDefault();
      choose(Math.min(shownBlocks(state) - 1, Math.max(0, chosen === null ? 0 : chosen + by)));
    }
  };
  const cached = state ? state.cached : 0;
  const free = state ? state.numBlocks - state.inUse - cached : 0;
  const words = state
    ? `${count(state.inUse)} of ${count(state.numBlocks)} blocks in use, ${count(state.shared.size)} shared, ${count(cached)} cached, ${count(free)} free`
    : "nothing known yet";
  return html`<${Panel} name="blocks" title="KV blocks" figure=${state ? `${percent(state.inUse / state.numBlocks)} of ${count(state.numBlocks)} in use` : ""}>
    <div class="scrolls">
      <${Drawing} height=${HEIGHT} label=${`KV blocks: ${words}`} use=${use} tabindex="0" onClick=${clicked} onKeyDown=${keyed} />
    </div>
    <ul class="legend">
      <li><i class="cell held"></i>in use <b data-count="in-use">${state ? count(state.inUse) : ""}</b></li>
      <li><i class="cell shared"></i>shared <b data-count="shared">${state ? count(state.shared.size) : ""}</b></li>
      <li><i class="cell cached"></i>cached <b data-count="cached">${state ? count(cached) : ""}</b></li>
      <li><i class="cell free"></i>free <b data-count="free">${state ? count(free) : ""}</b></li>
      ${state && shownBlocks(state) < state.numBlocks && html`<li>${count(state.numBlocks - shownBlocks(state))} of them never used, not drawn</li>`}
    </ul>
    ${chosen !== null && state && chosen < state.numBlocks && html`<${Details} ...${{ state, block: chosen, feed, pick }} />`}
  <//>`;
}
