// Puts the page together: the bar, the chat, the engine; asks for the API key where the server wants one.

import { html, render, useEffect, useLayoutEffect, useState } from "./vendor/htm-preact.js";
import { apiKey, askJson, setApiKey } from "./api.js";
import { mountChat } from "./chat.js";
import { mount, showRequest } from "./engine.js";
import { connect } from "./feed.js";

const bus = new EventTarget(); // "tab": another one is shown; "load": ask the server again; "ask-key": the key is to be changed
const again = 2000; // ms between questions while the server is not ready

function showTab(name) {
  document.body.dataset.tab = name;
  bus.dispatchEvent(new Event("tab"));
}

function Bar({ models, model, status, pick, needsKey }) {
  const [tab, setTab] = useState(document.body.dataset.tab);
  useEffect(() => {
    const changed = () => setTab(document.body.dataset.tab);
    bus.addEventListener("tab", changed);
    return () => bus.removeEventListener("tab", changed);
  }, []);
  return html`
    <h1>
      <svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round" aria-hidden="true">
        <path d="M3 7c4 0 4 3 9 3s5-3 9-3M3 12c4 0 4 3 9 3s5-3 9-3M3 17c4 0 4 3 9 3s5-3 9-3" />
      </svg>
      <span class="wide">Headrace</span>
    </h1>
    ${models.length > 1
      ? html`<select class="model" aria-label="Model" value=${model} onChange=${(e) => pick(e.target.value)}>
          ${models.map((name) => html`<option value=${name}>${shortName(name)}</option>`)}
        </select>`
      : html`<span class="model" title=${model}>${shortName(model ?? "")}</span>`}
    <div class="tabs" role="tablist" aria-label="View">
      ${["chat", "engine"].map(
        (name) => html`<button class="plain" role="tab" aria-controls=${name} aria-selected=${String(tab === name)} onClick=${() => showTab(name)}>
          ${name === "chat" ? "Chat" : "Engine"}
        </button>`,
      )}
    </div>
    <span class="space"></span>
    <span class="status" role="status" data-status=${status.kind}><span>${status.words}</span></span>
    ${needsKey && html`<button class="plain wide" onClick=${() => bus.dispatchEvent(new Event("ask-key"))}>API key</button>`}
    <${ThemeButton} />
  `;
}

/** Of a model that is a path, its last part. */
function shortName(model) {
  return model.startsWith("/") ? model.split("/").at(-1) : model;
}

function ThemeButton() {
  const system = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? system());
  const other = theme === "dark" ? "light" : "dark";
  const change = () => {
    document.documentElement.dataset.theme = other;
    try {
      localStorage.setItem("headrace.theme", other);
    } catch {} // holds for this visit
    setTheme(other);
    window.dispatchEvent(new Event("themechange"));
  };
  return html`<button class="plain" onClick=${change} aria-label=${`Use the ${other} theme`} title=${`Use the ${other} theme`}>
    <svg class="icon" viewBox="0 0 16 16" aria-hidden="true">
      ${theme === "dark"
        ? html`<circle cx="8" cy="8" r="3" /><path d="M8 1v2M8 13v2M1 8h2M13 8h2M3 3l1.4 1.400M11.6 11.6 13 13M3 13l1.4-1.400M11.6 4.4 13 3" />`
        : html`<path d="M13.5 9.500A6 6 0 0 1 6.5 2.500a6 6 0 1 0 7 7z" />`}
    </svg>
  </button>`;
}

function KeyDialog({ wrong, done }) {
  const given = (event) => {
    event.preventDefault();
    const key = new FormData(event.target).get("key").trim();
    if (key) done(key);
  };
  const opened = (element) => element && !element.open && element.showModal();
  return html`<dialog ref=${opened} aria-labelledby="key-title" onCancel=${(e) => e.preventDefault()}>
    <form onSubmit=${given}>
      <div>
        <h2 id="key-title">API key</h2>
        <p>${wrong ? "The server does not know this key." : "This server answers those who have a key."} It stays in this tab and goes with its closing.</p>
      </div>
      <input name="key" type="password" autocomplete="off" aria-label="API key" required autofocus />
      <div class="actions"><button class="primary">Open</button></div>
    </form>
  </dialog>`;
}

function App({ chat }) {
  const [models, setModels] = useState([]);
  const [model, setModel] = useState(null);
  const [several, setSeveral] = useState(false);
  const [loading, setLoading] = useState(true);
  const [status, setStatus] = useState({ kind: "connecting", words: "connecting" });
  const [key, setKey] = useState({ needed: false, asking: false, wrong: false });

  useEffect(() => {
    let over = false, timer = null;
    const load = async () => {
      try {
        const served = (await askJson("v1/models")).data;
        if (over) return;
        // of several models each has a state, and is loaded when it is asked something
        const names = served.map((found) => found.id), loaded = served.some((found) => found.max_model_len || found.state);
        setSeveral(served.some((found) => found.state));
        if (!loaded) timer = setTimeout(load, again);
        setLoading(!loaded);
        setModels(names);
        setModel((now) => (names.includes(now) ? now : names[0]));
        setKey((now) => ({ ...now, needed: apiKey() !== null, asking: false, wrong: false }));
      } catch (error) {
        if (over) return;
        if (error.status === 401) setKey({ needed: true, asking: true, wrong: apiKey() !== null });
        else timer = setTimeout(load, again);
      }
    };
    const asked = () => setKey((now) => ({ ...now, asking: true, wrong: false }));
    bus.addEventListener("ask-key", asked);
    bus.addEventListener("load", load);
    load();
    return () => { over = true; clearTimeout(timer); };
  }, []);

  useEffect(() => {
    if (!model) return;
    const feed = connect({
      apiKey: apiKey(),
      model: several ? model : null,
      onState: () => {},
      onStatus: (kind, words) => setStatus({ kind, words: words ?? kind }),
    });
    mount(document.getElementById("engine"), feed);
    return () => feed.close();
  }, [several ? model : model !== null, key.asking]);

  // before the next thing that the user does: a message goes to the model that the bar shows
  useLayoutEffect(() => chat.update(model, loading), [model, loading]);
  const given = (text) => { setApiKey(text); bus.dispatchEvent(new Event("load")); };
  return html`
    <${Bar} ...${{ models, model, status, pick: setModel, needsKey: key.needed }} />
    ${key.asking && html`<${KeyDialog} wrong=${key.wrong} done=${given} />`}
  `;
}

function show(id) {
  showTab("engine");
  showRequest(id);
}

document.body.dataset.tab = "chat";
const chat = mountChat(document.getElementById("chat"), show);
render(html`<${App} chat=${chat} />`, document.getElementById("bar"));
