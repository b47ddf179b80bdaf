// What this browser remembers: conversations and settings, in localStorage, bounded. Nothing of it leaves the machine.

const LIST = "headrace.chats", ONE = "headrace.chat.", SETTINGS = "headrace.settings";
const MOST = 100; // conversations; the oldest go
const LARGEST = 1_000_000; // characters of one: it may not drive out all others

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // forbidden, or written by somebody else
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden
  }
}

/** [{id, title, time}], the latest first. */
export function listChats() {
  const found = read(LIST, []);
  return Array.isArray(found) ? found : [];
}

export function loadChat(id) {
  const found = read(ONE + id, null);
  return found && Array.isArray(found.messages) ? found : null;
}

/** False: there is no room for it. */
export function saveChat(chat) {
  if (JSON.stringify(chat).length > LARGEST) return false;
  let others = listChats().filter((known) => known.id !== chat.id);
  while (others.length >= MOST) forget(others.pop());
  const entry = { id: chat.id, title: chat.title, time: Date.now() };
  while (!(write(ONE + chat.id, chat) && write(LIST, [entry, ...others]))) {
    if (!others.length) return false;
    forget(others.pop());
  }
  return true;
}

export function removeChat(id) {
  forget({ id });
  write(LIST, listChats().filter((known) => known.id !== id));
}

function forget({ id }) {
  try {
    localStorage.removeItem(ONE + id);
  } catch {}
}

export function loadSettings() {
  const found = read(SETTINGS, {});
  return found && typeof found === "object" ? found : {};
}

export function saveSettings(settings) {
  write(SETTINGS, settings);
}
