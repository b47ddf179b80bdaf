"""Options that several commands share: which model, where and how it runs, and how tokens are drawn."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.cli.parser import text
from headrace.cli.sources import UNSET, size
from headrace.config import EngineConfig
from headrace.engine.interrupts import uninterrupted
from headrace.errors import ParameterError
from headrace.files import read_text
from headrace.options import Option, option, options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    log_level: Literal["debug", "info", "warning", "error"] = option("warning", "least grave messages that are logged")


class FirstOfSeveral(argparse.Action):
    """The flag's first value is the option's; more of them are the first values of the option `const`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest) is UNSET:
            setattr(namespace, self.dest, values)
        else:
            setattr(namespace, self.const, [*(getattr(namespace, self.const) or ()), values])


def add_options(parser: argparse.ArgumentParser, cls: type, *only: str, again: Mapping[str, str] | None = None) -> None:
    """A flag for every field of `cls` that has help; `only`: for these, or for those of these groups. `again`: options that
    may be given more than once, and the option of several values that takes what comes then.

    The value's name is the field's.
    """
    for described in options_of(cls):
        title, _, description = described.group.partition(": ")
        if described.help and (not only or title in only or described.name in only):
            _add(_group(parser, title, description), described, (again or {}).get(described.name))


def _group(parser: argparse.ArgumentParser, title: str, description: str) -> Any:
    if not title:
        return parser
    found = next((group for group in parser._action_groups if group.title == title), None)
    return found or parser.add_argument_group(title, description or None)


def _add(group: Any, described: Option, again: str | None) -> None:
    about: dict[str, Any] = {"dest": described.name, "help": described.help}
    if described.kind is bool:
        about["action"] = argparse.BooleanOptionalAction
    elif described.choices:
        about |= {"choices": described.choices, "type": described.meant}
    else:
        sized = described.kind is int and described.optional and described.unit in ("TOKENS", "BYTES")
        about["type"] = text if described.kind is str else size if sized else described.kind
        about["metavar"] = described.unit or {int: "N", float: "X"}.get(described.kind, described.name.upper())
    if described.many:
        about["action"] = "append"
    if again is not None:
        about |= {"action": FirstOfSeveral, "const": again}
    if described.nothing is not None:
        about |= {"nargs": "?", "const": described.nothing}
    action = group.add_argument(f"--{described.key}", **about)
    action.default, action.described = described.default, described


def given(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, wherever, by the names of the fields of `cls`."""
    values = {o.name: getattr(args, o.name) for o in options_of(cls) if o.name in args.sources}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def named_model(args: argparse.Namespace) -> None:
    """MODEL is as good as --model, and comes before variables and files as that does."""
    if args.model_tag is not None:
        if args.sources.get("model") == "--model":
            raise ParameterError("MODEL", args.model_tag, "one model, as MODEL or as --model")
        args.model, args.sources["model"] = args.model_tag, "MODEL"


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by ServerConfig's names and as it takes them."""
    from headrace.api.config import ServerConfig

    options = given(ServerConfig, args)
    if "chat_template" in options:
        options["chat_template"] = read_text(args.sources["chat_template"], args.chat_template)
    return options | {name: None for name in ("tool_parser", "reasoning_parser") if options.get(name) == "none"}


def add_engine_arguments(parser: argparse.ArgumentParser, again: Mapping[str, str] | None = None) -> None:
    """`again`: as of add_options."""
    add_options(parser, EngineConfig, "model", "engine", "speculative decoding", again=again)
    add_options(parser, LogOptions)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by EngineConfig's names."""
    return given(EngineConfig, args)


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: str = "256, or what fits") -> None:
    group = parser.add_argument_group("sampling")
    model = "(default: the checkpoint's generation config)"
    group.add_argument(
        "--max-tokens", "--max-new-tokens", type=int, metavar="N", help=f"output tokens at most (default: {max_tokens})"
    )
    group.add_argument("--temperature", type=float, metavar="X", help=f"0 is greedy {model}")
    group.add_argument("--top-p", type=float, metavar="X", help=f"the likeliest tokens up to this probability; 1: all {model}")
    group.add_argument("--top-k", type=int, metavar="N", help=f"so many of the likeliest tokens; 0: all {model}")
    group.add_argument("--min-p", type=float, metavar="X", help=f"tokens of this share of the likeliest's probability {model}")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help=f"of tokens that were there; 1: none {model}")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed and prompt give the same text (default: random)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text (repeatable)")
    group.add_argument("--n", type=int, metavar="N", default=1, help="samples per prompt")


def generation_defaults(text: str) -> dict[str, Any]:
    """What stands in for the checkpoint's generation_config.json. Raises ParameterError for what is not one of its values."""
    with uninterrupted():
        from headrace.sampling.params import NEUTRAL, SamplingParams

    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not given.keys() <= NEUTRAL.keys():
        raise ParameterError("--override-generation-config", text, "a JSON object with some of " + ", ".join(NEUTRAL))
    try:
        SamplingParams(**given)
    except ParameterError as e:
        raise ParameterError(f"--override-generation-config: {e.field}", e.value, e.allowed) from None
    return given


def sampling_params(args: argparse.Namespace):
    with uninterrupted():  # as in `headrace.cli`
        from headrace.sampling.params import AtMost, SamplingParams

    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "n")
    max_tokens = AtMost(256) if args.max_tokens is None else args.max_tokens
    return SamplingParams(max_tokens=max_tokens, **{k: getattr(args, k) for k in names})
