"""A jinja2 sandbox for chat templates whose work is bounded: time, size of the output, size of any value on the way.

A thread that renders cannot be killed, so a render ends itself: every loop turn and every call looks at the thread's
CPU time, and whatever can make much out of little (operators, filters, methods of texts and numbers) is looked at before it
does: see `guard`.
"""

from __future__ import annotations

import inspect
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
from jinja2.visitor import NodeTransformer

MAX_WIDTH = 100_000  # of padding and the like; also jinja2's limit of range()
MAX_INT_BITS = 4096
_LONG_NUMBER = re.compile(r"\d{6}")
_GUARDED_FILTERS = (
    "batch", "center", "format", "indent", "join", "pprint", "replace", "slice", "string", "sum", "truncate", "wordwrap",
)  # fmt: skip
_GUARDED_METHODS = ("center", "expandtabs", "join", "ljust", "replace", "rjust", "to_bytes", "translate", "zfill")


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


class _Bounding(NodeTransformer):
    """Puts a call of `tick` into every loop, and one of `concat_bounded` into the place of every `a ~ b`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("tick", [], node)).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("concat_bounded", node.nodes, node)

    def _call(self, method: str, args: list[nodes.Expr], place: nodes.Node) -> nodes.Node:
        return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None).set_lineno(place.lineno)


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
        for name in _GUARDED_FILTERS:
            self.filters[name] = self._guarded(name, self.filters[name])
        del self.filters["urlize"]
        del self.globals["lipsum"]
        self.filters["tojson"] = self._tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()

    def compile_template(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError."""
        return self.from_string(_Bounding().visit(self.parse(source)))

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

    # ------------------------------------------------------------------------------------------------- what is bounded

    def tick(self) -> None:
        deadline = getattr(self._local, "deadline", None)
        if deadline is not None and time.thread_time() > deadline:
            raise TemplateLimitError(f"the chat template took more than {self.max_seconds:g} s")

    def guard(self, name: str, value: Any, *given: Any) -> None:
        """Before `value` goes with what is `given` beside it through an operator, a filter or a method: is what that makes
        too large?"""
        self.tick()
        size = self._weigh(value)
        if name == "*":
            size *= max(0, given[0])
        elif name in ("%", "format"):
            spec = str(value)
            if _LONG_NUMBER.search(spec) or ("*" in spec and any(isinstance(g, int) and g > MAX_WIDTH for g in given)):
                raise TemplateLimitError("the chat template formats with too large a width")
            size += sum(map(self._weigh, given)) * max(1, spec.count("%") + spec.count("{"))
        elif name == "replace":
            text, old, new = (v if isinstance(v, str | bytes) else str(v) for v in (value, *given[:2]))
            if len(new) > len(old):
                size += (text.count(old) if old else len(text) + 1) * len(new)  # type: ignore[arg-type]
        elif name == "join":
            size += len(value) * len(str(given[0])) if given else 0
        elif any(isinstance(g, int) and g > MAX_WIDTH for g in given):
            raise TemplateLimitError("the chat template pads to too large a width")
        elif name in ("expandtabs", "indent"):
            places = value.count("\n" if name == "indent" else "\t") + 1
            size += places * max((g if isinstance(g, int) else len(g) for g in given), default=8)
        elif name in ("translate", "wordwrap"):
            size *= 1 + max((self._weigh(g) for g in given if isinstance(g, str | Mapping)), default=0)
        elif name == "sum":  # of lists: each is copied once for each that follows
            size *= len(value) if any(isinstance(g, list | tuple) for g in given) else 1
        self._check_size(size)

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
            if isinstance(item, str | bytes):
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

    # ------------------------------------------------------------------------------- where templates come to the bounds

    def concat_bounded(self, *items: Any) -> str:
        self._check_size(sum(map(self._weigh, items)))
        return "".join(map(str, items))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}.get(operator, 0)
            if bits > MAX_INT_BITS:
                raise TemplateLimitError("the chat template computes a number that is too large")
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_size(len(left) + len(right))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(count, int):
                    self.guard("*", sequence, count)
        elif operator == "%" and isinstance(left, str | bytes):
            self.guard("%", left, *(right if isinstance(right, tuple) else (right,)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str | bytes | int) and name in _GUARDED_METHODS:
            if name == "join" and args:
                args = (list(args[0]),)
                self.guard(name, args[0], owner)
            else:
                self.guard(name, owner, *args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        owner = value.__self__

        @wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            for _, _, spec, _ in string.Formatter().parse(owner):
                if spec and "{" in spec:
                    raise TemplateLimitError("the chat template formats with too large a width")
            self.guard("format", owner, *args, *kwargs.values())
            return wrapped(*args, **kwargs)

        return checked

    def _guarded(self, name: str, function: Callable) -> Callable:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja2 puts the environment or context first
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if name in ("join", "sum") and not hasattr(args[passed], "__len__"):  # what another filter gives, item by item
                args = (*args[:passed], list(args[passed]), *args[passed + 1 :])
            given = args[passed:]
            if kwargs:  # in the order of the parameters, and what is left out between them
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                given = (*bound.args[passed:], *bound.kwargs.values())
            self.guard(name, *given)
            return function(*args, **kwargs)

        return checked

    def _tojson(
        self, x: Any, ensure_ascii: bool = False, indent: int | str | None = None,
        separators: tuple[str, str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        """As Transformers has it: no HTML escapes, characters as they are."""
        self._weigh(x)
        if (indent if isinstance(indent, int) else len(indent or "")) > 16:
            raise TemplateLimitError("the chat template indents JSON too far")
        text = json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self._check_size(len(text))
        return text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format[:1000])
