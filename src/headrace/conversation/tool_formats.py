"""Tool calls in the text of an answer: one parser for each way in which models write them, by name or by chat template.

Which text becomes a call, which stays text and which is dropped: see tool_parser.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from types import MappingProxyType

from headrace.conversation.events import CallArguments, CallBegin, Event
from headrace.conversation.tool_parser import JsonObjectParser, ToolParser, random_id, short_id
from headrace.conversation.tool_syntax import MAX_NAME, BracketScanner, as_written, parse_json, read_python_calls
from headrace.text.markers import Markers

_NAME = frozenset(string.ascii_letters + string.digits + "_-.:/")


class HermesParser(JsonObjectParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3.

    The end tag may be missing. One line break before a call belongs to its markup.
    """

    opening = Markers(["<tool_call>", "\n<tool_call>"])
    closing = "</tool_call>"
    markers = ("<tool_call>", closing)

    def _opened(self) -> None:
        self._handler = self._expect_object

    def _after_call(self) -> None:
        self._tag = ""
        self._handler = self._expect_closing

    def _expect_closing(self, text: str, events: list[Event]) -> str:
        if not self._tag:
            stripped = text.lstrip()
            self._give(text[: len(text) - len(stripped)], events)  # kept for the case that other text follows
            text = stripped
        missing = len(self.closing) - len(self._tag)
        tag, rest = self._tag + text[:missing], text[missing:]
        if tag == self.closing:
            self._space = []
        elif self.closing.startswith(tag):
            self._tag = tag
            return ""
        else:
            rest = tag + rest
        self._handler = self._plain
        return rest

    def finish(self) -> list[Event]:
        if self._handler == self._expect_closing:
            self._handler = self._plain  # the beginning of an end tag is no text
        return super().finish()


class _AtStart(JsonObjectParser):
    """For formats whose calls need no marker: then only the beginning of the output may be one."""

    first = ""  # the character that a call begins with

    def __init__(self, new_id: Callable[[], str] = random_id):
        super().__init__(new_id)
        self._marked = False
        self._handler = self._at_start

    def _at_start(self, text: str, events: list[Event]) -> str:
        stripped = text.lstrip()
        self._give(text[: len(text) - len(stripped)], events)
        if stripped.startswith(self.first):
            self._begin_unmarked()
        elif stripped:
            self._handler = self._plain
        return stripped

    def _begin_unmarked(self) -> None:
        raise NotImplementedError

    def _opened(self) -> None:
        self._marked = True

    def _reject(self, events: list[Event]) -> None:
        super()._reject(events)
        self._marked = False


class LlamaJsonParser(_AtStart):
    """`{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`: Llama 3.1 to 3.3.

    Several calls are separated by `;`. Without the tag only an output that begins with such an object is a call, and
    its first key tells at once whether it may be one.
    """

    opening = Markers(["<|python_tag|>"])
    markers = opening.strings
    first = "{"
    argument_keys = ("parameters", "arguments")
    first_keys = ('"name"', '"type"', '"function"', '"parameters"', '"arguments"', '"id"')

    def _begin_unmarked(self) -> None:
        self._head = ""
        self._start_object()
        self._handler = self._in_head

    def _in_head(self, text: str, events: list[Event]) -> str:
        """Within the first key of an object that may be any."""
        for i, c in enumerate(text):
            if c.isspace() or (c == "{" and not self._head):
                continue
            self._head += c
            if self._head in self.first_keys:
                self._handler = self._in_object
                return self._resume_object(text, i + 1)
            if not any(key.startswith(self._head) for key in self.first_keys):
                text = self._take(text, i)
                self._reject(events)
                return text
        return self._resume_object(text, len(text))

    def _resume_object(self, text: str, end: int) -> str:
        self._brackets.push(text[:end])
        self._object.append(text[:end])
        return self._take(text, end)

    def _opened(self) -> None:
        super()._opened()
        self._handler = self._expect_object

    def _read_object(self, events: list[Event]) -> None:
        if not self._marked and not _has_arguments("".join(self._object), self.argument_keys):
            self._reject(events)
        else:
            super()._read_object(events)

    def _after_call(self) -> None:
        self._handler = self._between

    def _between(self, text: str, events: list[Event]) -> str:
        """After a call: `;`, then another object."""
        for i, c in enumerate(text):
            if c == "{":
                rest = self._take(text, i)
                self._start_object()
                return rest
            if not c.isspace() and c not in ";,":
                rest = self._take(text, i)
                self._reject(events)
                return rest
        return self._take(text, len(text))

    def _end_within(self, events: list[Event]) -> None:
        if self._handler == self._between and not "".join(self._taken).strip(" \n\t;,"):
            self._taken = []
        elif self._marked or self.num_calls:
            super()._end_within(events)
        else:
            self._reject(events)


def _has_arguments(text: str, keys: tuple[str, ...]) -> bool:
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and (any(k in value for k in keys) or isinstance(value.get("function"), dict))


class MistralParser(JsonObjectParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` (up to v7) and, since v11,
    `[TOOL_CALLS]name[ARGS]{...}`, in which an id may stand: `name[CALL_ID]id[ARGS]{...}`.
    """

    opening = Markers(["[TOOL_CALLS]"])
    tags = ("[ARGS]", "[CALL_ID]")
    markers = (*opening.strings, *tags)

    def __init__(self, new_id: Callable[[], str] = short_id):
        super().__init__(new_id)

    def _opened(self) -> None:
        self._name, self._id, self._in_list = "", "", False
        self._handler = self._head

    def _head(self, text: str, events: list[Event]) -> str:
        stripped = text.lstrip()
        rest = self._take(text, len(text) - len(stripped))
        if rest.startswith("["):
            rest = self._take(rest, 1)
            self._in_list = True
            self._handler = self._expect_object
        elif rest.startswith("{"):
            self._start_object()
        elif rest:
            self._handler = self._in_name
        return rest

    def _in_name(self, text: str, events: list[Event]) -> str:
        for i, c in enumerate(text):
            if c in _NAME and len(self._name) < MAX_NAME:
                self._name += c
                continue
            rest = self._take(text, i)
            if c == "[" and self._name:
                self._tag, self._handler = "", self._in_tag
            elif c == "{" and self._name:
                self._start_object()
            else:
                self._reject(events)
            return rest
        return self._take(text, len(text))

    def _in_tag(self, text: str, events: list[Event]) -> str:
        for i, c in enumerate(text):
            self._tag += c
            if not any(tag.startswith(self._tag) for tag in self.tags):
                rest = self._take(text, i)
                self._reject(events)
                return rest
            if self._tag in self.tags:
                self._handler = self._expect_object if self._tag == "[ARGS]" else self._in_id
                return self._take(text, i + 1)
        return self._take(text, len(text))

    def _in_id(self, text: str, events: list[Event]) -> str:
        for i, c in enumerate(text):
            if c in _NAME and len(self._id) < MAX_NAME:
                self._id += c
                continue
            rest = self._take(text, i)
            if c == "[" and self._id:
                self._tag, self._handler = "", self._in_tag
            else:
                self._reject(events)
            return rest
        return self._take(text, len(text))

    def _start_object(self) -> None:
        super()._start_object()
        if self._name and self.constrained:
            self._handler = self._begin_named

    def _begin_named(self, text: str, events: list[Event]) -> str:
        self._begin_call(self._name, events, self._id or None)
        self._start_arguments(enclosed=False)
        return text

    def _read_object(self, events: list[Event]) -> None:
        if not self._name:
            super()._read_object(events)
            return
        written = "".join(self._object)
        try:
            parse_json(written)
        except (ValueError, RecursionError):
            self._reject(events)
            return
        self._call(self._name, as_written(written), events, self._id or None)

    def _after_call(self) -> None:
        if self._in_list:
            self._handler = self._in_list_gap

    def _in_list_gap(self, text: str, events: list[Event]) -> str:
        """In a list, after an object: a comma and the next one, or the end."""
        stripped = text.lstrip()
        if not stripped:
            return ""
        if stripped[0] == ",":
            self._taken = [","]
            self._handler = self._expect_object
        else:
            self._handler = self._plain
            if stripped[0] != "]":
                return stripped
        return stripped[1:]

    def _end_within(self, events: list[Event]) -> None:
        if self._handler in (self._head, self._in_name, self._in_tag, self._in_id):
            self._taken = []
        else:
            super()._end_within(events)


class JsonListParser(MistralParser):
    """`[{"name": ..., "parameters": {...}}, ...]` and nothing else: what a required call is constrained to."""

    opening = Markers([])
    markers = ()
    constrained = True

    def __init__(self, new_id: Callable[[], str] = random_id):
        super().__init__(new_id)
        self._name, self._id, self._in_list = "", "", False
        self._handler = self._begin

    def _begin(self, text: str, events: list[Event]) -> str:
        stripped = text.lstrip()
        self._give(text[: len(text) - len(stripped)], events)
        if stripped:
            self._handler = self._head if stripped[0] in "[{" else self._plain
        return stripped


class PythonicParser(_AtStart):
    """`[f(a=1), g()]`, a Python list of calls with keyword arguments: Llama 4, and others told to.

    `<|python_start|>` and `<|python_end|>` may stand around it. Without them only an output that begins with such a list
    is one; its first characters tell at once whether it may be. The list is read as a whole.
    """

    closing = "<|python_end|>"
    opening = Markers(["<|python_start|>", closing])
    markers = opening.strings
    first = "["
    names = MappingProxyType({"true": True, "false": False, "null": None})

    def _begin_unmarked(self) -> None:
        self._list: list[str] = []
        self._brackets, self._function = BracketScanner("\"'"), ""
        self._handler = self._in_head

    def _opened(self) -> None:
        super()._opened()
        if self._taken == [self.closing] and self.num_calls:
            self._taken, self._marked = [], False
        else:
            self._handler = self._expect_list

    def _expect_list(self, text: str, events: list[Event]) -> str:
        stripped = text.lstrip()
        rest = self._take(text, len(text) - len(stripped))
        if rest.startswith("["):
            self._begin_unmarked()
        elif rest:
            self._reject(events)
        return rest

    def _in_head(self, text: str, events: list[Event]) -> str:
        """`[`, white space, a name, `(`."""
        start = "" if self._list else "["
        for i, c in enumerate(text):
            if (c == start and i == 0) or (c.isspace() and not self._function):
                continue
            if c == "(" and self._function:
                self._handler = self._in_list
                return self._grow(text, i)
            self._function += c
            if not self._function.replace(".", "_").isidentifier() or len(self._function) > MAX_NAME:
                rest = self._take(text, i)
                self._reject(events)
                return rest
        return self._grow(text, len(text))

    def _grow(self, text: str, end: int) -> str:
        self._brackets.push(text[:end])
        self._list.append(text[:end])
        return self._take(text, end)

    def _in_list(self, text: str, events: list[Event]) -> str:
        end = self._brackets.push(text)
        taken = len(text) if end < 0 else end
        self._list.append(text[:taken])
        text = self._take(text, taken)
        if self._brackets.too_deep:
            self._reject(events)
        elif end >= 0:
            self._read_list(events)
        return text

    def _read_list(self, events: list[Event]) -> None:
        calls = read_python_calls("".join(self._list), self.names)
        if not calls:
            self._reject(events)
            return
        for name, arguments in calls:
            self._call(name, arguments, events)

    def _end_within(self, events: list[Event]) -> None:
        if self._marked:
            self._taken = []
        else:
            self._reject(events)


class NamedCallParser(ToolParser):
    """The whole text is the arguments of one call, to the tool that the request names."""

    def __init__(self, name: str, new_id: Callable[[], str] = random_id):
        super().__init__(new_id)
        self._name = name

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        if text and not self.num_calls:
            events.append(CallBegin(0, self.new_id(), self._name))
            self.num_calls = 1
        if text:
            events.append(CallArguments(0, text))
        return events

    def finish(self) -> list[Event]:
        return []


TOOL_PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {"hermes": HermesParser, "llama3_json": LlamaJsonParser, "mistral": MistralParser, "pythonic": PythonicParser}
)


def detect_tool_parser(template: str) -> str | None:
    """The name of the parser for the calls that a chat template writes; None: no known format."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if "<|python_start|>" in template or "[func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or '{"name": function name, "parameters"' in template:
        return "llama3_json"
    return None
