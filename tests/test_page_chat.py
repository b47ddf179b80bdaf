"""The page's chat in a real browser, in front of a scripted engine, and of the embedded model in a server that is killed."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from browser import QuietGlass, expect, opened
from fake_engine import FakeEngine
from page_picture import take
from server_driver import Served, ServerProcess, listening, quiet_port, serving, soon
from several_world import World

LONG = "".join(f"word{i} " for i in range(400))
EVERYTHING = """# Title

Some **bold** and `inline`, <b>HTML</b>, a [link](https://example.com/a?b=1&c=2) and ![a picture](https://evil.example/x.png).

```python
def f(a: str) -> bool:
    return a < "<b>"  # & so on
```

| a | b |
|---|---|
| 1 | `x` |

1. one
   - inner

> said
"""


SLOW = """() => {
  const later = window.setTimeout;
  window.setTimeout = (call, ms = 0) => later(call, ms + 300);
  window.requestAnimationFrame = (call) => later(() => call(performance.now()), 300);
}"""


@dataclass
class Chat:
    """The page of a server over a fake engine, and what a user does there."""

    page: Any
    here: Served
    engine: FakeEngine

    async def say(self, text: str) -> None:
        await self.page.get_by_label("Message", exact=True).fill(text)
        await expect(self.button("Send")).to_be_enabled()
        await self.page.keyboard.press("Enter")

    async def ask(self, text: str) -> Any:
        """The element of the whole answer."""
        before = await self.answers.count()
        await self.say(text)
        answer = self.answers.nth(before)
        await expect(answer).to_have_attribute("aria-busy", "false")
        return answer

    @property
    def answers(self) -> Any:
        return self.page.get_by_role("article", name="Answer")

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)


@asynccontextmanager
async def chat(browser: Any, script: Any = lambda *_: "A short answer.", *, engine: FakeEngine | None = None,
               expected: tuple[str, ...] = (), context: dict[str, Any] | None = None, **options: Any):  # fmt: skip
    engine = engine or FakeEngine(script=script if callable(script) else lambda *_: script)
    async with serving(engine, QuietGlass(), **options) as here:
        origin = f"http://127.0.0.1:{here.port}"
        async with opened(browser, origin, expected=expected, **(context or {})) as page:
            yield Chat(page, here, engine)


async def test_an_answer_streams_and_stops_and_comes_again(browser):
    async with chat(browser, engine=FakeEngine(script=lambda *_: LONG, delay=0.02)) as c:
        await c.say("Count.")
        await expect(c.answers).to_contain_text("word3 ")
        await expect(c.answers).to_have_attribute("aria-busy", "true")
        await expect(c.button("Stop")).to_be_visible()
        await c.page.keyboard.press("Escape")
        await expect(c.answers).to_contain_text("Stopped.")
        await soon(lambda: c.engine.aborted, 20)
        text = await c.answers.locator(".prose").inner_text()
        assert LONG.startswith(text.strip()) and "word399" not in text
        c.engine.delay, c.engine.bursts = 0.0, 500
        await c.button("Answer again").click()
        await expect(c.answers).to_contain_text("word399")
        await expect(c.answers).to_have_count(1)
        figures = await c.answers.locator(".figures").inner_text()
        assert "TTFT" in figures and f"{len(LONG) + 1:,} out" in figures and "2 cached" in figures, figures


async def test_markdown_and_code_are_right(browser):
    allowed = {"permissions": ["clipboard-read", "clipboard-write"]}
    async with chat(browser, EVERYTHING, context=allowed) as c:
        await c.page.evaluate("let now = 0; performance.now = () => (now += 100)")  # all takes long on a busy machine
        answer = await c.ask("Show me.")
        await expect(answer.get_by_role("heading", name="Title", level=3)).to_be_visible()
        await expect(answer.locator("strong")).to_have_text("bold")
        await expect(answer.locator("b")).to_have_text("HTML")
        assert await answer.get_by_role("cell").all_inner_texts() == ["1", "x"]
        await expect(answer.get_by_role("listitem").filter(has_text="inner").last).to_have_text("inner")
        await expect(answer.get_by_role("blockquote")).to_contain_text("said")
        link = answer.get_by_role("link", name="link")
        assert await link.get_attribute("href") == "https://example.com/a?b=1&c=2"
        assert await link.get_attribute("rel") == "noopener noreferrer nofollow"
        await expect(answer.get_by_role("link", name="a picture")).to_be_visible()
        assert await answer.locator("img").count() == 0
        code = EVERYTHING.split("```python\n")[1].split("\n```")[0]
        assert await answer.locator("pre").inner_text() == code
        await expect(answer.locator(".code-bar")).to_contain_text("python")
        await c.page.evaluate("window.setTimeout = () => 0")  # it says so for a moment only, which a busy machine misses
        await answer.get_by_role("button", name="Copy", exact=True).click()
        await expect(answer.get_by_role("button", name="Copied")).to_be_visible()
        assert await c.page.evaluate("navigator.clipboard.readText()") == code


HOSTILE = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<svg onload=window.pwned=1><a xlink:href='javascript:window.pwned=1'><text>x</text></a></svg>",
    "[click](javascript:window.pwned=1) <javascript:window.pwned=1> [b](  JaVaScRiPt:window.pwned=1)",
    "[data](data:text/html,<script>window.pwned=1</script>) [v](vbscript:x) [f](file:///etc/passwd)",
    "![x](https://evil.example/leak.png) ![y](javascript:window.pwned=1) ![\" onerror=\"window.pwned=1](x)",
    "<style>body { display: none }</style><div style='position:fixed;inset:0'>over</div>",
    "<iframe src='https://evil.example'></iframe><object data='x'></object><embed src='x'><base href='https://evil.example'>",
    "<form action='https://evil.example'><input name=a><button>Send</button></form><link rel=stylesheet href='https://evil.example/x.css'>",
    "<math><mtext><table><mglyph><style><!--</style><img title=\"--&gt;&lt;img src=1 onerror=window.pwned=1&gt;\">",
    "```\"><script>window.pwned=1</script>\n</code></pre><script>window.pwned=1</script>\n```",
    "<b onclick='window.pwned=1'>b</b> <b\nonmouseover=window.pwned=1>c</b> <details open ontoggle=window.pwned=1>d</details>",
    "<a href='https://evil.example' ping='https://evil.example/p' id=chat name=chat>e</a> <meta http-equiv=refresh content='0;url=https://evil.example'>",
    "| <img src=x onerror=window.pwned=1> | <script>window.pwned=1</script> |\n|---|---|\n| <style>*{}</style> | [x](javascript:1) |",
)
FORBIDDEN = "script, style, img, svg, math, iframe, object, embed, base, form, link, meta, input:not([type=checkbox]), [id], [style]"


async def test_what_is_hostile_is_harmless(browser):
    """Whole, as it streams, and after it has been loaded from the history."""
    cases = iter(HOSTILE)
    async with chat(browser, lambda *_: next(cases)) as c:
        for number, text in enumerate(HOSTILE):
            answer = await c.ask(f"<img src=x onerror=window.pwned=1> {number}")
            assert await answer.locator(".prose").locator(FORBIDDEN).count() == 0, text
        for _ in range(2):
            attributes = await c.page.locator(".answer .prose *").evaluate_all("all => all.flatMap(e => [...e.attributes].map(a => a.name))")
            assert not [name for name in attributes if name.startswith("on") or name == "ping"]
            links = await c.page.locator(".answer .prose a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
            assert all(link is None or link.startswith("https://") for link in links), links
            await expect(c.answers.first).to_contain_text("<script>window.pwned = 1</script>")  # shown as it is written
            assert await c.page.evaluate("window.pwned === undefined")
            assert await c.page.locator("#chat").is_visible()
            await c.page.reload()
            await expect(c.answers).to_have_count(len(HOSTILE))


async def test_huge_and_deep_answers(browser):
    texts = iter(["> " * 4000 + "deep", "x" * 250_000, "[a](" * 9000, "**_a" * 4000, ("**_a" * 900 + "\n\n") * 40 + "end"])
    engine = FakeEngine(script=lambda *_: next(texts), bursts=20_000, max_model_len=2_000_000)
    async with chat(browser, engine=engine) as c:
        for end in ("deep", "x" * 100, "[a](", "_a", "end"):
            answer = await c.ask("More.")
            assert (await answer.locator(".prose").text_content()).rstrip().endswith(end)
        assert await answer.locator(".long").count() > 20  # most paragraphs of the last are as they were written: no time for more
        await c.page.get_by_label("System message and sampling").click()  # it still reacts


async def test_an_answer_that_comes_between_two_drawings_is_told(browser):
    async with chat(browser, "Some words.") as c:
        await c.page.evaluate(SLOW)
        await c.ask("Hello.")
        await expect(c.page.get_by_role("log").locator("+ p")).to_have_text("The answer is there.")


async def test_by_keyboard_alone_and_as_a_screen_reader_hears_it(browser):
    async with chat(browser, "Some words.") as c:
        press, box = c.page.keyboard.press, c.page.get_by_label("Message", exact=True)
        await expect(box).to_be_focused()
        await c.page.keyboard.type("first line")
        await press("Shift+Enter")
        await c.page.keyboard.type("second line")
        await expect(c.button("Send")).to_be_enabled()
        await press("Enter")
        await expect(c.answers).to_contain_text("Some words.")
        assert bytes(i for i in c.engine.prompts[0] if i < 256).decode().count("first line\nsecond line") == 1
        await expect(c.page.get_by_role("log").locator("+ p")).to_have_text("The answer is there.")
        await expect(c.page.locator("body")).to_match_aria_snapshot("""
            - banner:
              - heading "Headrace" [level=1]
              - status
              - button "Use the dark theme"
            - main:
              - region "Chat":
                - heading "first line" [level=2]
                - button "New chat"
                - button "Earlier chats and export"
                - button "System message and sampling"
                - log "Messages":
                  - article "You":
                    - text: first line second line
                    - button "Copy the message"
                    - button "Edit and ask again"
                  - article "Answer":
                    - paragraph: Some words.
                    - button "show me this request in the engine"
                    - button "Copy the answer"
                    - button "Answer again"
                - textbox "Message"
                - button "Send" [disabled]
                - button "Tokens"
              - region "Engine"
        """)
        for _ in range(20):  # to the buttons above, without a mouse
            await press("Shift+Tab")
            if await c.page.evaluate("document.activeElement.ariaLabel") == "System message and sampling":
                break
        await press("Enter")
        await expect(c.page.get_by_role("dialog", name="System message and sampling")).to_be_visible()
        await c.page.wait_for_function("document.querySelector('[role=dialog]').contains(document.activeElement)")
        await c.page.keyboard.type("Be brief.")
        await press("Escape")
        await expect(c.page.get_by_role("dialog")).to_have_count(0)
        await expect(c.button("System message and sampling")).to_be_focused()
        await expect(c.page.get_by_text("System message", exact=True)).to_be_visible()


async def test_what_the_drawer_says_is_asked_for(browser):
    async with chat(browser, served_model_names=("one", "two")) as c:
        await c.page.get_by_label("Model", exact=True).select_option("two")
        await c.button("System message and sampling").click()
        drawer = c.page.get_by_role("dialog")
        await drawer.get_by_label("System message", exact=True).fill("Be brief.")
        await drawer.get_by_label("Temperature").fill("0.25")
        await drawer.get_by_label("Longest answer").fill("7")
        await drawer.get_by_label("Stop at").fill("END\nSTOP")
        await drawer.get_by_label("Close: System message and sampling").click()
        async with c.page.expect_request("**/v1/chat/completions") as sent:
            answer = await c.ask("Go.")
        body = json.loads((await sent.value).post_data)
        assert body["model"] == "two" and body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert "top_p" not in body  # nobody said
        params = c.engine.params[0]
        assert params.temperature == 0.25 and params.max_tokens == 7 and list(params.stop) == ["END", "STOP"]
        await expect(answer).to_contain_text("The longest answer that was asked for ends here.")
        await c.button("Go on").click()
        await soon(lambda: len(c.engine.prompts) == 2)
        assert bytes(i for i in c.engine.prompts[1] if i < 256).decode().endswith("assistant\nA short")
        await c.button("System message and sampling").click()
        await drawer.get_by_label("Temperature").fill("9")
        await drawer.get_by_label("Tools").fill("[oops")
        await c.page.keyboard.press("Escape")
        await expect(await c.ask("Again.")).to_contain_text("not a JSON list")


async def test_errors_in_words(browser):
    engine = FakeEngine()
    async with chat(browser, engine=engine, expected=("status of 4", "status of 5"), max_queued_requests=8) as c:
        await c.page.evaluate(SLOW)
        await c.button("System message and sampling").click()
        drawer = c.page.get_by_role("dialog")
        assert await drawer.evaluate("it => it.contains(document.activeElement)")  # or it takes the next field's keys
        await drawer.get_by_label("Temperature").fill("9")
        await c.page.keyboard.press("Escape")
        await expect(await c.ask("Hot.")).to_contain_text("temperature")
        engine.state.loaded = False
        await expect(await c.ask("Early.")).to_contain_text("Try again in")
        engine.state.loaded = True
        await c.button("System message and sampling").click()
        await c.page.get_by_label("Temperature").fill("")
        await c.page.keyboard.press("Escape")
        engine.script, engine.bursts, engine.fail = (lambda *_: "some words that come before it fails"), 3, lambda at: "error" if at > 9 else None
        engine.delay = 0.02  # in pieces, as an answer comes
        answer = await c.ask("Fail.")
        await expect(answer.get_by_role("alert")).to_contain_text("What had come until then is kept.")
        await expect(answer).to_contain_text("some words")


async def test_tokens_and_what_they_might_have_been(browser):
    async with chat(browser, "Ab c") as c:
        await c.button("Tokens").click()
        answer = await c.ask("Spell.")
        assert await answer.locator(".token").all_text_contents() == ["A", "b", " ", "c", "<eos>"]
        await answer.locator(".token").first.hover()
        await expect(answer.get_by_role("status", name="Token 1")).to_contain_text("A")
        assert await answer.locator(".alternative").count() >= 5
        await answer.get_by_role("group").focus()
        await c.page.keyboard.press("ArrowRight")
        await c.page.keyboard.press("ArrowRight")
        await expect(answer.get_by_role("status", name="Token 3")).to_contain_text("·")
        await c.button("Tokens").click()
        await expect(answer.locator(".prose")).to_have_text("Ab c")


async def test_reasoning_is_folded_and_tools_are_answered(browser):
    call = '<think>Which city?</think><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    texts = iter([call, "<think>ok</think>It is sunny."])
    async with chat(browser, lambda *_: next(texts), reasoning_parser="qwen3", tool_parser="hermes") as c:
        await c.button("System message and sampling").click()
        tool = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
        await c.page.get_by_label("Tools").fill(json.dumps([tool]))
        await c.page.keyboard.press("Escape")
        answer = await c.ask("Weather?")
        await expect(answer.get_by_text("Which city?")).to_be_hidden()
        await answer.get_by_text("Reasoned").click()
        await expect(answer.get_by_text("Which city?")).to_be_visible()
        await expect(answer.get_by_role("region", name="Calls weather")).to_contain_text('"city": "Rome"')
        await answer.get_by_label("Result of weather").fill("sunny, 20 degrees")
        await answer.get_by_role("button", name="Give the result").click()
        await expect(c.answers.last).to_contain_text("It is sunny.")
        asked = bytes(i for i in c.engine.prompts[1] if i < 256).decode()
        assert "sunny, 20 degrees" in asked


async def test_chats_are_kept_edited_exported_and_deleted(browser, tmp_path: Path):
    async with chat(browser, lambda ids, _: "Answer to " + bytes(i for i in ids if i < 256).decode().split("user\n")[-1].split("\n")[0]) as c:
        await c.ask("one")
        await c.ask("two")
        await c.page.reload()
        await expect(c.answers).to_have_count(2)
        await expect(c.answers.last).to_contain_text("Answer to two")
        await c.button("Edit and ask again").first.click()
        await c.page.get_by_label("Your message").fill("uno")
        await c.page.keyboard.press("Enter")
        await expect(c.answers).to_have_count(1)
        await expect(c.answers).to_contain_text("Answer to uno")
        await c.button("Earlier chats and export").click()
        async with c.page.expect_download() as found:
            await c.button("Export this chat as Markdown").click()
        await (await found.value).save_as(tmp_path / "chat.md")
        text = (tmp_path / "chat.md").read_text()
        assert "**You**\n\nuno" in text and "**Model**\n\nAnswer to uno" in text and "two" not in text
        await c.page.keyboard.press("Escape")
        await c.button("New chat").click()
        await expect(c.answers).to_have_count(0)
        await c.ask("other")
        await c.button("Earlier chats and export").click()
        await expect(c.page.get_by_role("dialog").get_by_role("listitem")).to_have_count(2)
        await c.button("Delete other").click()
        await c.page.get_by_role("dialog").get_by_role("button", name="one").first.click()
        await expect(c.answers).to_contain_text("Answer to uno")


async def test_what_is_being_written_is_kept_when_it_is_left(browser):
    async with chat(browser, engine=FakeEngine(script=lambda *_: LONG, delay=0.02)) as c:
        await c.say("first")
        await expect(c.answers).to_contain_text("word3 ")
        await c.button("New chat").click()
        await expect(c.answers).to_have_count(0)
        await c.say("second")
        await expect(c.answers).to_contain_text("word3 ")
        await c.page.reload()
        await expect(c.answers).to_contain_text("word3 ")
        await expect(c.page.get_by_role("article", name="You")).to_have_text("second")
        await c.button("Earlier chats and export").click()
        await c.page.get_by_role("dialog").get_by_role("button", name="first").first.click()
        await expect(c.answers).to_contain_text("word3 ")
        await expect(c.page.get_by_role("article", name="You")).to_have_text("first")
        await soon(lambda: len(c.engine.aborted) == 2, 20)


async def test_the_picker_chooses_among_several_models_and_the_engine_is_that_ones(browser):
    world = World(room=2)
    await world.models.start()
    try:
        async with listening(world.app) as here, opened(browser, f"http://127.0.0.1:{here.port}", expected=("503",)) as page:
            seen = Chat(page, here, world.clients[0])
            status = page.locator(".status")
            await expect(status).to_contain_text("not loaded")
            await page.evaluate(SLOW)  # the message is sent before a busy browser has drawn what was picked
            for name in ("b", "a"):
                await page.get_by_label("Model", exact=True).select_option(name)
                await expect(await seen.ask(f"hello {name}")).to_contain_text(f"I am {name}.")
                await expect(status).to_contain_text("has loaded its model")
                hub = world.models.served["ab".index(name)].hub
                await soon(lambda hub=hub: hub.viewers)
            assert world.states() == ["loaded", "loaded"]
    finally:
        await world.http.aclose()
        await world.models.close()


async def test_with_an_api_key(browser):
    async with chat(browser, api_keys=("secret-1",), expected=("status of 401",)) as c:
        ask = c.page.get_by_role("dialog", name="API key")
        await expect(ask).to_contain_text("answers those who have a key")
        await ask.get_by_label("API key").fill("wrong")
        await c.page.keyboard.press("Enter")
        await expect(ask).to_contain_text("does not know this key")
        await ask.get_by_label("API key").fill("secret-1")
        await c.page.keyboard.press("Enter")
        await expect(ask).to_have_count(0)
        await expect(await c.ask("Hello.")).to_contain_text("A short answer.")
        assert "secret-1" not in await c.page.evaluate("JSON.stringify(localStorage)")
        await c.page.reload()
        await expect(await c.ask("Still there?")).to_contain_text("A short answer.")


async def test_dark_light_and_narrow(browser):
    background = "getComputedStyle(document.body).backgroundColor"
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True}
    async with chat(browser, "`wide " + "w" * 300 + "`\n\n```\n" + "x" * 300 + "\n```", context=phone) as c:
        dark = await c.page.evaluate(background)
        await c.button("Use the light theme").click()
        light = await c.page.evaluate(background)
        assert dark != light
        await c.page.reload()
        assert await c.page.evaluate(background) == light
        await c.ask("Wide.")
        assert await c.page.evaluate("document.documentElement.scrollWidth") == 390
        await expect(c.page.get_by_role("region", name="Engine")).to_be_hidden()
        await c.button("show me this request in the engine").click()
        await expect(c.page.get_by_role("region", name="Chat")).to_be_hidden()
        await c.page.get_by_role("tab", name="Chat").click()
        await expect(c.answers).to_be_visible()


async def test_a_killed_server_and_the_page_that_comes_back(browser, smollm2, tmp_path: Path):
    """With the real model, and the README's picture of it. What had come stays, and goes on in the next server where it was cut off."""
    async with AsyncExitStack() as stack:
        options = ("--port", str(quiet_port()), "--max-model-len", "2048", "--no-standby", "--override-generation-config", '{"temperature": 0}')
        server = stack.enter_context(ServerProcess(smollm2, *options, builder="core_builders:braked", tmp=tmp_path))
        page = await stack.enter_async_context(opened(browser, server.url, expected=("ERR_",)))
        c = Chat(page, None, None)  # type: ignore
        await expect(page.get_by_role("heading", name="Ask the model something.")).to_be_visible(timeout=60_000)  # it has loaded
        assert f"open {server.url}/ in a browser" in server.log()
        await take(browser, server.url, tmp_path / "page.png", count=2, tokens=4, length=4)
        assert 20_000 < (tmp_path / "page.png").stat().st_size < 200_000
        with server.braked():
            await c.say("Tell a long story of a miller, his river and his seven daughters.")
            await expect(c.answers.locator(".figures")).to_contain_text("TPOT", timeout=60_000)
            server.kill()
        await expect(c.answers.get_by_role("alert")).to_contain_text("The connection was lost")
        text = (await c.answers.locator(".prose").inner_text()).strip()
        assert text
        stack.enter_context(ServerProcess(smollm2, *options)).wait_ready()
        await c.button("Go on").click()
        await expect(c.answers.get_by_role("alert")).to_have_count(0)
        await page.get_by_label("Message", exact=True).press("Escape")  # unless it has ended by itself
        await expect(c.answers).to_have_attribute("aria-busy", "false")
        await expect(c.answers.get_by_role("alert")).to_have_count(0)
        assert (await c.answers.locator(".prose").inner_text()).startswith(text[:20])
