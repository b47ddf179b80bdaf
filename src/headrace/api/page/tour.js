// The tour of docs/tour.md, with an anchor at each heading; its pictures and what it links to are not part of the page.

import DOMPurify from "./vendor/purify.js";
import { Marked } from "./vendor/marked.js";

const anchor = (words) => words.toLowerCase().replace(/<[^>]*>|[^\p{L}\p{N}\s-]/gu, "").trim().replace(/\s/g, "-");

const marked = new Marked({
  gfm: true,
  renderer: {
    heading({ tokens, depth }) {
      const words = this.parser.parseInline(tokens);
      return `<h${depth} id="${anchor(words)}">${words}</h${depth}>\n`;
    },
    image: () => "",
    link({ tokens }) {
      return this.parser.parseInline(tokens);
    },
  },
});

const response = await fetch(new URL("tour.md", import.meta.url));
const element = document.getElementById("tour");
element.append(DOMPurify.sanitize(marked.parse(await response.text()), { RETURN_DOM_FRAGMENT: true }));
element.setAttribute("aria-busy", "false");
document.getElementById(location.hash.slice(1))?.scrollIntoView();
