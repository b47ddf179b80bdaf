// The page's few signs, drawn on a grid of 16.

import { html } from "./vendor/htm-preact.js";

const PATHS = {
  new: "M8 3v10M3 8h10",
  history: "M2.5 8a5.5 5.5 0 1 0 1.8-4.100M2.5 2.500v2.700h2.700M8 5v3.300l2 1.3",
  sliders: "M2 4.500h6M12 4.500h2M2 11.500h2M8 11.500h6M10 4.500m-1.8 0a1.8 1.8 0 1 0 3.6 0a1.8 1.8 0 1 0-3.6 0M6 11.500m-1.8 0a1.8 1.8 0 1 0 3.6 0a1.8 1.8 0 1 0-3.6 0",
  export: "M8 2v8M5 7l3 3 3-3M2.5 13.500h11",
  scenes: "M3 3.500h10v7H3zM6.5 5.500v3l3-1.500zM5.5 13.500h5",
  send: "M8 13.500v-11M3.5 7 8 2.5 12.5 7",
  stop: "M4.5 4.500h7v7h-7z",
  copy: "M5.5 5.500h8v8h-8zM10.5 5.500v-3h-8v8h3",
  again: "M13.5 8a5.5 5.5 0 1 1-1.8-4.100M13.5 2.500v2.700h-2.7",
  edit: "M3 13l.7-3L10.5 3.200l2.3 2.300L6 12.300z",
  close: "M4 4l8 8M12 4l-8 8",
  trash: "M3 4.500h10M6.5 4.500v-2h3v2M4.5 4.500l.6 9h5.800l.6-9",
  tokens: "M2 5h4v6H2zM8 5h2v6H8zM12 5h2v6h-2z",
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}

/** A button that shows only a sign and is named all the same. */
export function IconButton({ name, label, ...rest }) {
  return html`<button type="button" class="plain" aria-label=${label} title=${label} ...${rest}><${Icon} name=${name} /></button>`;
}
