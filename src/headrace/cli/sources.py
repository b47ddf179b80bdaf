"""Where an option's value comes from: command line, else HEADRACE_* variable, else the file of --config, else its default.

Values of all sources are read alike. Each value that was given has a source in `args.sources`, by which an error names it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

from headrace.config import option_variables
from headrace.errors import HeadraceError, ParameterError
from headrace.files import read_text
from headrace.foreign_options import instead_of, meaning, plain
from headrace.foreign_values import instead_of_value
from headrace.options import Option, nearest

UNSET: Any = object()
MOST_TEXT = 2**20  # characters of a file of options
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def size(text: str) -> int | None:
    """Of tokens or bytes. As with vLLM 4k is 4,000 and 4K 4,096, up to t and T; auto and -1 are what is there without."""
    if text.strip().lower() in ("auto", "-1"):
        return None
    if (found := _SIZE.fullmatch(text.strip())) is None:
        return int(text)
    power = "kmgt".index(found[2].lower()) + 1
    return int(float(found[1]) * (1024 if found[2].isupper() else 1000) ** power)


def add_config_file(parser: argparse.ArgumentParser, others: Callable[[], set[str]] = set) -> None:
    """`others`: names that the file may have beside this command's options."""
    help = "a YAML file of options, `max-model-len: 4096`; flags and HEADRACE_* variables come before it"
    action: Any = parser.add_argument("--config", dest="config_file", metavar="FILE", help=help)
    action.described = Option(name="config_file", kind=str, default=None, help=help, flag="config")
    action.others = others


def unsettled(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """For argparse to fill in: what the command line does not name stays UNSET (lists: None)."""
    actions = [a for a in parser._actions if a.default is not argparse.SUPPRESS]
    return argparse.Namespace(**{a.dest: None if isinstance(a, argparse._AppendAction) else UNSET for a in actions})


def settle(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, str]:
    """Fill in what the command line has left open. Returns the options of vLLM's that are left out, each with why.

    Raises ParameterError that names the source of a bad value.
    """
    actions = {key_of(a): a for a in parser._actions if a.option_strings and a.default is not argparse.SUPPRESS}
    args.sources = {
        a.dest: f"--{key}" for key, a in actions.items() if (value := getattr(args, a.dest)) is not UNSET and value is not None
    }

    def take(action: argparse.Action, source: str, value: Any) -> None:
        if action.dest not in args.sources:
            args.sources[action.dest] = source
            setattr(args, action.dest, _taken(parser, action, value, source))

    def take_from_file(key: str, name: str, value: Any) -> None:
        place = f"{args.config_file}: "
        if (before := args.sources.get(actions[name].dest, "")).startswith(place):
            raise HeadraceError(f"{place}{key}: {before.removeprefix(place)} says so already: one of both")
        take(actions[name], place + key, value)

    variables = option_variables()
    for action in actions.values():
        if (name := variable_of(action)) in variables:
            take(action, name, variables[name].split(",") if _is_many(action) else variables[name])
    left_out: dict[str, str] = {}
    if "config_file" in args.sources:
        for key, value in _read(args.sources["config_file"], args.config_file).items():
            dashed = key.replace("_", "-")
            if dashed in actions and dashed != "config":
                take_from_file(key, dashed, value)
                continue
            others = actions["config"].others()  # type: ignore[attr-defined]
            if dashed in others:
                continue
            if (meant := meaning(plain(dashed), value, others | actions.keys())) is None:
                advice = instead_of(dashed, actions) or nearest(dashed, actions)
                raise HeadraceError(f"{args.config_file}: {key}: no such option of {parser.prog}{advice}")
            left_out |= meant.left_out
            for name, values in meant.ours.items():
                if name in actions:
                    take_from_file(key, name, values if _is_many(actions[name]) or not values else values[-1])
    for a in parser._actions:
        if a.default is not argparse.SUPPRESS and getattr(args, a.dest) in (UNSET, None):
            setattr(args, a.dest, a.default)
    return left_out


def key_of(action: argparse.Action) -> str:
    """An option's name in a file."""
    return next(o for o in action.option_strings if o.startswith("--")).removeprefix("--")


def variable_of(action: argparse.Action) -> str:
    """An option's variable, if it has one: those do that are described by a class of options."""
    described = getattr(action, "described", None)
    return "" if described is None else "HEADRACE_" + described.key.upper().replace("-", "_")


def refuse_unknown_variables(parser: argparse.ArgumentParser, server: Callable[[], argparse.ArgumentParser]) -> None:
    """Raises HeadraceError for a HEADRACE_* variable that no command knows. A server has every option that has one."""
    if strange := option_variables().keys() - set(map(variable_of, parser._actions)):
        known = set(map(variable_of, server()._actions))
        for name in sorted(strange - known):
            raise HeadraceError(f"{name}: no option has such a variable{nearest(name, known)}")


def _read(option: str, path: str) -> dict[str, Any]:
    """The options of a YAML file. Every value is text, which is read as the command line's is: 0123 is no octal number."""
    import yaml

    try:
        loader = yaml.BaseLoader(read_text(option, path))
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode) or not all(isinstance(key.value, str) for key, _ in node.value):
            raise ParameterError(option, path, "a YAML file with an option and its value in each line")
        _check(node, option, path)
        return {key.value: loader.construct_object(value, deep=True) for key, value in node.value}
    except RecursionError:
        raise ParameterError(option, path, "a YAML file whose values are not nested so deeply") from None
    except yaml.YAMLError as e:
        raise ParameterError(option, path, f"a YAML file ({' '.join(str(e).split())})") from None


def _check(node: Any, option: str, path: str) -> None:
    """Raises HeadraceError for a key that its mapping has twice, and for aliases of aliases that stand for endless text."""
    left, size = [node], 0
    while left and size <= MOST_TEXT:
        node = left.pop()
        size += 1 + (len(node.value) if isinstance(node.value, str) else 0)
        if node.id == "mapping":
            keys: set[str] = set()
            for key, value in node.value:
                dashed = key.value.replace("_", "-") if isinstance(key.value, str) else None
                if dashed in keys:
                    raise HeadraceError(f"{path}: {key.value}: it is there twice")
                keys |= {dashed} if dashed is not None else set()
                left += (key, value)
        elif node.id == "sequence":
            left += node.value
    if left:
        raise ParameterError(option, path, f"a YAML file of at most {MOST_TEXT} characters, those that an alias stands for too")


def _is_many(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction) or action.nargs == "+"


def _taken(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, source: str) -> Any:
    """`value` as if it stood on the command line."""
    if _is_many(action):
        return [_one(parser, action, one, source) for one in (value if isinstance(value, list) else [value])]
    return _one(parser, action, value, source)


def _one(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, source: str) -> Any:
    try:
        if action.nargs == 0:
            return BOOLEANS[value.lower()]
        if isinstance(value, dict) and action.described.objects:  # type: ignore[attr-defined]
            value = json.dumps(value)
        if not isinstance(value, str):
            raise argparse.ArgumentError(action, "a list or a mapping")
        found = parser._get_value(action, value)
        parser._check_value(action, found)
    except (argparse.ArgumentError, LookupError, AttributeError):
        kinds = {int: "an integer", size: "an integer", float: "a number"}
        allowed = "true or false" if action.nargs == 0 else kinds.get(action.type, "a text that is not empty")
        if action.choices:
            allowed = "one of " + ", ".join(action.choices) + instead_of_value(action.dest, value)
        raise ParameterError(source, value, allowed) from None
    return found
