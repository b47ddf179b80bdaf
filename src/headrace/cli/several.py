"""What `serve` does for several models: reads what each has of its own, divides the memory, puts their parts together."""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.cli.options import engine_options, generation_defaults, given
from headrace.cli.serve_options import ModelsOptions, ServeOptions
from headrace.config import EngineConfig
from headrace.engine.weight_sizes import weight_bytes
from headrace.errors import HeadraceError, ParameterError
from headrace.files import read_text
from headrace.machine import usable_cores
from headrace.model.checkpoint import resolve_checkpoint
from headrace.options import nearest, options_of
from headrace.several_models import memory

if TYPE_CHECKING:
    from headrace.api.config import ServerConfig
    from headrace.engine.client import EngineClient
    from headrace.several_models.metrics import ModelsMetrics
    from headrace.several_models.models import Models
    from headrace.several_models.served import ModelSpec

logger = logging.getLogger("headrace.server")
# options of the engine that are the machine's, not a model's
SHARED = ("device", "gpu_memory_utilization", "data_parallel_size", "tensor_parallel_size", "kv_cache_events", "num_kv_blocks")
OF_SERVER = (  # options of the application that a model may have of its own
    "chat_template", "tool_parser", "reasoning_parser", "embedding_pooling", "score_method", "special_tokens_in_content",
    "max_queued_requests", "max_queued_tokens",
)  # fmt: skip
OWN = ("name", "names", "pinned", "keep_alive", "override_generation_config")
OF_ADAPTERS = ("lora", "lora_dir", "max_loras", "max_lora_rank", "lora_experts")
ADAPTERS = "each model has adapters of its own (`lora:` and `lora_dir:` in its entry of `models:`)"
INSTEAD = {
    "served_model_names": "each has names of its own (`models:` in the file of --config)", "lora": ADAPTERS,
    "lora_dir": ADAPTERS,
}  # fmt: skip
TRUTHS = {"true": True, "false": False}


def check_alone(args: argparse.Namespace) -> None:
    """Raises ParameterError for an option of several models where there is one, or one of one model where there are several."""
    if not args.models:
        for described in options_of(ModelsOptions):
            if described.name in args.sources:
                needed = "nothing without several models: --model twice, or `models:` in the file of --config"
                raise ParameterError(args.sources[described.name], getattr(args, described.name), needed)
        return
    for name, only in (
        ("data_parallel_size", 1), ("tensor_parallel_size", 1), ("api_processes", 1), ("ray", None), ("trace", None),
        ("kv_events", None), ("allow_kill_core", False), ("served_model_names", ()),
        ("lora", ()), ("lora_dir", None),
    ):  # fmt: skip
        if name in args.sources and (value := getattr(args, name)) != only:
            raise ParameterError(args.sources[name], value, f"with several models: {INSTEAD.get(name, only)}")


def several_models(
    args: argparse.Namespace, options: ServeOptions, config: ServerConfig, builder: str, defaults: dict[str, Any]
) -> tuple[Models, ModelsMetrics, ServerConfig]:  # fmt: skip
    """All of them, not started, their metrics, and the configuration of the server. Whatever is wrong with one is raised here.

    `defaults`: of sampling, where a model has none of its own.
    """
    from headrace.engine.client import EngineClient
    from headrace.engine.supervision import SupervisionConfig
    from headrace.several_models.metrics import ModelsMetrics
    from headrace.several_models.models import Models
    from headrace.several_models.served import ServedModel

    asked = ModelsOptions(**given(ModelsOptions, args))
    first = [args.model] if "model" in args.sources else []
    entries = [_entry(i, text) for i, text in enumerate(asked.models)]
    read = SpecReader(args, config, asked, defaults)
    specs = [read.spec({"model": name}, "model") for name in first]
    specs += [read.spec(entry, f"models[{i}]") for i, entry in enumerate(entries)]
    _check_names(specs, asked, config.any_model_name)
    specs, sizes, budget = divide(specs, asked.model_memory_bytes)

    supervision = SupervisionConfig(**{"standby": False, **given(SupervisionConfig, args)})

    def make(engine: EngineConfig, on_give_up: Callable[[str], None]) -> EngineClient:
        return EngineClient(
            engine, supervision, builder=builder, log_level=options.log_level, log_format=options.log_format,
            on_give_up=on_give_up,
        )  # fmt: skip

    served = [ServedModel(spec, make, options.metrics_prefix) for spec in specs]
    models = Models(
        served, sizes, budget, default=asked.default_model, any_name=config.any_model_name, max_waiting=asked.max_queued_loads
    )
    return models, ModelsMetrics(models, options.metrics_prefix), replace(config, served_model_names=tuple(models.names))


def _entry(number: int, text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        return {"model": text}
    try:
        return dict(json.loads(text, object_pairs_hook=partial(_once, number)))
    except (ValueError, RecursionError):
        raise ParameterError(f"models[{number}]", text[:200], "a model, or a JSON object with its options") from None


def _once(number: int, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key.replace("-", "_") in (known.replace("-", "_") for known in found):
            raise HeadraceError(f"models[{number}]: {key}: it is there twice")
        found[key] = value
    return found


def _check_names(specs: list[ModelSpec], asked: ModelsOptions, any_name: bool) -> None:
    names = [name for spec in specs for name in spec.names]
    for name in names:
        if names.count(name) > 1:
            raise ParameterError("models", name, "names that differ: give one of these models a `name` of its own")
    adapters = [name for spec in specs for name in spec.engine.adapter_paths()]
    for name in adapters:
        if name in names or adapters.count(name) > 1:
            raise ParameterError("lora", name, "a name that no model has, and no other adapter of any")
    if any_name and asked.default_model is None:
        raise ParameterError("any_model_name", True, "off without --default-model, where there are several models")
    for option, value in (("default_model", asked.default_model), *(("pinned_models", name) for name in asked.pinned_models)):
        if value is not None and value not in names:
            raise ParameterError(option, value, "one of " + ", ".join(names))


class SpecReader:
    """Makes what is known of a model of what is said for it and for all."""

    def __init__(self, args: argparse.Namespace, config: ServerConfig, asked: ModelsOptions, defaults: dict[str, Any]):
        self.engine = {name: value for name, value in engine_options(args).items() if name != "model"}
        self.config, self.asked, self.defaults = config, asked, defaults
        own = [o for o in options_of(EngineConfig) if (o.help or o.name == "memory_bytes") and o.name not in SHARED]
        application: type = type(config)
        of_application = options_of(application)
        self._of_engine = frozenset(o.name for o in own)
        self._kinds = {o.name: o.kind for o in (*own, *of_application)} | {"pinned": bool, "keep_alive": float}

    def spec(self, entry: dict[str, Any], place: str) -> ModelSpec:
        """`place`: of the entry, for what is wrong with it."""
        known = [*OWN, *self._of_engine, *OF_SERVER]
        found = {key.replace("-", "_"): value for key, value in entry.items() if value is not None}
        found = {key: _read(value, self._kinds.get(key, str)) for key, value in found.items()}
        for key in found:
            if key in SHARED:
                raise HeadraceError(f"{place}.{key}: this is for all models: it stands beside `models:`, not in it")
            if key not in known:
                raise HeadraceError(f"{place}.{key}: a model has no such option{nearest(key, known)}")
        try:
            return self._spec(found)
        except ParameterError as e:
            raise ParameterError(f"{place}.{e.field}", e.value, e.allowed) from None

    def _spec(self, found: dict[str, Any]) -> ModelSpec:
        from headrace.several_models.served import ModelSpec

        own = {k: v for k, v in found.items() if k in self._of_engine}
        if isinstance(own.get("lora"), str):
            own["lora"] = [own["lora"]]
        takes = any(own.get(name) for name in ("lora", "lora_dir"))
        shared = {k: v for k, v in self.engine.items() if takes or k not in OF_ADAPTERS}  # what would bound nothing
        engine = EngineConfig(**{**shared, **own})
        names = _names(found, engine)
        defaults = self.defaults
        if (sampling := found.get("override_generation_config")) is not None:
            defaults = generation_defaults(sampling if isinstance(sampling, str) else json.dumps(sampling))
        return ModelSpec(
            names=names, engine=engine, server=self._server(found, names), generation_defaults=defaults,
            pinned=_truth(found.get("pinned", False)) or any(name in self.asked.pinned_models for name in names),
            keep_alive=_number("keep_alive", found.get("keep_alive", self.asked.model_keep_alive)),
            memory_bytes=engine.memory_bytes,
        )  # fmt: skip

    def _server(self, found: dict[str, Any], names: tuple[str, ...]) -> ServerConfig:
        own = {name: found[name] for name in OF_SERVER if name in found}
        if "chat_template" in own:
            own["chat_template"] = read_text("chat_template", own["chat_template"])
        own |= {name: None for name in ("tool_parser", "reasoning_parser") if own.get(name) == "none"}
        takes_any = self.config.any_model_name and self.asked.default_model in names
        return replace(self.config, **own, any_model_name=takes_any, responses_store_bytes=0, otlp_traces_endpoint=None)


def _read(value: Any, kind: type) -> Any:
    """A text of a file as what it means; what it cannot mean is refused as it is, where it is used."""
    if not isinstance(value, str) or kind not in (bool, int, float):
        return value
    try:
        return TRUTHS[value.lower()] if kind is bool else kind(value)
    except (LookupError, ValueError):
        return value


def _names(found: dict[str, Any], engine: EngineConfig) -> tuple[str, ...]:
    from headrace.model.embedded import NAME

    names = found.get("names", found.get("name", engine.model or NAME))
    names = names if isinstance(names, list) else [names]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ParameterError("names", names, "names that are not empty")
    return tuple(names)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParameterError("pinned", value, "true or false")
    return value


def _number(field: str, value: Any) -> float:
    """Seconds; infinity: for ever."""
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
        raise ParameterError(field, value, "seconds in [0, 1e9]")
    return float(value)


def divide(specs: list[ModelSpec], wanted: int | None) -> tuple[list[ModelSpec], list[int], int]:
    """The models with their shares of the memory and of a CPU's cores, the shares in bytes, and the budget. Raises
    CapacityError for a model that can never be loaded."""
    shared = specs[0].engine
    budget, on_card = memory.budget_of(shared, wanted)
    weights = [
        weight_bytes(spec.engine, resolve_checkpoint(spec.engine), on_card) + (spec.engine.kv_cache_bytes or 0)
        for spec in specs
    ]  # with a cache of a size that was asked for: neither can be less
    asked = [spec.memory_bytes for spec in specs]
    sizes = memory.shares(budget, weights, asked)
    names, pinned = [spec.names[0] for spec in specs], [spec.pinned for spec in specs]
    memory.check_room(budget, names, weights, sizes, pinned)
    together = memory.most_at_once(budget, sizes, pinned)
    threads = None if on_card else max(1, usable_cores() // together)
    where, each = "the card" if on_card else "memory", "" if threads is None else f", with {threads} threads each"
    logger.info("%d models in %.2f GiB of %s, up to %d at a time%s", len(specs), budget / memory.GIB, where, together, each)
    for name, weight, size in zip(names, weights, sizes, strict=True):
        logger.info("model %s: %.2f GiB, of which weights %.2f", name, size / memory.GIB, weight / memory.GIB)
    placed = [
        replace(spec, engine=replace(spec.engine, memory_bytes=size, threads=spec.engine.threads or threads))
        for spec, size in zip(specs, sizes, strict=True)
    ]
    return placed, sizes, budget
