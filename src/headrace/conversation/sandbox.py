"""A jinja2 sandbox for chat templates whose work is bounded: time, size of the output, size of any value on the way.

A thread that renders cannot be killed, so a render ends itself: every loop turn and every call looks at the thread's
CPU time, and the operations that can make much out of little (`*`, `+`, `~`, `%`, `**`, format, join, replace, padding)
check the size of their result before they build it.
"""

from __future__ import annotations

import json
import re
import string
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_WIDTH = 100_000  # of padding and the like; also jinja2's limit of range()
MAX_INT_BITS = 4096
_LONG_NUMBER = re.compile(r"\d{6}")
_WIDTH_FILTERS = ("center", "indent", "wordwrap", "batch", "slice", "truncate")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """The template takes too long or makes too much."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote, for training; here just its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(lineno)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Filters, globals and block trimming are those that Transformers gives to chat templates.

    `max_seconds` is CPU time of the rendering thread, `max_chars` the size of the output and of any string or
    collection on the way. One sandbox may render in several threads at once.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_seconds: float = 5.0, max_chars: int = 8_000_000):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols],
            finalize=self._finalize,
        )  # fmt: skip
        self.max_seconds, self.max_chars = max_seconds, max_chars
        self._local = threading.local()
        for name in _WIDTH_FILTERS:
            self.filters[name] = self._width_checked(self.filters[name])
        for name in ("join", "replace", "format", "string", "pprint"):
            self.filters[name] = self._size_checked(name, self.filters[name])
        del self.filters["urlize"]
        del self.globals["lipsum"]
        self.filters["tojson"] = self._tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()

    # ------------------------------------------------------------------------------------------------ compile, render

    def compile_template(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(self._own_call("tick", [], loop.lineno)).set_lineno(loop.lineno))
        return self.from_string(_replace_concat(tree, self))

    def _own_call(self, method: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
        target = nodes.EnvironmentAttribute(method).set_lineno(lineno)
        call = nodes.Call(target, args, [], None, None)
        call.set_lineno(lineno)
        return call

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Raises what the template raises, TemplateLimitError among it."""
        self._local.deadline = time.thread_time() + self.max_seconds
        try:
            pieces, size = [], 0
            for piece in template.generate(variables):
                size += len(piece)
                self._check_size(size)
                pieces.append(piece)
            return "".join(pieces)
        finally:
            self._local.deadline = None

    # --------------------------------------------------------------------------------------------------------- limits

    def tick(self) -> None:
        deadline = getattr(self._local, "deadline", None)
        if deadline is not None and time.thread_time() > deadline:
            raise TemplateLimitError(f"the chat template took more than {self.max_seconds:g} s")

    def _check_size(self, size: float) -> None:
        if not size <= self.max_chars:
            raise TemplateLimitError(f"the chat template made more than {self.max_chars} characters")

    def _weigh(self, value: Any) -> int:
        """About how many characters a value prints as; stops at the limit."""
        size, stack, turns = 0, [value], 0
        while stack:
            turns += 1
            if turns % 4096 == 0:
                self.tick()
            item = stack.pop()
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, Mapping):
                size += 4 * len(item)
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                size += 2 * len(item)
                stack.extend(item)
            else:
                size += 4
            self._check_size(size)
        return size

    def _finalize(self, value: Any) -> Any:
        if not isinstance(value, str):
            self._weigh(value)
        return value

    def concat_bounded(self, *items: Any) -> str:
        self._check_size(sum(map(self._weigh, items)))
        return "".join(map(str, items))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_size(len(left) + len(right))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(count, int):
                    self._check_size(len(sequence) * max(0, count))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right if isinstance(right, tuple) else (right,))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * right
            if bits > MAX_INT_BITS:
                raise TemplateLimitError("the chat template computes a number that is too large")
        return super().call_binop(context, operator, left, right)

    def _check_format(self, spec: str, args: tuple[Any, ...]) -> None:
        if _LONG_NUMBER.search(spec) or ("*" in spec and any(isinstance(a, int) and a > MAX_WIDTH for a in args)):
            raise TemplateLimitError("the chat template formats with too large a width")
        self._check_size(len(spec) + sum(map(self._weigh, args)) * max(1, spec.count("%") + spec.count("{")))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            self._check_str_method(owner, name, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        owner = getattr(value, "__self__", None)
        if wrapped is None or not isinstance(owner, str):
            return wrapped

        @wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            for _, _, spec, _ in string.Formatter().parse(owner):
                if spec and ("{" in spec or _LONG_NUMBER.search(spec)):
                    raise TemplateLimitError("the chat template formats with too large a width")
            self._check_format("{" * owner.count("{"), (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def _check_str_method(self, owner: str, name: str, args: tuple, kwargs: dict) -> None:
        if name == "replace" and len(args) >= 2:
            self._check_growth(owner, args[0], args[1])
        elif name == "join" and args and isinstance(args[0], list | tuple | dict):
            self._check_size(self._weigh(args[0]) + len(owner) * len(args[0]))
        elif name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
            _check_widths((*args, *kwargs.values()))

    def _check_growth(self, text: Any, old: Any, new: Any) -> None:
        text, old, new = str(text), str(old), str(new)
        if len(new) > len(old):
            self._check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))

    def _width_checked(self, function: Callable) -> Callable:
        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            _check_widths((*args, *kwargs.values()))
            return function(*args, **kwargs)

        return checked

    def _size_checked(self, name: str, function: Callable) -> Callable:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja2 puts the environment or context first

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = args[passed:]
            if name == "replace" and len(given) >= 3:
                self._check_growth(*given[:3])
            elif name == "format" and given:
                self._check_format(str(given[0]), (*given[1:], *kwargs.values()))
            elif name == "join":
                self._check_join(given, kwargs)
            else:
                self._weigh(given[0] if given else "")
            return function(*args, **kwargs)

        return checked

    def _check_join(self, given: tuple, kwargs: dict) -> None:
        separator = str(given[1] if len(given) > 1 else kwargs.get("d", ""))
        if given and hasattr(given[0], "__len__"):
            self._check_size(self._weigh(given[0]) + len(separator) * len(given[0]))

    def _tojson(
        self, x: Any, ensure_ascii: bool = False, indent: int | str | None = None,
        separators: tuple[str, str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        """As Transformers has it: no HTML escapes, characters as they are."""
        weight = self._weigh(x)
        if (indent if isinstance(indent, int) else len(indent or "")) > 16:
            raise TemplateLimitError("the chat template indents JSON too far")
        text = json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self._check_size(max(weight, len(text)))
        return text


def _check_widths(values: tuple) -> None:
    if any(isinstance(v, int) and v > MAX_WIDTH for v in values):
        raise TemplateLimitError("the chat template pads to too large a width")


def _replace_concat(node: nodes.Node, env: BoundedSandbox) -> Any:
    """The tree with every `a ~ b` as a call that checks the size first."""
    for child in list(node.iter_child_nodes()):
        _replace_concat(child, env)
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, field, _concat_call(value, env))
        elif isinstance(value, list):
            value[:] = [_concat_call(v, env) if isinstance(v, nodes.Concat) else v for v in value]
    return node


def _concat_call(concat: nodes.Concat, env: BoundedSandbox) -> nodes.Call:
    call = env._own_call("concat_bounded", list(concat.nodes), concat.lineno)
    call.set_environment(env)
    return call


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format[:1000])
