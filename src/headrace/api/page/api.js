// The server's API as the page uses it: one base address, one key, errors in words.

const BASE = new URL("..", import.meta.url); // the page may stand below a proxy's path
const STORED = "headrace.key";
const LOST = "The connection was lost before the answer's end.";

export function apiKey() {
  try {
    return sessionStorage.getItem(STORED);
  } catch {
    return null;
  }
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

/** What the server said no with; `status` 0: it was not reached. */
export class Refused extends Error {
  constructor(status, words, code = null) {
    super(words);
    this.status = status;
    this.code = code;
  }
}

export async function ask(path, { method = "GET", body = null, signal = null } = {}) {
  const headers = {};
  const key = apiKey();
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== null) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), { method, headers, signal, body: body === null ? null : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export async function askJson(path, options) {
  const response = await ask(path, options);
  return response.json();
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {} // not ours: a proxy's page
  const wait = Number(response.headers.get("retry-after"));
  let words = typeof error.message === "string" ? error.message : `The server answered ${response.status} ${response.statusText}.`;
  if (response.status === 429 || response.status === 503) words += wait ? ` Try again in ${wait} s.` : "";
  return new Refused(response.status, words, error.code ?? null);
}

/** The data of each event of a response's body, parsed. Ends at [DONE]; raises Refused where the stream carries an error or breaks. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", whole = false;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done && whole) return; // read to its end, a connection can be used again
      if (done) throw new Refused(0, LOST);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") whole = true;
        else if (data) yield parsed(data); // without any it is a sign of life
      }
    }
  } catch (error) {
    if (whole) return;
    if (error instanceof Refused || error.name === "AbortError") throw error;
    throw new Refused(0, LOST);
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(data) {
  const event = JSON.parse(data);
  if (event.error) throw new Refused(500, event.error.message ?? "The server reported an error.", event.error.code ?? null);
  return event;
}
