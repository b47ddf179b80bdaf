"""The options of `headrace serve`: those of its process, of the application, of the cores and of the engine."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

from headrace.api.config import ServerConfig
from headrace.cli.options import LogOptions, add_options
from headrace.cli.parser import text
from headrace.cli.sources import add_config_file
from headrace.config import EngineConfig
from headrace.distributed.autoscaler import ScalingConfig
from headrace.engine.supervision import SupervisionConfig
from headrace.errors import ParameterError
from headrace.options import check, option

_server = partial(option, group="server")
_fleet = partial(option, group="several cores, other fleets")
_ray = partial(option, group="several machines: cores on the nodes of a Ray cluster")
_security = partial(option, group="security")
_operation = partial(option, group="operation")
_models = partial(option, group="several models: loaded when they are asked for, in one server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(LogOptions):
    """What a server has besides its engine and its application. Raises ParameterError on a value out of range."""

    host: str = _server("127.0.0.1", "address to listen on; the default is this machine only")
    port: int = _server(8000, "0: any free one, which is printed", 0, 65535)
    api_processes: int = _server(1, "that serve HTTP on this port, in front of one engine", 1, 64)
    override_generation_config: str = _server(
        "{}", "sampling parameters of requests that do not say, before the checkpoint's own", unit="JSON"
    )
    router: Literal["prefix", "least-loaded", "round-robin"] = _fleet(
        "prefix", "where a request goes; prefix: to the core that holds most of it, unless another has that much less to do"
    )
    kv_events: str | None = _fleet(
        None, "publish which blocks the caches hold, prompts included, as vLLM does: tcp://*:5557", unit="ADDRESS"
    )
    kv_events_replay: str | None = _fleet(None, "where subscribers ask for events that they have missed", unit="ADDRESS")
    kv_events_topic: str | None = _fleet(None, "by which some subscribers tell servers", unit="NAME", shown="empty")
    api_key: tuple[str, ...] = _security((), "a key that clients must send", unit="KEY")
    api_key_file: str | None = _security(None, "a key a line; lines that begin with # are comments", unit="FILE")
    admin_key: tuple[str, ...] = _security((), "the operator's: opens /v1/load_lora_adapter and nothing else", unit="KEY")
    admin_key_file: str | None = _security(None, "likewise, a key a line", unit="FILE")
    ssl_certfile: str | None = _security(None, "serve HTTPS with this certificate", unit="FILE")
    ssl_keyfile: str | None = _security(None, "the certificate's key", unit="FILE", shown="in the certfile")
    drain_timeout: float = _operation(30.0, "for running requests after SIGTERM", 0.0, 1e7, "SECONDS")
    stats_interval: float = _operation(5.0, "between lines of statistics; 0: none", 0.0, 1e7, "SECONDS")
    metrics_prefix: str = _operation("headrace", "of metrics; vllm: for dashboards made for vLLM", unit="NAME")
    trace: str | None = _operation(None, "write a Perfetto trace of steps and requests", unit="FILE")
    log_format: Literal["text", "json"] = _operation("text", "of the log's lines, the engine's too")
    ray: str | None = _ray(
        None, "HOST:PORT of the head, auto (this machine's, also if left out) or local", unit="ADDRESS", nothing="auto"
    )
    placement_timeout: float = _ray(10.0, "until the cluster must have room for a core", 0.0, 86400.0, "SECONDS")

    def __post_init__(self) -> None:
        check(self)
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ParameterError("metrics_prefix", self.metrics_prefix, "a name of letters, digits and _")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions:
    """Of a server with several models."""

    models: tuple[str, ...] = _models(
        (), "another, as --model given again; or a JSON object with its own options (in a file: a list of them)",
        unit="MODEL", objects=True,
    )  # fmt: skip
    default_model: str | None = _models(None, "for requests that name none, with --any-model-name also another", unit="NAME")
    pinned_models: tuple[str, ...] = _models((), "loaded at the start, and never unloaded", flag="pinned-model", unit="NAME")
    model_memory_bytes: int | None = _models(
        None, "that models may take together", 1, 2**50, "BYTES", shown="--gpu-memory-utilization; on a CPU 0.9 of what is free"
    )
    model_keep_alive: float | None = _models(
        None, "without a request, after which a model is unloaded", 0.0, 1e9, "SECONDS", shown="none: when its room is needed"
    )
    max_queued_loads: int = _models(256, "requests that may wait for models to be loaded; beyond: 503", 1, 65536)

    def __post_init__(self) -> None:
        check(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag", nargs="?", type=text, metavar="MODEL", help="as --model (default: the embedded SmolLM2-135M-Instruct)"
    )
    add_config_file(parser)
    for described in (ServeOptions, ServerConfig, SupervisionConfig, ScalingConfig, ModelsOptions, EngineConfig):
        add_options(parser, described, again={"model": "models"})
