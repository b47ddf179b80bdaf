// The chat: a conversation with the model that this server runs.

import { html, render } from "./vendor/htm-preact.js";

export function mountChat(element, { model }) {
  render(html`<p class="quiet">${model ?? "The server loads its model."}</p>`, element);
}
