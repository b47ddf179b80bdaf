// A canvas that is drawn when there is something new to draw: sharp on any screen, in the page's colours, with words for it.

import { html, useEffect, useRef } from "../vendor/htm-preact.js";

const HUES = 12;
let palette = null;

/** The page's colours as numbers and strings, read again when the theme changes. */
export function colours() {
  if (palette) return palette;
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  palette = { mono: of("mono"), sans: of("sans") };
  for (const name of ["bg", "raised", "sunk", "fg", "muted", "line", "accent", "warn", "good"]) palette[name] = of(name);
  palette.owners = Array.from({ length: HUES }, (_, i) => of(`owner-${i}`));
  palette.pale = palette.owners.map((owner) => mix(owner, palette.raised, 0.62));
  // how long ago, from just now to long: steps of one colour into the background
  palette.ages = [0.2, 0.35, 0.5, 0.62, 0.72, 0.8].map((share) => mix(palette.accent, palette.raised, share));
  palette.cached = [0.35, 0.48, 0.6, 0.7, 0.78, 0.84].map((share) => mix(palette.muted, palette.raised, share));
  palette.free = mix(palette.line, palette.raised, 0.35);
  return palette;
}

const forget = () => {
  palette = null;
  for (const canvas of mounted) canvas.all = canvas.dirty = true;
};
const mounted = new Set();
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Seconds that something flashes or fades: none for who wants no motion. */
export const moving = (seconds) => (calm.matches ? 0 : seconds);

window.addEventListener("themechange", forget);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);

/** `share` of colour b in a. */
export function mix(a, b, share) {
  const [x, y] = [numbers(a), numbers(b)];
  return `rgb(${x.map((value, i) => Math.round(value + (y[i] - value) * share)).join(" ")})`;
}

function numbers(colour) {
  if (colour.startsWith("#")) return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return colour.match(/\d+/g).slice(0, 3).map(Number);
}

/** Which of `count` shades stands for something that long ago: each for twice the time of the one before. */
export function ageShade(seconds, count = 6) {
  return Math.min(count - 1, Math.max(0, Math.floor(Math.log2(1 + seconds))));
}

/** A drawing. `draw(canvas)` is asked for when `canvas.dirty` or the feed has changed; `canvas.all`: nothing of it is there. */
export class Canvas {
  constructor(element, height) {
    this.element = element;
    this.context = element.getContext("2d", { alpha: false });
    this.height = height;
    this.width = 0;
    this.visible = false;
    this.all = this.dirty = true;
    this.sized = new ResizeObserver(() => this.fit());
    this.sized.observe(element.parentElement);
    this.seen = new IntersectionObserver((entries) => {
      this.visible = entries.at(-1).isIntersecting;
      this.dirty = true;
    });
    this.seen.observe(element);
    mounted.add(this);
    this.fit();
  }

  /** Be as wide as there is room, and `height` high. */
  fit(height = this.height) {
    const scale = window.devicePixelRatio || 1;
    const width = Math.floor(this.element.parentElement.clientWidth);
    this.scale = scale;
    if (width === this.width && height === this.height && this.element.width === Math.round(width * scale)) return;
    Object.assign(this, { width, height, all: true, dirty: true });
    this.element.width = Math.round(width * scale);
    this.element.height = Math.round(height * scale);
    this.element.style.width = `${width}px`;
    this.element.style.height = `${height}px`;
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.clear(); // until there is something to draw
  }

  clear() {
    const { context, width, height } = this;
    context.fillStyle = colours().raised;
    context.fillRect(0, 0, width, height);
  }

  text(words, x, y, { colour = colours().muted, align = "left", size = 10.5, base = "middle" } = {}) {
    const { context } = this;
    context.font = `${size}px ${colours().mono}`;
    context.fillStyle = colour;
    context.textAlign = align;
    context.textBaseline = base;
    context.fillText(words, x, y);
  }

  close() {
    mounted.delete(this);
    this.sized.disconnect();
    this.seen.disconnect();
  }
}

/** The element of a drawing. `use(canvas)` takes it over and returns what ends it; `label`: what it shows, in words. */
export function Drawing({ height, label, use, ...rest }) {
  const element = useRef(null);
  useEffect(() => {
    const canvas = new Canvas(element.current, height);
    const end = use(canvas);
    return () => {
      end?.();
      canvas.close();
    };
  }, []);
  return html`<div class="drawing"><canvas ref=${element} role="img" aria-label=${label} ...${rest}></canvas></div>`;
}
