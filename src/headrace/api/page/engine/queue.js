// Who waits, and why.

import { html } from "../vendor/htm-preact.js";
import { Panel } from "./panel.js";
import { count, plural, seconds, short } from "./words.js";

const SHOWN = 24; // cards

function reason(request, place, head) {
  if (place === 0) return head && head[0] === request.id ? head[1] : "it is looked at in the next step";
  const behind = place === 1 ? "behind one other" : `behind ${place} others`;
  return request.preemptions ? `${behind}; preempted` : behind;
}

export function Queue({ state, pick, picked }) {
  const waiting = state ? state.waiting : [];
  const more = waiting.length - SHOWN;
  return html`<${Panel} name="queue" title="Queue" figure=${waiting.length ? `${count(waiting.length)} waiting` : "empty"}>
    <ol class="cards" aria-label="Waiting requests">
      ${waiting.slice(0, SHOWN).map(
        (request, place) => html`<li key=${request.id}>
          <button class="card" data-first=${String(place === 0)} aria-pressed=${String(picked === request.id)} onClick=${() => pick(picked === request.id ? null : request.id)}>
            <span class="line">
              <code>${short(request.id)}</code>
              <span>${plural(request.prompt, "token")}</span>
              ${request.priority !== 0 && html`<span title="priority; lower runs first">p ${request.priority}</span>`}
              ${request.preemptions > 0 && html`<span class="warns">preempted</span>`}
              <span class="age">${seconds(Math.max(0, state.now - request.arrived))}</span>
            </span>
            <span class="why">${reason(request, place, state.head)}</span>
          </button>
        </li>`,
      )}
    </ol>
    ${more > 0 && html`<p class="rest">and ${plural(more, "more request")}</p>`}
    ${waiting.length === 0 && html`<p class="rest">Nobody waits: whoever comes starts with the next step.</p>`}
  <//>`;
}
