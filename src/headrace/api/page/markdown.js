// What a model writes, as HTML that can do nothing: Markdown by marked, then only what DOMPurify lets through.
// Images become links (loading one would tell its host), HTML that is not plain formatting is shown as it is written.

import DOMPurify from "./vendor/purify.js";
import { Component, html } from "./vendor/htm-preact.js";
import { Lexer, Marked } from "./vendor/marked.js";

// Parsers have bad cases, and a model may write one: what is longer than these is shown as it is written.
const LONGEST = 200_000, LONGEST_CODE = 50_000, LONGEST_PARAGRAPH = 4_000; // characters
// marked's time for a paragraph grows with the square of its emphasis marks. Ordinary ones are parsed however busy the machine is.
const MARKS = 100, PATIENCE = 150; // ms for all paragraphs of a text that have more marks
const FORMATTING = /^<\/?(?:b|strong|i|em|u|s|del|ins|br|hr|sub|sup|kbd|mark|small|details|summary)\s*\/?>$/i;
const TAGS = [
  "a", "b", "blockquote", "br", "button", "code", "del", "details", "div", "em", "h3", "h4", "h5", "h6", "hr", "i", "input", "ins", "kbd",
  "li", "mark", "ol", "p", "pre", "s", "small", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul",
];
const RULES = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "tabindex", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

export function escaped(text) {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}

const marked = new Marked({
  gfm: true, breaks: true,
  renderer: {
    html: ({ text, long }) => (long ? `<span class="long">${escaped(text)}</span>` : FORMATTING.test(text.trim()) ? text : escaped(text)),
    image({ href, title, text }) {
      return `<a href="${escaped(href)}" title="${escaped(title ?? "an image; it is not loaded")}">${escaped(text || "image")}</a>`;
    },
    heading({ tokens, depth }) {
      const tag = `h${Math.min(6, depth + 2)}`; // the page has its own first two
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>\n`;
    },
    code: ({ text, lang }) => codeBlock(text, (lang ?? "").split(/\s/)[0]),
  },
});

/** marked's own, with a bound on what a text's paragraphs may cost. */
class BoundedLexer extends Lexer {
  lex(text) {
    this.blockTokens(text.replace(/\r\n|\r/g, "\n"), this.tokens);
    let spent = 0;
    for (const { src, tokens } of this.inlineQueue) {
      const many = (src.match(/[*_~]+/g) ?? []).length > MARKS;
      if (src.length > LONGEST_PARAGRAPH || (many && spent > PATIENCE)) {
        tokens.push({ type: "html", raw: src, text: src, long: true });
        continue;
      }
      const began = performance.now();
      this.inlineTokens(src, tokens);
      if (many) spent += performance.now() - began;
    }
    this.inlineQueue = [];
    return this.tokens;
  }
}

function codeBlock(text, language) {
  const bar = `<div class="code-bar"><span>${escaped(language || "text")}</span><button type="button" class="plain copy">Copy</button></div>`;
  return `<div class="code">${bar}<pre tabindex="0"><code>${highlighted(text, language.toLowerCase())}</code></pre></div>\n`;
}

const HASH = new Set(["python", "py", "bash", "sh", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "perl", "makefile", "dockerfile", "ini"]);
const DASH = new Set(["sql", "lua", "haskell", "hs"]);
const PLAIN = new Set(["", "text", "txt", "plaintext", "plain", "markdown", "md", "diff", "console", "output"]);
const WORDS = `abstract and as assert async await bool boolean break case catch char class const continue def default defer delete do double elif else
  enum except export extends extern false False final finally float fn for from func function go goto if impl implements import in int interface
  is lambda let long loop match mod module mut namespace new nil None nonlocal not null or package pass private protected pub public raise return
  select self short signed sizeof static std str string struct super switch template then this throw trait true True try type typedef typeof
  undefined union unsafe unsigned use using var void volatile where while with yield SELECT FROM WHERE GROUP ORDER BY INSERT INTO VALUES UPDATE SET
  DELETE CREATE TABLE JOIN LEFT RIGHT INNER ON AS AND OR NOT NULL LIMIT echo fi done esac`.split(/\s+/);
const KEYWORDS = new Set(WORDS);

/** Comments, strings, numbers and common words of most languages: enough to read by, and nothing to load. */
function highlighted(text, language) {
  if (PLAIN.has(language) || text.length > LONGEST_CODE) return escaped(text);
  const comment = HASH.has(language) ? "#[^\\n]*" : DASH.has(language) ? "--[^\\n]*" : "//[^\\n]*|/\\*[^]*?(?:\\*/|$)";
  const parts = new RegExp(
    `(${comment})|("""[^]*?(?:"""|$)|"(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'|\`(?:\\\\.|[^\`\\\\])*\`?)|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g",
  );
  let out = "", at = 0;
  for (const found of text.matchAll(parts)) {
    const [whole, comments, strings, numbers, word] = found;
    const kind = comments ? "c" : strings ? "s" : numbers ? "n" : KEYWORDS.has(word) ? "k" : null;
    out += escaped(text.slice(at, found.index)) + (kind ? `<span class="hl-${kind}">${escaped(whole)}</span>` : escaped(whole));
    at = found.index + whole.length;
  }
  return out + escaped(text.slice(at));
}

/** The top-level blocks of a text: [{raw, token}], token null where text stays text. */
function blocksOf(text) {
  if (text.length > LONGEST) return [{ raw: text, token: null }];
  try {
    const tokens = new BoundedLexer(marked.defaults).lex(text);
    return tokens.filter(({ type }) => type !== "space" && type !== "def").map((token) => ({ raw: token.raw, token }));
  } catch {
    return [{ raw: text, token: null }]; // nested too deeply
  }
}

function fragment({ raw, token }) {
  if (token !== null) {
    try {
      return DOMPurify.sanitize(marked.parser([token]), RULES);
    } catch {} // nested too deeply
  }
  const plain = document.createElement("div");
  plain.className = "as-text";
  plain.textContent = raw;
  return plain;
}

/** While an answer is written only its last block changes: the others keep their elements, selection and focus. */
class Block extends Component {
  shouldComponentUpdate(next) {
    return next.block.raw !== this.props.block.raw || next.done !== this.props.done;
  }

  fill() {
    this.base.replaceChildren(fragment(this.props.block));
  }

  componentDidMount() {
    this.fill();
  }

  componentDidUpdate() {
    this.fill();
  }

  render() {
    return html`<div class="block"></div>`;
  }
}

export class Markdown extends Component {
  shouldComponentUpdate(next) {
    return next.text !== this.props.text || next.done !== this.props.done;
  }

  render({ text, done }) {
    return html`<div class="prose" onClick=${copyCode}>
      ${blocksOf(text).map((block, i) => html`<${Block} key=${i} block=${block} done=${done} />`)}
    </div>`;
  }
}

async function copyCode(event) {
  const button = event.target.closest("button.copy");
  if (!button) return;
  await copyText(button.closest(".code").querySelector("code").textContent);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** The clipboard belongs to secure contexts; a server on the local network is none, and the old way works there. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
