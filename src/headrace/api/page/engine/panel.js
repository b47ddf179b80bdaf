// The frame of each panel: title, a figure beside it, and what there is to be seen.

import { html, useState } from "../vendor/htm-preact.js";
import { EXPLAIN } from "./words.js";

export function Panel({ name, title, figure, tools, children }) {
  const [open, setOpen] = useState(false);
  const [words, section] = EXPLAIN[name];
  return html`<section class="pane" data-panel=${name} aria-labelledby=${`title-${name}`}>
    <header>
      <h3 id=${`title-${name}`}>${title}</h3>
      <span class="figure">${figure}</span>
      ${tools}
      <button
        class="plain ask" aria-expanded=${String(open)} aria-controls=${`explain-${name}`} aria-label=${`What am I seeing? ${title}`}
        title="What am I seeing?" onClick=${() => setOpen(!open)}
      >?</button>
    </header>
    <p class="explain" id=${`explain-${name}`} hidden=${!open}>
      ${words} <a href=${`page/tour.html#${section}`} target="_blank" rel="noopener">The tour tells more</a>
    </p>
    ${children}
  </section>`;
}
