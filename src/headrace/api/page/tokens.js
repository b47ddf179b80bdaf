// An answer as its tokens: coloured by how sure the model was, with what it might have written instead.

import { Component, html } from "./vendor/htm-preact.js";

const TOGETHER = 100; // tokens that are drawn again together

/** Part of a character is shown as its bytes. */
function shown({ token, bytes }) {
  return token.includes("\ufffd") && bytes ? bytes.map((b) => `<${b.toString(16).padStart(2, "0")}>`).join("") : token;
}

/** With its spaces and line ends to be seen. */
function named(token) {
  return shown(token).replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5").replaceAll("\t", "\u2192") || "(nothing)";
}

export function percent(logprob) {
  const p = 100 * Math.exp(logprob);
  return p >= 99.95 ? "100 %" : p >= 10 ? `${p.toFixed(0)} %` : p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %";
}

/** How strong a token's colour is: none where the model was sure. */
function surprise(logprob) {
  return Math.round(100 * (1 - Math.exp(logprob)) ** 1.5);
}

class Run extends Component {
  shouldComponentUpdate(next) {
    return next.tokens.length !== this.props.tokens.length || next.picked !== this.props.picked;
  }

  render({ tokens, from, picked }) {
    return tokens.map(
      (token, i) => html`<span class="token" data-at=${from + i} data-picked=${from + i === picked || undefined}
        style=${{ "--surprise": `${surprise(token.logprob)}%` }}>${shown(token)}</span>`,
    );
  }
}

export class TokenView extends Component {
  state = { at: null };

  pick = (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) this.setState({ at: Number(at) });
  };

  step = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.setState({ at: null });
    if (!by) return;
    event.preventDefault();
    const at = (this.state.at ?? (by > 0 ? -1 : this.props.tokens.length)) + by;
    this.setState({ at: Math.max(0, Math.min(this.props.tokens.length - 1, at)) });
  };

  render({ tokens }, { at }) {
    const runs = [];
    for (let from = 0; from < tokens.length; from += TOGETHER) {
      const inside = at !== null && at >= from && at < from + TOGETHER;
      runs.push(html`<${Run} key=${from} from=${from} tokens=${tokens.slice(from, from + TOGETHER)} picked=${inside ? at : null} />`);
    }
    return html`<div class="token-view">
      <div class="tokens" tabindex="0" role="group" aria-label="Tokens of the answer: left and right arrow pick one"
        onKeyDown=${this.step} onMouseOver=${this.pick} onClick=${this.pick}>${runs}</div>
      ${at !== null && at < tokens.length
        ? html`<${Alternatives} token=${tokens[at]} place=${at + 1} />`
        : html`<p class="figure legend"><span class="scale" aria-hidden="true"></span> the stronger the colour, the less likely the token was; point at one</p>`}
    </div>`;
  }
}

function Alternatives({ token, place }) {
  const others = token.top_logprobs.some((t) => t.token === token.token) ? token.top_logprobs : [token, ...token.top_logprobs];
  return html`<div class="alternatives" role="status" aria-label=${`Token ${place}`}>
    <span class="figure">token ${place}</span>
    ${others.map(
      (other) => html`<span class="alternative" data-taken=${other.token === token.token || undefined}>
        <code>${named(other)}</code> <span class="figure">${percent(other.logprob)}</span>
      </span>`,
    )}
  </div>`;
}
