// One message of a conversation, as it is shown.

import { Component, html } from "./vendor/htm-preact.js";
import { IconButton } from "./icons.js";
import { Markdown, copyText } from "./markdown.js";
import { TokenView } from "./tokens.js";

const number = new Intl.NumberFormat("en");

export function duration(ms) {
  return ms >= 10_000 ? `${(ms / 1000).toFixed(1)} s` : ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : ms >= 100 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

/** Drawn again only when it has changed. Props: message, index, last, talk (the Conversation), show (in the engine). */
export class Message extends Component {
  state = { editing: false };

  shouldComponentUpdate(next, state) {
    const { message, version, last, showTokens } = this.props;
    return next.message !== message || next.version !== version || next.last !== last || next.showTokens !== showTokens || state !== this.state;
  }

  render({ message }, { editing }) {
    if (message.role === "assistant") return html`<${Answer} ...${this.props} />`;
    if (message.role === "tool") {
      return html`<article class="message tool" aria-label="Result of a tool"><${ToolCard} title=${`Result of ${message.name}`} text=${message.content} /></article>`;
    }
    return editing ? this.form() : this.asked();
  }

  asked() {
    const { message, index, talk } = this.props;
    return html`<article class="message user" aria-label="You">
      <div class="said">${message.content}</div>
      <div class="acts">
        <${IconButton} name="copy" label="Copy the message" onClick=${() => copyText(message.content)} />
        <${IconButton} name="edit" label="Edit and ask again" onClick=${() => this.setState({ editing: true })} />
      </div>
    </article>`;
  }

  form() {
    const { message, index, talk } = this.props;
    const done = (event) => {
      event.preventDefault();
      const text = new FormData(event.target).get("text");
      this.setState({ editing: false });
      if (text.trim()) talk.edit(index, text);
    };
    const keys = (event) => {
      if (event.key === "Escape") this.setState({ editing: false });
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        event.target.form.requestSubmit();
      }
    };
    const focus = (element) => element && document.activeElement !== element && element.focus();
    return html`<form class="message user editing" onSubmit=${done}>
      <textarea name="text" rows="4" aria-label="Your message" defaultValue=${message.content} ref=${focus} onKeyDown=${keys}></textarea>
      <div class="acts">
        <button type="button" class="plain" onClick=${() => this.setState({ editing: false })}>Cancel</button>
        <button class="primary">Ask again</button>
      </div>
    </form>`;
  }
}

function Answer({ message, index, last, talk, show, showTokens }) {
  const { content, reasoning, calls = [], live, error, stopped, cut, tokens } = message;
  const empty = !content && !reasoning && !calls.length;
  const resumable = last && !live && (error || stopped || cut) && content && !calls.length && !reasoning;
  return html`<article class="message answer" aria-label="Answer" aria-busy=${String(Boolean(live))}>
    ${reasoning && html`<details class="reasoning">
      <summary>${live && !content ? "Reasoning" : "Reasoned"}<span class="figure"> ${number.format(reasoning.length)} characters</span></summary>
      <div class="said">${reasoning}</div>
    </details>`}
    ${showTokens && tokens?.length
      ? html`<${TokenView} tokens=${tokens} />`
      : content && html`<${Markdown} text=${content} done=${!live} />`}
    ${calls.filter(Boolean).map((call) => html`<${Call} call=${call} index=${index} live=${live} talk=${talk} />`)}
    ${live && html`<span class="writing" aria-hidden="true">${empty ? html`<i></i><i></i><i></i>` : ""}</span>`}
    ${error && html`<p class="notice" role="alert">${error}${content && " What had come until then is kept."}</p>`}
    ${stopped && html`<p class="notice quiet">Stopped.</p>`}
    ${cut && !live && html`<p class="notice quiet">The longest answer that was asked for ends here.</p>`}
    ${!live && empty && !error && !stopped && html`<p class="notice quiet">The model ended its turn without a word.</p>`}
    <footer>
      <${Figures} message=${message} show=${show} />
      ${!live && html`<div class="acts">
        ${resumable && html`<button class="plain" onClick=${() => talk.resume(index)}>Go on</button>`}
        ${content && html`<${IconButton} name="copy" label="Copy the answer" onClick=${() => copyText(content)} />`}
        <${IconButton} name="again" label="Answer again" onClick=${() => talk.regenerate(index)} />
      </div>`}
    </footer>
  </article>`;
}

export function Figures({ message, show }) {
  const f = message.figures;
  if (!f) return html`<div class="figures"></div>`;
  const parts = [
    ["time to the first token, as this browser saw it", `TTFT ${duration(f.ttft)}`],
    f.tpot !== null && ["time per output token after the first", `TPOT ${duration(f.tpot)}`],
    f.rate !== null && ["output tokens a second after the first", `${f.rate >= 100 ? f.rate.toFixed(0) : f.rate.toFixed(1)} tok/s`],
    ["tokens of the answer", `${number.format(f.output)} out`],
    ["tokens of the prompt, and how many of them the prefix cache had", `${number.format(f.prompt)} in, ${number.format(f.cached)} cached`],
  ];
  return html`<div class="figures figure">
    ${parts.filter(Boolean).map(([title, words]) => html`<span title=${title}>${words}</span>`)}
    ${message.id && html`<button class="link" onClick=${() => show(message.id)}>show me this request in the engine</button>`}
  </div>`;
}

function Call({ call, index, live, talk }) {
  const given = talk.chat.messages.some((m) => m.role === "tool" && m.call === call.id);
  const done = (event) => {
    event.preventDefault();
    talk.giveResult(index, call, new FormData(event.target).get("result"));
  };
  return html`<${ToolCard} title=${`Calls ${call.name}`} text=${indented(call.arguments)}>
    ${!live && !given && html`<form class="result" onSubmit=${done}>
      <textarea name="result" rows="2" aria-label=${`Result of ${call.name}`} placeholder="What the tool answers; the page runs nothing itself"></textarea>
      <button>Give the result</button>
    </form>`}
  </${ToolCard}>`;
}

function ToolCard({ title, text, children }) {
  return html`<section class="call" aria-label=${title}>
    <h3 class="figure">${title}</h3>
    <pre tabindex="0"><code>${text}</code></pre>
    ${children}
  </section>`;
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still being written, or not JSON
  }
}
