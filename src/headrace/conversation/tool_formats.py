"""Tool calls in the text of an answer: one parser for each way in which models write them, by name or by chat template.

Which text becomes a call, which stays text and which is dropped: see tool_parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headrace.conversation.events import CallArguments
from headrace.conversation.harmony import HarmonyParser
from headrace.conversation.marked_calls import DeepSeekParser, GraniteParser, KimiParser, Phi4Parser
from headrace.conversation.piece_reader import NotACall, Reading
from headrace.conversation.tagged_calls import GlmParser, Qwen3CoderParser
from headrace.conversation.tool_parser import ToolParser, random_id, short_id
from headrace.conversation.tool_syntax import MAX_NAME, BracketScanner, read_python_calls
from headrace.text.markers import Markers


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3.

    The end tag may be missing. One line break before a call belongs to its markup.
    """

    opening = Markers(["<tool_call>", "\n<tool_call>"])
    closing = "</tool_call>"
    markers = ("<tool_call>", closing)
    streams = True

    def _calls(self, marker: str) -> Reading[None]:
        yield from self._call_object()
        yield from self._spaces(self._give)  # kept for the case that other text follows
        if (yield from self._perhaps(self.closing)):
            self._space = []


class LlamaJsonParser(ToolParser):
    """`{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`: Llama 3.1 to 3.3.

    Several calls are separated by `;`. Without the tag only an output that begins with such an object is a call, and
    its first key tells at once whether it may be one.
    """

    opening = Markers(["<|python_tag|>"])
    markers = opening.strings
    unmarked = "{"
    argument_keys = ("parameters", "arguments")
    first_keys = ('"name"', '"type"', '"function"', '"parameters"', '"arguments"', '"id"')

    def _calls(self, marker: str) -> Reading[None]:
        head = "" if marker else (yield from self._first_key())
        while True:
            yield from self._call_object(head, needs_arguments=not marker)
            head = ""
            while (yield from self._more()) and (self._text[self._at].isspace() or self._text[self._at] in ";,"):
                self._take()
            if not (yield from self._more()):
                return
            yield from self._expect("{")

    def _first_key(self) -> Reading[str]:
        """The beginning of an object up to its first key, which a call may have."""
        head = key = ""
        while key not in self.first_keys:
            c = yield from self._next()
            if not c.isspace() and (c != "{" or key):
                key += c
                if not any(k.startswith(key) for k in self.first_keys):
                    raise NotACall
            head += self._take()
        return head


class MistralParser(ToolParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` (up to v7) and, since v11,
    `[TOOL_CALLS]name[ARGS]{...}`, in which an id may stand: `name[CALL_ID]id[ARGS]{...}`.
    """

    opening = Markers(["[TOOL_CALLS]"])
    tags = ("[ARGS]", "[CALL_ID]")
    markers = (*opening.strings, *tags)
    streams = True
    new_id = staticmethod(short_id)

    def _calls(self, marker: str) -> Reading[None]:
        yield from self._spaces()
        first = yield from self._next()
        if first == "{":
            yield from self._call_object()
        elif first == "[":
            self._take()
            yield from self._list()
        else:
            yield from self._named()

    def _named(self) -> Reading[None]:
        name, call_id, tag = (yield from self._word()), None, ""
        while tag != "[ARGS]" and (yield from self._next()) == "[":
            tag = yield from self._one_of(self.tags)
            if tag == "[CALL_ID]":
                call_id = yield from self._word()
        if tag == "[CALL_ID]" or (not tag and (yield from self._next()) != "{"):
            raise NotACall
        yield from self._object(name, call_id)
        self._give_call()


class JsonListParser(MistralParser):
    """`[{"name": ..., "parameters": {...}}, ...]` and nothing else: what a required call is constrained to."""

    opening = Markers([])
    markers = ()
    constrained = True
    unmarked = "[{"
    new_id = staticmethod(random_id)


class PythonicParser(ToolParser):
    """`[f(a=1), g()]`, a Python list of calls with keyword arguments: Llama 4, and others told to.

    `<|python_start|>` and `<|python_end|>` may stand around it. Without them only an output that begins with such a list
    is one; its first characters tell at once whether it may be. The list is read as a whole.
    """

    closing = "<|python_end|>"
    opening = Markers(["<|python_start|>", closing])
    markers = opening.strings
    unmarked = "["
    names = MappingProxyType({"true": True, "false": False, "null": None})

    def _calls(self, marker: str) -> Reading[None]:
        if marker == self.closing and self.num_calls:
            return
        yield from self._expect("[")
        head, name = self._take(), ""
        while (c := (yield from self._next())) != "(" or not name:
            if name or not c.isspace():
                name += c
                if not name.replace(".", "_").isidentifier() or len(name) > MAX_NAME:
                    raise NotACall
            head += self._take()
        calls = read_python_calls((yield from self._bracketed(BracketScanner("\"'"), [head])), self.names)
        if not calls:
            raise NotACall
        for name, arguments in calls:
            self._call(name, arguments)


class Llama4Parser(LlamaJsonParser, PythonicParser):
    """Llama 4 writes calls in both ways, between markers or not, and may put the markers around the text before them."""

    opening = Markers([*PythonicParser.opening.strings, *LlamaJsonParser.opening.strings])
    markers = opening.strings
    unmarked = "[{"

    def _calls(self, marker: str) -> Reading[None]:
        if marker == self.closing and self.num_calls:
            return
        if marker:
            yield from self._spaces()
            if (yield from self._next()) == "<":
                yield from self._one_of((self.closing,))
                yield from self._spaces()
        listed = (yield from self._next()) == "["
        yield from (PythonicParser if listed else LlamaJsonParser)._calls(self, marker)


class NamedCallParser(ToolParser):
    """The whole text is the arguments of one call, to the tool that the request names."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def _read(self) -> Reading[None]:
        while (yield from self._more()):
            if not self.num_calls:
                self._begin(self._name)
            self._events.append(CallArguments(0, self._take(len(self._text))))


TOOL_PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {
        "hermes": HermesParser,
        "llama3_json": LlamaJsonParser,
        "llama4_json": Llama4Parser,
        "llama4_pythonic": Llama4Parser,
        "mistral": MistralParser,
        "pythonic": PythonicParser,
        "granite": GraniteParser,
        "phi4_mini_json": Phi4Parser,
        "deepseek_v3": DeepSeekParser,
        "deepseek_v31": DeepSeekParser,
        "kimi_k2": KimiParser,
        "qwen3_coder": Qwen3CoderParser,
        "glm45": GlmParser,
        "openai": HarmonyParser,
    }
)

# what chat templates of one format hold and those of the formats below do not; all of a row's texts
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("", ("<tool_sep>",)),  # Hunyuan's later formats, which are not read
    ("openai", ("<|channel|>commentary",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("hermes", ("<tool_call>",)),
    ("llama4_json", ("<|python_start|>", '{"name": function name, "parameters"')),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('{"name": function name, "parameters"',)),
)


def detect_tool_parser(template: str) -> str | None:
    """The name of the parser for the calls that a chat template writes; None: no known format."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "") or None
