"""The output of /v1/responses as it grows: items, and the events that tell of them."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.api.context import new_id
from headrace.api.sse import named_event
from headrace.conversation.events import CallArguments, CallBegin, Event, Reasoning, Text

encode = msgspec.json.encode
Fields = dict[str, Any]
News = tuple[str, Fields]  # type of a stream event, and what it says


class Events:
    """Numbers and encodes events."""

    def __init__(self) -> None:
        self.number = 0

    def bytes(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = encode({"type": kind, "sequence_number": self.number, **fields})
        self.number += 1
        return named_event(kind.encode(), data)


class Items:
    """Output items from the events of an answer: one is open at a time; an event of another kind ends it and opens the next."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open item's text
        self._logprobs: list[dict[str, Any]] = []
        self._call: int | None = None  # index of the open call among the calls
        self._open = False

    @property
    def _item(self) -> dict[str, Any]:
        return self.output[-1]

    def push(self, part: Event, logprobs: list[dict[str, Any]]) -> list[News]:
        """`logprobs` go to the message if this is a part of it."""
        events: list[News] = []
        if isinstance(part, CallBegin):
            events += self.close("completed")
            self._call = part.index
            item = {"type": "function_call", "id": new_id("fc_"), "call_id": part.id, "name": part.name, "arguments": "",
                    "status": "in_progress"}  # fmt: skip
            return events + self._start(item, None)
        if isinstance(part, CallArguments):
            self._pieces.append(part.text)
            return [("response.function_call_arguments.delta", {**self._place(), "delta": part.text})]
        kind = "message" if isinstance(part, Text) else "reasoning"
        if not self._open or self._item["type"] != kind:
            events += self.close("completed")
            events += self._start_message() if kind == "message" else self._start_reasoning()
        self._pieces.append(part.text)
        if isinstance(part, Reasoning):
            return [*events, ("response.reasoning_text.delta", {**self._place(0), "delta": part.text})]
        self._logprobs += logprobs
        fields = {**self._place(0), "delta": part.text, "logprobs": logprobs}
        return [*events, ("response.output_text.delta", fields)]

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        place = {"item_id": self._item["id"], "output_index": len(self.output) - 1}
        return place if content_index is None else {**place, "content_index": content_index}

    def _start(self, item: dict[str, Any], part: dict[str, Any] | None) -> list[News]:
        self._pieces, self._logprobs, self._open = [], [], True
        self.output.append(item)
        events: list[News] = [("response.output_item.added", {"output_index": len(self.output) - 1, "item": dict(item)})]
        if part is not None:
            events.append(("response.content_part.added", {**self._place(0), "part": part}))
        return events

    def _start_message(self) -> list[News]:
        item = {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": "in_progress", "content": []}
        return self._start(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def _start_reasoning(self) -> list[News]:
        return self._start(
            {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}, {"type": "reasoning_text", "text": ""}
        )

    def close(self, status: str, logprobs: list[dict[str, Any]] | None = None) -> list[News]:
        """End the open item, if there is one."""
        if not self._open:
            return []
        self._open = False
        item, text = self._item, "".join(self._pieces)
        events: list[News]
        part: dict[str, Any]
        if item["type"] == "function_call":
            item["arguments"], item["status"] = text, status
            fields = {**self._place(), "name": item["name"], "arguments": text}
            events = [("response.function_call_arguments.done", fields)]
        elif item["type"] == "reasoning":
            part = {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            events = [("response.reasoning_text.done", {**self._place(0), "text": text}),
                      ("response.content_part.done", {**self._place(0), "part": part})]  # fmt: skip
        else:
            self._logprobs += logprobs or []
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
            item["content"], item["status"] = [part], status
            fields = {**self._place(0), "text": text, "logprobs": self._logprobs}
            events = [("response.output_text.done", fields), ("response.content_part.done", {**self._place(0), "part": part})]
        return [*events, ("response.output_item.done", {"output_index": len(self.output) - 1, "item": item})]

    def finish(self, status: str, logprobs: list[dict[str, Any]]) -> list[News]:
        """End the output, which holds at least one item: an empty message, if the model said nothing."""
        events = [] if self.output else self._start_message()
        return events + self.close(status, logprobs)
