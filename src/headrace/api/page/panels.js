// What slides over the chat: earlier conversations, and the drawer with the system message and sampling.

import { html, useLayoutEffect, useRef } from "./vendor/htm-preact.js";
import { IconButton } from "./icons.js";
import { NUMBERS, asJson, asMarkdown } from "./conversation.js";
import { listChats } from "./store.js";

/** Closed by Escape and by its cross; takes the focus and gives it back. */
export function Panel({ title, close, children }) {
  const element = useRef();
  useLayoutEffect(() => { // at once: who is quick has his own field by the next drawing, and writes there
    const before = document.activeElement;
    element.current.querySelector("input, textarea, select, .first")?.focus();
    return () => before?.focus?.();
  }, []);
  return html`<aside class="panel" ref=${element} role="dialog" aria-label=${title} onKeyDown=${(e) => e.key === "Escape" && close()}>
    <header><h2>${title}</h2><${IconButton} name="close" label=${`Close: ${title}`} onClick=${close} /></header>
    <div class="panel-body">${children}</div>
  </aside>`;
}

export function History({ talk, close }) {
  const chats = listChats();
  const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  return html`<${Panel} title="Earlier chats" close=${close}>
    ${!chats.length && html`<p class="quiet">None yet. They are kept in this browser only.</p>`}
    <ul class="chats">
      ${chats.map(
        (chat) => html`<li key=${chat.id} data-open=${chat.id === talk.chat.id || undefined}>
          <button class="first" onClick=${() => { talk.open(chat.id); close(); }}>
            <span>${chat.title}</span><span class="figure">${day.format(chat.time)}</span>
          </button>
          <${IconButton} name="trash" label=${`Delete ${chat.title}`} onClick=${() => talk.remove(chat.id)} />
        </li>`,
      )}
    </ul>
    <div class="row">
      <button onClick=${() => download(asMarkdown(talk.chat), talk.chat.title, "md", "text/markdown")}>Export this chat as Markdown</button>
      <button onClick=${() => download(asJson(talk.chat), talk.chat.title, "json", "application/json")}>as JSON</button>
    </div>
  </${Panel}>`;
}

function download(text, title, ending, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "chat"}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function Sampling({ talk, close }) {
  const { settings, chat } = talk;
  const setNumber = (name, text) => {
    const { [name]: _, ...others } = settings.numbers;
    const value = Number(text);
    talk.set({ numbers: text.trim() === "" || Number.isNaN(value) ? others : { ...others, [name]: value } });
  };
  return html`<${Panel} title="System message and sampling" close=${close}>
    <label class="field"><span>System message</span>
      <textarea rows="4" value=${chat.system} onInput=${(e) => talk.setSystem(e.target.value)} placeholder="Of this chat; empty: what the model's template says"></textarea>
    </label>
    <p class="quiet">What is empty is the model's own.</p>
    ${NUMBERS.map(
      ([name, label, min, max, step, words]) => html`<label class="field number" key=${name}>
        <span>${label}</span>
        <input type="number" name=${name} min=${min} max=${max} step=${step} value=${settings.numbers[name] ?? ""} placeholder="auto"
          aria-describedby=${`about-${name}`} onInput=${(e) => setNumber(name, e.target.value)} />
        <small id=${`about-${name}`}>${words}</small>
      </label>`,
    )}
    <label class="field number"><span>Reasoning</span>
      <select value=${settings.thinking} onChange=${(e) => talk.set({ thinking: e.target.value })} aria-describedby="about-thinking">
        <option value="">auto</option><option value="on">on</option><option value="off">off</option>
      </select>
      <small id="about-thinking">for models whose template has the switch</small>
    </label>
    <label class="field"><span>Stop at</span>
      <textarea rows="2" value=${settings.stop} onInput=${(e) => talk.set({ stop: e.target.value })} placeholder="texts, a line each"></textarea>
    </label>
    <label class="field"><span>Tools</span>
      <textarea rows="4" class="code-text" value=${settings.tools} onInput=${(e) => talk.set({ tools: e.target.value })}
        placeholder=${'[{"name": "weather", "description": "...",\n  "parameters": {"type": "object", "properties": {...}}}]'}></textarea>
    </label>
    <div class="row"><button onClick=${() => talk.set({ numbers: {}, stop: "", thinking: "", tools: "" })}>All as the model has it</button></div>
  </${Panel}>`;
}
