// One conversation and its requests, without a pixel: what is asked, what comes back, how long it took.

import { Refused, ask, events } from "./api.js";
import { listChats, loadChat, loadSettings, removeChat, saveChat, saveSettings } from "./store.js";

const TITLE = 60; // characters
const ALTERNATIVES = 5; // of a token, where tokens are shown

/** The numbers that a request may carry; what is empty is the model's own. */
export const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.05, "0 takes the likeliest token, 1 follows the model's odds"],
  ["top_p", "Top p", 0, 1, 0.01, "only the likeliest tokens that together have this share"],
  ["top_k", "Top k", 0, 1000, 1, "only so many of the likeliest; 0: all"],
  ["min_p", "Min p", 0, 1, 0.01, "only tokens with this share of the likeliest one's probability"],
  ["max_tokens", "Longest answer", 1, 1048576, 1, "tokens; empty: what the context has room for"],
  ["repetition_penalty", "Repetition penalty", 0.01, 2, 0.01, "above 1: tokens that have been there get less likely"],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "once for each token that the answer has"],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "for each time that it has it"],
  ["seed", "Seed", 0, 2147483647, 1, "the same seed and conversation: the same answer, whoever else is served"],
];

/** "change": something is to be drawn. A message's `version` grows with each of its changes. */
export class Conversation extends EventTarget {
  constructor() {
    super();
    this.model = null;
    this.settings = { showTokens: false, numbers: {}, stop: "", thinking: "", tools: "", ...loadSettings() };
    this.controller = null; // of the answer that is being written
    this.begun = 0; // answers
    this.full = false; // this browser has no room for the conversation
    const latest = listChats()[0];
    if (!latest || !this.open(latest.id)) this.begin();
  }

  get writing() {
    return this.controller !== null;
  }

  begin() {
    this.stop();
    this.chat = { id: crypto.randomUUID?.() ?? String(Date.now()), title: "New chat", system: "", messages: [] };
    this.changed();
  }

  open(id) {
    const chat = loadChat(id);
    if (!chat) return false;
    this.stop();
    this.chat = chat;
    for (const message of chat.messages) message.version = 0;
    this.changed();
    return true;
  }

  remove(id) {
    removeChat(id);
    if (id === this.chat.id) {
      this.chat.removed = true;
      this.begin();
    } else this.changed();
  }

  set(changes) {
    Object.assign(this.settings, changes);
    saveSettings(this.settings);
    this.changed();
  }

  setSystem(text) {
    this.chat.system = text;
    this.save();
  }

  // ---------------------------------------------------------------- what is asked

  send(text) {
    this.push({ role: "user", content: text });
    if (this.chat.title === "New chat") this.chat.title = text.trim().split("\n")[0].slice(0, TITLE);
    this.save();
    return this.answer();
  }

  /** Another answer in place of this one; what came after it goes. */
  regenerate(index) {
    this.stop();
    this.chat.messages.length = index;
    return this.answer();
  }

  /** The user's message in other words; what came after it goes. */
  edit(index, text) {
    this.stop();
    this.chat.messages.length = index;
    return this.send(text);
  }

  /** The result of a tool call; when all calls of the answer have one, the model goes on. */
  giveResult(index, call, text) {
    const { messages } = this.chat;
    messages.splice(index + 1, 0, { role: "tool", call: call.id, name: call.name, content: text, version: 0 });
    const open = messages[index].calls.filter((known) => !messages.some((m) => m.role === "tool" && m.call === known.id));
    this.touch(messages[index]);
    if (!open.length) return this.answer();
  }

  /** An answer that was cut off goes on where it stopped. */
  resume(index) {
    this.chat.messages.length = index + 1;
    return this.answer(this.chat.messages[index]);
  }

  stop() {
    this.controller?.abort();
  }

  body(resumed) {
    const { settings, chat } = this;
    const messages = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
    for (const message of chat.messages) {
      if (message.role === "assistant") {
        if (!message.content && !message.calls?.length) continue; // it came to nothing
        const calls = message.calls?.map((c) => ({ id: c.id, type: "function", function: { name: c.name, arguments: c.arguments } }));
        messages.push({ role: "assistant", content: message.content, ...(calls?.length ? { tool_calls: calls } : {}) });
      } else if (message.role === "tool") messages.push({ role: "tool", tool_call_id: message.call, content: message.content });
      else messages.push({ role: "user", content: message.content });
    }
    const body = { model: this.model, messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    for (const [name] of NUMBERS) if (settings.numbers[name] !== undefined) body[name] = settings.numbers[name];
    if (settings.stop.trim()) body.stop = settings.stop.split("\n").filter(Boolean);
    if (settings.thinking) body.enable_thinking = settings.thinking === "on";
    if (settings.showTokens) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
    if (settings.tools.trim()) body.tools = readTools(settings.tools);
    if (resumed) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    return body;
  }

  // ---------------------------------------------------------------- what comes back

  async answer(resumed = null) {
    this.stop();
    this.begun += 1;
    const { chat } = this; // another may be open before this has ended
    const controller = (this.controller = new AbortController());
    let message = resumed, body;
    try {
      body = this.body(resumed !== null);
    } catch (error) {
      message ??= this.push(emptyAnswer());
      return this.over(chat, controller, message, error);
    }
    message ??= this.push(emptyAnswer());
    Object.assign(message, { error: null, stopped: false, cut: false, live: true });
    const clock = new Clock();
    this.touch(message);
    try {
      const response = await ask("v1/chat/completions", { method: "POST", body, signal: controller.signal });
      for await (const chunk of events(response)) {
        take(message, chunk, clock);
        this.touch(message);
      }
      this.over(chat, controller, message, null);
    } catch (error) {
      this.over(chat, controller, message, error);
    }
  }

  over(chat, controller, message, error) {
    message.live = false;
    if (error?.name === "AbortError") message.stopped = true;
    else if (error) message.error = error instanceof Refused || error instanceof Wrong ? error.message : `The page failed: ${error.message}`;
    if (this.controller === controller) this.controller = null;
    this.touch(message);
    this.save(chat);
  }

  push(message) {
    message.version = 0;
    this.chat.messages.push(message);
    this.changed();
    return message;
  }

  touch(message) {
    message.version += 1;
    this.changed();
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }

  save(chat = this.chat) {
    if (chat.removed || (!chat.messages.length && !chat.system)) return;
    const messages = chat.messages.map(({ tokens, version, live, ...kept }) => kept); // tokens are large
    this.full = !saveChat({ ...chat, messages });
    this.changed();
  }
}

class Wrong extends Error {}

function readTools(text) {
  let tools = null;
  try {
    tools = JSON.parse(text);
  } catch {}
  if (!Array.isArray(tools)) throw new Wrong("The tools in the sampling drawer are not a JSON list.");
  return tools.map((tool) => (tool?.type ? tool : { type: "function", function: tool }));
}

function emptyAnswer() {
  return { role: "assistant", content: "", reasoning: "", calls: [], tokens: [], figures: null, id: null, finish: null };
}

/** When tokens came, as the browser saw it. */
class Clock {
  constructor() {
    this.began = performance.now();
    this.first = this.last = null;
    this.firstCount = 0; // tokens that came with the first piece
  }
}

function take(message, chunk, clock) {
  message.id = chunk.id;
  const choice = chunk.choices[0], delta = choice?.delta;
  if (delta) {
    message.content += delta.content ?? "";
    message.reasoning = (message.reasoning ?? "") + (delta.reasoning_content ?? "");
    for (const piece of delta.tool_calls ?? []) {
      const call = (message.calls[piece.index] ??= { id: piece.id, name: piece.function.name, arguments: "" });
      call.arguments += piece.function.arguments ?? "";
    }
    for (const entry of choice.logprobs?.content ?? []) (message.tokens ??= []).push(entry);
    message.finish = choice.finish_reason ?? message.finish;
    message.cut = message.finish === "length";
  }
  if (chunk.usage) count(message, chunk.usage, clock);
}

/** TTFT: until the first piece; TPOT: between tokens after it. */
function count(message, usage, clock) {
  const output = usage.completion_tokens;
  if (!output) return;
  const now = performance.now();
  if (clock.first === null) [clock.first, clock.firstCount] = [now, output];
  if (output > (message.figures?.output ?? 0) || clock.last === null) clock.last = now;
  const spread = output - clock.firstCount;
  const tpot = spread > 0 ? (clock.last - clock.first) / spread : null;
  message.figures = {
    ttft: clock.first - clock.began, tpot, rate: tpot ? 1000 / tpot : null, output, prompt: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0, reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
  };
}

// ---------------------------------------------------------------- for taking along

export function asMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  if (chat.system) parts.push(`**System**\n\n${chat.system}`);
  for (const m of chat.messages) {
    const name = { user: "You", assistant: "Model", tool: `Result of ${m.name}` }[m.role];
    const calls = (m.calls ?? []).map((call) => "```json\n" + JSON.stringify({ name: call.name, arguments: call.arguments }) + "\n```");
    parts.push([`**${name}**`, m.content, ...calls].filter(Boolean).join("\n\n"));
  }
  return parts.join("\n\n") + "\n";
}

export function asJson(chat) {
  const { title, system, messages } = chat;
  return JSON.stringify({ title, system, messages: messages.map(({ version, live, ...kept }) => kept) }, null, 2) + "\n";
}
