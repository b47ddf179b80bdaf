// The chat: a conversation with the model that this server runs, and the way into the guided scenes.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { Conversation } from "./conversation.js";
import { Icon, IconButton } from "./icons.js";
import { Message } from "./message.js";
import { History, Panel, Sampling } from "./panels.js";
import { Scene, SceneList } from "./scene_view.js";

const NEAR = 60; // pixels from the end at which the view follows what is written
const IDEAS = ["Tell a short story of a miller and his river.", "Write a Python function that finds the longest common prefix of a list of strings.", "Compare tea and coffee in a small table."];

/** Draws the chat into `element`; `update` gives it the model and says when that changes. `show(id)` opens the engine's view. */
export function mountChat(element, show) {
  const talk = new Conversation();
  let model = null, loading = true, cost = 0, due = false;
  const draw = () => {
    due = false;
    const began = performance.now();
    render(html`<${Chat} talk=${talk} model=${model} loading=${loading} show=${show} />`, element);
    cost = performance.now() - began;
  };
  // long answers cost more to draw: the page takes a quarter of the time at most
  const later = () => {
    if (due) return;
    due = true;
    if (document.hidden || cost > 8) setTimeout(draw, 3 * cost);
    else requestAnimationFrame(draw);
  };
  talk.addEventListener("change", later);
  window.addEventListener("pagehide", () => talk.save()); // an answer that is being written, too
  draw();
  return {
    update(name, isLoading) {
      model = talk.model = name;
      loading = isLoading;
      later();
    },
  };
}

function Chat({ talk, model, loading, show }) {
  const [panel, setPanel] = useState(null), [scene, setScene] = useState(null);
  const { messages, system, title } = talk.chat;
  const close = () => setPanel(null);
  const box = useRef();
  if (scene) {
    return html`<div class="messages scene-box" tabindex="0" aria-label="Scene"><div class="column">
      <${Scene} key=${scene.id} scene=${scene} model=${model} show=${show} close=${() => setScene(null)} pick=${setScene} />
    </div></div>`;
  }
  return html`
    <header class="chat-bar">
      <h2 title=${title}>${title}</h2>
      <span class="space"></span>
      ${messages.length > 0 && html`<${IconButton} name="scenes" label="Guided scenes" aria-expanded=${String(panel === "scenes")} onClick=${() => setPanel("scenes")} />`}
      <${IconButton} name="new" label="New chat" onClick=${() => { talk.begin(); box.current?.focus(); }} />
      <${IconButton} name="history" label="Earlier chats and export" aria-expanded=${String(panel === "history")} onClick=${() => setPanel("history")} />
      <${IconButton} name="sliders" label="System message and sampling" aria-expanded=${String(panel === "sampling")} onClick=${() => setPanel("sampling")} />
    </header>
    <${Messages} talk=${talk} show=${show}>
      ${system.trim() && html`<details class="system"><summary>System message</summary><div class="said">${system}</div></details>`}
      ${!messages.length && html`<${Welcome} loading=${loading} ask=${(text) => talk.send(text)} pick=${setScene} />`}
      ${messages.map(
        (message, index) => html`<${Message} key=${`${talk.chat.id}-${index}`} message=${message} version=${message.version} index=${index}
          last=${index === messages.length - 1} talk=${talk} show=${show} showTokens=${talk.settings.showTokens} />`,
      )}
    </${Messages}>
    <${Composer} talk=${talk} model=${model} box=${box} />
    ${panel === "scenes" && html`<${Panel} title="Guided scenes" close=${close}><${SceneList} pick=${(picked) => { close(); setScene(picked); }} /></${Panel}>`}
    ${panel === "history" && html`<${History} talk=${talk} close=${close} />`}
    ${panel === "sampling" && html`<${Sampling} talk=${talk} close=${close} />`}
  `;
}

/** Follows the end of what is written unless the reader has scrolled away from it. */
function Messages({ talk, children }) {
  const element = useRef(), follows = useRef(true), before = useRef({ begun: talk.begun, writing: talk.writing });
  const [said, setSaid] = useState("");
  useEffect(() => {
    const { begun, writing } = talk; // a short answer may have begun and ended since the last drawing
    if (begun !== before.current.begun) follows.current = true;
    if (follows.current && talk.chat.messages.length) element.current.scrollTop = element.current.scrollHeight;
    if (begun !== before.current.begun || writing !== before.current.writing) setSaid(writing ? "An answer is being written." : "The answer is there.");
    before.current = { begun, writing };
  });
  const scrolled = ({ target }) => (follows.current = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR);
  return html`
    <div class="messages" ref=${element} onScroll=${scrolled} role="log" aria-live="off" aria-label="Messages" tabindex="0">
      <div class="column">${children}</div>
    </div>
    <p class="hidden-words" role="status">${said}</p>
  `;
}

function Welcome({ loading, ask, pick }) {
  return html`<div class="welcome">
    <h2>${loading ? "The model is being loaded." : "Ask the model something."}</h2>
    <p class="quiet">${loading
      ? "The page goes on by itself as soon as the server is ready."
      : "What it does to answer is shown beside this: every step, every block of its cache, as it happens."}</p>
    ${!loading && html`<ul class="ideas">${IDEAS.map((idea) => html`<li><button onClick=${() => ask(idea)}>${idea}</button></li>`)}</ul>`}
    ${!loading && html`<${SceneList} pick=${pick} />`}
  </div>`;
}

function Composer({ talk, model, box }) {
  const [text, setText] = useState("");
  const { writing, settings } = talk;
  const send = (event) => {
    event?.preventDefault();
    if (talk.writing) return talk.stop();
    const said = box.current.value; // what stands there, drawn or not
    if (!said.trim() || !model) return;
    setText("");
    talk.send(said);
  };
  const keys = (event) => {
    if (event.key === "Escape") talk.stop();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!talk.writing) send();
    }
  };
  useEffect(() => {
    const area = box.current;
    area.style.height = "auto";
    area.style.height = `${Math.min(240, area.scrollHeight + 2)}px`;
  }, [text]);
  return html`<form class="composer" onSubmit=${send}>
    <div class="box">
      <textarea ref=${box} rows="1" aria-label="Message" placeholder="Message" value=${text} onInput=${(e) => setText(e.target.value)} onKeyDown=${keys} autofocus></textarea>
      <button class="primary send" aria-label=${writing ? "Stop" : "Send"} title=${writing ? "Stop (Escape)" : "Send (Enter)"} disabled=${!writing && (!text.trim() || !model)}>
        <${Icon} name=${writing ? "stop" : "send"} />
      </button>
    </div>
    <div class="under">
      <button type="button" class="plain" aria-pressed=${String(settings.showTokens)} title="Ask for log probabilities, and show answers as tokens"
        onClick=${() => talk.set({ showTokens: !settings.showTokens })}><${Icon} name="tokens" /> Tokens</button>
      <span class="space"></span>
      <span class="figure">${talk.full ? "this browser has no room left: the chat is not kept" : "Enter sends, Shift+Enter is a new line"}</span>
    </div>
  </form>`;
}
