"""What messages are, and the forms in which a chat template takes them, each found by rendering a small conversation once.

Templates were written for the conversations of their model's training; clients send what OpenAI's API takes: null contents,
lists of parts, arguments as JSON text, ids of any length, results of tools without a name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from headrace.conversation.tool_syntax import parse_json
from headrace.errors import ParameterError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PROBE = "zq7probe"
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
MAX_DEPTH = 64
MAX_ROLE = 64  # characters
SHORT_ID = 9  # letters and digits: what Mistral's templates take
EMPTY: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})  # ways to have no content
Chat = list[dict[str, Any]]


def plain(value: Any, field: str, depth: int = 0) -> Any:
    """A copy made of JSON types only: nothing else may reach a template. Raises ParameterError."""
    if depth > MAX_DEPTH:
        raise ParameterError(field, "a deeply nested value", f"at most {MAX_DEPTH} levels")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if not all(type(k) is str for k in value):
            raise ParameterError(field, list(value), "text as keys")
        return {k: plain(v, f"{field}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, f"{field}[{i}]", depth + 1) for i, v in enumerate(value)]
    raise ParameterError(field, type(value).__name__, "JSON values")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A plain copy as templates expect it: absent instead of null, text parts only, reasoning under its known names.

    Raises ParameterError naming the place.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ParameterError("messages", messages, "a list of at least one message")
    return [_check_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _check_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ParameterError(field, message, "an object with role and content")
    checked = {k: v for k, v in plain(message, field).items() if v is not None}
    role = checked.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE:
        raise ParameterError(f"{field}.role", role, "a role, such as " + ", ".join(ROLES))
    content = checked.get("content")
    if not content and role == "assistant" and isinstance(checked.get("refusal"), str):
        content = checked["content"] = checked["refusal"]
    if isinstance(content, list):
        checked["content"] = [_check_part(p, f"{field}.content[{i}]") for i, p in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise ParameterError(f"{field}.content", content, "text or a list of text parts")
    elif content is None and role not in ("assistant", "tool", "function"):
        raise ParameterError(f"{field}.content", None, "text or a list of text parts")
    calls = checked.pop("tool_calls", None) or []
    if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
        raise ParameterError(f"{field}.tool_calls", calls, "a list of objects")
    if calls:  # to many templates an empty list is one of calls
        checked["tool_calls"] = [_check_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)]
    reasoning = next((checked[name] for name in REASONING_FIELDS if name in checked), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    return checked


def _check_call(call: dict[str, Any], field: str) -> dict[str, Any]:
    call = {k: v for k, v in call.items() if v is not None}
    function = call.get("function", call)
    if not isinstance(function, dict):
        raise ParameterError(f"{field}.function", function, "an object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ParameterError(f"{field}.function.name", function.get("name"), "the name of the function that was called")
    return call


def _check_part(part: Any, field: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise ParameterError(field, part, "an object with type and text")
    kind = part.get("type", "text")
    name = "refusal" if kind == "refusal" else "text"
    if kind not in TEXT_PARTS and kind != "refusal":
        raise ParameterError(f"{field}.type", kind, "text (this model takes no other kind of content)")
    if not isinstance(part.get(name), str):
        raise ParameterError(f"{field}.{name}", part.get(name), "text")
    return {"type": "text", "text": part[name]}


class MessageForms:
    """What one template understands. `probe` renders a conversation; None: the template refuses it."""

    def __init__(self, probe: Callable[[Chat], str | None]):
        self._probe = probe
        self._known: dict[str, Any] = {}  # answers, each computed when first needed

    def _once(self, question: str, answer: Callable[[], Any]) -> Any:
        if question not in self._known:
            self._known[question] = answer()
        return self._known[question]

    def adapt(self, chat: Chat) -> Chat:
        """The conversation, whose messages are changed in place, as the template takes it."""
        if any(len(message.get("tool_calls") or ()) > 1 for message in chat) and not self.takes_several_calls():
            chat = _with_single_calls(chat)
        names: dict[str, str] = {}  # id of a call -> function
        ids: dict[str, str] = {}  # id of a call -> the one that the template is given
        for message in chat:
            role, calls = message["role"], message.get("tool_calls") or []
            if not message.get("content") and role in ("assistant", "tool", "function"):
                message.update(self._empty(message, bool(calls)))
            if calls and message.get("content") and "thinking" in message and not self.takes_text_beside_thought():
                content = message["content"]
                text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
                message["thinking"] = message["reasoning_content"] = f"{message['thinking']}\n\n{text}"
                message.update(self._empty(message, True))
            self._adapt_content(message)
            for call in calls:
                function = call.get("function", call)
                function["arguments"] = self._arguments(function.get("arguments"))
                names[str(call.get("id"))] = function["name"]
                if self.names_calls_by_id():
                    ids[str(call.get("id"))] = call["id"] = _telling_id(call.get("id"), function["name"], ids.values())
                elif "id" in call:
                    call["id"] = self._id(call["id"])
            if role == "tool" and (answered := message.get("tool_call_id")) is not None:
                if "name" not in message and answered in names and self.prints_names():
                    message["name"] = names[answered]
                message["tool_call_id"] = ids.get(str(answered)) or self._id(answered)
        return chat

    def _adapt_content(self, message: dict[str, Any]) -> None:
        content, role = message.get("content"), message["role"]
        if isinstance(content, list) and (not content or not self.takes_parts(role)):
            content = message["content"] = "\n".join(part["text"] for part in content)
        if isinstance(content, str) and not self.takes_strings(role):
            message["content"] = [{"type": "text", "text": content}]

    def _empty(self, message: dict[str, Any], calls: bool) -> dict[str, Any]:
        """No content, in the way in which the template fails least and shows most."""
        message.pop("content", None)
        if message["role"] != "assistant":
            return {"content": ""}

        def best() -> dict[str, Any]:
            arguments: Any = {PROBE: PROBE} if self.takes_argument_objects() else json.dumps({PROBE: PROBE})
            texts = [self._probe(_probe_call(arguments, form) if calls else _probe_empty(form)) for form in EMPTY]
            if not any(texts):
                return EMPTY[2]
            told = [(t is None, t is not None and PROBE not in t, t.count("None") if t is not None else 0) for t in texts]
            return EMPTY[told.index(min(told))]

        return self._once(f"empty with calls: {calls}", best)

    def _arguments(self, arguments: Any) -> Any:
        if arguments is None:
            arguments = {}
        if not self.takes_argument_objects():
            return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments or "{}"
        if not isinstance(arguments, str):
            return arguments
        try:
            parse_json(arguments or "{}")
            value = json.loads(arguments or "{}", strict=False)
            json.dumps(value, allow_nan=False)  # 1e999
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments

    def _id(self, call_id: Any) -> Any:
        if not isinstance(call_id, str) or (len(call_id) == SHORT_ID and call_id.isalnum()) or self.takes_any_id():
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:SHORT_ID]

    # ------------------------------------------------------------------------------------------------- the questions

    def takes_parts(self, role: str) -> bool:
        """Whether the text of a list of parts comes out, and nothing else of the list."""
        return self._shows(role, [{"type": "text", "text": PROBE}], False)

    def takes_strings(self, role: str) -> bool:
        return self._shows(role, PROBE, True) or not self.takes_parts(role)

    def _shows(self, role: str, content: Any, default: bool) -> bool:
        def answer() -> bool:
            text = self._probe(_probe_content(role, content))
            return default if text is None else PROBE in text and "'text'" not in text and '"text"' not in text

        return self._once(f"{type(content).__name__} of {role}", answer) if role in ROLES else default

    def takes_argument_objects(self) -> bool:
        """Whether a call's arguments are to be an object; JSON text where an object fails or prints as Python does."""

        def answer() -> bool:
            for form in EMPTY[1:]:
                text = self._probe(_probe_call({PROBE: PROBE}, form))
                if text is not None and PROBE in text and f"'{PROBE}'" not in text:
                    return True
            texts = [self._probe(_probe_call(json.dumps({PROBE: PROBE}), form)) for form in EMPTY[1:]]
            return not any(text is not None and PROBE in text for text in texts)

        return self._once("arguments", answer)

    def takes_any_id(self) -> bool:
        """False where an id of nine letters and digits passes, and another one does not."""

        def answer() -> bool:
            texts = [self._probe(_probe_call({}, EMPTY[2], call_id=i)) for i in ("call_" + PROBE, "call00001")]
            return texts[0] is not None or texts[1] is None

        return self._once("ids", answer)

    def takes_text_beside_thought(self) -> bool:
        """False where a call may follow a thought or a text, and not both: gpt-oss's template."""

        def answer() -> bool:
            chat = self._probed_calls("f")
            beside = {"content": PROBE, "thinking": PROBE, "reasoning_content": PROBE}
            refused = self._probe([chat[0], {**chat[1], **beside}, *chat[2:]]) is None
            return not refused or self._probe(chat) is None

        return self._once("text beside thought", answer)

    def takes_several_calls(self) -> bool:
        """False where the second call of a message is refused or dropped."""

        def answer() -> bool:
            texts = [self._probe(self._probed_calls(*names)) for names in (("zq7second",), ("zq7firsts", "zq7second"))]
            return "zq7second" not in (texts[0] or "") or "zq7second" in (texts[1] or "")

        return self._once("several calls", answer)

    def _probed_calls(self, *names: str) -> Chat:
        """A question, and a message with calls whose ids are their names; with their results."""
        arguments: Any = {} if self.takes_argument_objects() else "{}"
        calls = [{"id": n, "type": "function", "function": {"name": n, "arguments": arguments}} for n in names]
        results = [{"role": "tool", "name": "f", "tool_call_id": n, "content": "1"} for n in names]
        return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]

    def names_calls_by_id(self) -> bool:
        """Whether a call is shown with its id and without its name, which the id is to tell then: Kimi's templates."""

        def answer() -> bool:
            arguments: Any = {} if self.takes_argument_objects() else "{}"
            chat = _probe_call(arguments, EMPTY[2], call_id=f"{PROBE}:0")[:2]
            chat[1]["tool_calls"][0]["function"]["name"] = "zq7name"
            text = self._probe(chat)
            return text is not None and f"{PROBE}:0" in text and "zq7name" not in text

        return self._once("names by ids", answer)

    def keeps_later_systems(self) -> bool:
        """False where a system message behind others is refused, dropped, or moved to the front."""

        def answer() -> bool:
            roles = ("user", "assistant", "user", "system", "assistant", "user")
            text = self._probe([{"role": role, "content": f"{PROBE}{i}."} for i, role in enumerate(roles)])
            places = [text.find(f"{PROBE}{i}.") for i in range(len(roles))] if text is not None else [-1]
            return places[0] >= 0 and places == sorted(places)

        return self._once("later systems", answer)

    def prints_names(self) -> bool:
        """Whether the result of a tool is shown with the tool's name."""
        return self._once("names", lambda: PROBE in (self._probe(_probe_call({}, EMPTY[2], name=PROBE)) or ""))


def _with_single_calls(chat: Chat) -> Chat:
    """One call to a message, each before its result."""
    parted: Chat = []
    waiting: Chat = []  # messages of calls that follow the one whose results are being read
    for message in chat:
        calls = message.get("tool_calls") or []
        if message["role"] != "tool":
            parted, waiting = parted + waiting, []
        elif any(c.get("id") == message.get("tool_call_id") for m in waiting for c in m["tool_calls"]):
            while waiting[0]["tool_calls"][0].get("id") != message.get("tool_call_id"):
                parted.append(waiting.pop(0))
            parted.append(waiting.pop(0))
        parted.append({**message, "tool_calls": calls[:1]} if calls else message)
        waiting += [{"role": "assistant", "tool_calls": [call]} for call in calls[1:]]
    return parted + waiting


def _telling_id(call_id: Any, name: str, given: Collection[str]) -> str:
    """`functions.NAME:N`, N counting through the conversation: a model that sees other ids goes on with other ids."""
    if isinstance(call_id, str) and re.fullmatch(rf"functions\.{re.escape(name)}:\d{{1,9}}", call_id, re.ASCII):
        return call_id
    return f"functions.{name}:{max((int(i.rpartition(':')[2]) + 1 for i in given), default=0)}"


def _probe_content(role: str, content: Any) -> Chat:
    message = {"role": role, "content": content}
    user = {"role": "user", "content": "hi" if isinstance(content, str) else [{"type": "text", "text": "hi"}]}
    if role in ("system", "developer"):
        return [message, user]
    if role == "assistant":
        return [user, message]
    if role in ("tool", "function"):
        call = _probe_call({}, EMPTY[2])[1]
        return [user, call, {**message, "name": "f", "tool_call_id": call["tool_calls"][0]["id"]}]
    return [message]


def _probe_empty(form: dict[str, Any]) -> Chat:
    return [{"role": "user", "content": PROBE}, {"role": "assistant", **form}, {"role": "user", "content": "hi"}]


def _probe_call(arguments: Any, form: dict[str, Any], *, call_id: str = "call00001", name: str = "f") -> Chat:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", **form, "tool_calls": [call]},
        {"role": "tool", "name": name, "tool_call_id": call_id, "content": "1"},
    ]
