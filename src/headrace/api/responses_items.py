"""Output items of /v1/responses and the events that tell of them, from the events of an answer."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.api.context import new_id
from headrace.api.custom_tools import custom_input
from headrace.api.responses_messages import sealed
from headrace.api.responses_tools import ResponseTools
from headrace.api.sse import named_event
from headrace.conversation.events import CallArguments, CallBegin, Event, Text

encode = msgspec.json.encode
News = tuple[str, dict[str, Any]]  # type of a stream event, and what it says
# type of an output item -> prefix of its id, its fields when it begins, its part of content
ITEMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "message": (
        "msg_", {"role": "assistant", "status": "in_progress", "content": []},
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
    "reasoning": ("rs_", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""}),
    "function_call": ("fc_", {"arguments": "", "status": "in_progress"}, {}),
    "custom_tool_call": ("ctc_", {"input": "", "status": "in_progress"}, {}),
}  # fmt: skip


class Events:
    """Numbers and encodes events."""

    def __init__(self) -> None:
        self.number = 0

    def bytes(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = encode({"type": kind, "sequence_number": self.number, **fields})
        self.number += 1
        return named_event(kind.encode(), data)


class Items:
    """One item is open at a time; an event of another kind ends it and opens the next.

    `summarized`: reasoning is given as its own summary, too; `seal`: and in a form that clients keep for us.
    """

    def __init__(self, tools: ResponseTools, *, summarized: bool = False, seal: bool = False) -> None:
        self.output: list[dict[str, Any]] = []
        self.tools, self.summarized, self.seal = tools, summarized, seal
        self._pieces: list[str] = []  # of the open item's text
        self._logprobs: list[dict[str, Any]] = []
        self._open = ""  # its type

    def push(self, part: Event, logprobs: list[dict[str, Any]]) -> list[News]:
        """`logprobs` go to the message if this is a part of it."""
        if isinstance(part, CallBegin):
            return self.close("completed") + self._start_call(part)
        events: list[News] = []
        if isinstance(part, CallArguments):
            self._pieces.append(part.text)
            if self._open == "custom_tool_call":
                return []  # its input is a text within these
            return [("response.function_call_arguments.delta", {**self._place(), "delta": part.text})]
        kind = "message" if isinstance(part, Text) else "reasoning"
        if self._open != kind:
            events = self.close("completed") + self._start(kind)
        fields = {**self._place(content_index=0), "delta": part.text}
        self._pieces.append(part.text)
        if isinstance(part, Text):
            self._logprobs += logprobs
            fields["logprobs"] = logprobs
        events.append((f"response.{ITEMS[kind][2]['type']}.delta", fields))
        if kind == "reasoning" and self.summarized:
            events.append(("response.reasoning_summary_text.delta", {**self._place(summary_index=0), "delta": part.text}))
        return events

    def _place(self, **index: int) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **index}

    def _start_call(self, call: CallBegin) -> list[News]:
        origin = self.tools.origin(call.name)
        kind = "custom_tool_call" if origin.custom else "function_call"
        space = {} if origin.namespace is None else {"namespace": origin.namespace}
        return self._start(kind, call_id=call.id, name=origin.name, **space)

    def _start(self, kind: str, **given: str) -> list[News]:
        self._pieces, self._logprobs, self._open = [], [], kind
        prefix, begun, part = ITEMS[kind]
        item = {"type": kind, "id": new_id(prefix), **given, **begun}
        self.output.append(item)
        events: list[News] = [("response.output_item.added", {"output_index": len(self.output) - 1, "item": dict(item)})]
        if part:
            events.append(("response.content_part.added", {**self._place(content_index=0), "part": part}))
        if kind == "reasoning" and self.summarized:
            summary = {"type": "summary_text", "text": ""}
            events.append(("response.reasoning_summary_part.added", {**self._place(summary_index=0), "part": summary}))
        return events

    def close(self, status: str, logprobs: list[dict[str, Any]] | None = None) -> list[News]:
        """End the open item, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        item, text = self.output[-1], "".join(self._pieces)
        if "status" in item:
            item["status"] = status
        events: list[News]
        if kind == "function_call":
            item["arguments"] = text
            fields = {**self._place(), "name": item["name"], "arguments": text}
            events = [("response.function_call_arguments.done", fields)]
        elif kind == "custom_tool_call":
            events = self._close_custom(item, custom_input(text))
        else:
            said: dict[str, Any] = {"text": text}
            if kind == "message":
                said["logprobs"] = self._logprobs + (logprobs or [])
            part = {**ITEMS[kind][2], **said}
            item["content"] = [part]
            events = [
                (f"response.{part['type']}.done", {**self._place(content_index=0), **said}),
                ("response.content_part.done", {**self._place(content_index=0), "part": part}),
            ]
            if kind == "reasoning":
                events += self._close_reasoning(item, text)
        return [*events, ("response.output_item.done", {"output_index": len(self.output) - 1, "item": item})]

    def _close_custom(self, item: dict[str, Any], text: str) -> list[News]:
        item["input"] = text
        delta: list[News] = [("response.custom_tool_call_input.delta", {**self._place(), "delta": text})] if text else []
        return [*delta, ("response.custom_tool_call_input.done", {**self._place(), "input": text})]

    def _close_reasoning(self, item: dict[str, Any], text: str) -> list[News]:
        if self.seal:
            item["encrypted_content"] = sealed(text)
        if not self.summarized:
            return []
        part = {"type": "summary_text", "text": text}
        item["summary"] = [part]
        return [
            ("response.reasoning_summary_text.done", {**self._place(summary_index=0), "text": text}),
            ("response.reasoning_summary_part.done", {**self._place(summary_index=0), "part": part}),
        ]

    def finish(self, status: str, logprobs: list[dict[str, Any]]) -> list[News]:
        """End the output, which holds at least one item: an empty message, if the model said nothing."""
        events = [] if self.output else self._start("message")
        return events + self.close(status, logprobs)
