"""The options of `headrace serve`."""

from __future__ import annotations

import argparse

from headrace.cli.fleet import add_fleet_arguments
from headrace.cli.options import add_engine_arguments
from headrace.cli.parser import text
from headrace.cli.routing import add_routing_arguments
from headrace.logs import FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag", nargs="?", type=text, metavar="MODEL", help="as --model (default: the embedded SmolLM2-135M-Instruct)"
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", type=text, default="127.0.0.1", help="address to listen on; the default is this machine only")
    server.add_argument("--port", type=int, metavar="N", default=8000, help="0: any free one, which is printed")
    server.add_argument(
        "--api-processes", type=int, metavar="N", default=1, help="that serve HTTP on this port, in front of one engine"
    )
    server.add_argument(
        "--served-model-name", type=text, action="append", metavar="NAME",
        help="name clients use (repeatable; default: the model's)",
    )  # fmt: skip
    server.add_argument("--any-model-name", action="store_true", help="a request may name any model (default: off)")
    server.add_argument(
        "--unknown-fields", default="ignore", choices=("ignore", "refuse"),
        help="of bodies, that cannot change an answer; ignore: x-headrace-ignored names them",
    )  # fmt: skip
    server.add_argument(
        "--page", action=argparse.BooleanOptionalAction, default=True, help="the page for browsers at /: chat and engine"
    )
    server.add_argument(
        "--glass-text", action="store_true", help="the page may show whoever has a key the texts of all requests (default: off)"
    )
    server.add_argument("--chat-template", type=text, metavar="FILE", help="a jinja2 file (default: the checkpoint's template)")
    server.add_argument(
        "--tool-parser", type=text, metavar="NAME", default="auto", help="hermes, llama3_json, mistral, pythonic, auto or none"
    )
    server.add_argument(
        "--reasoning-parser", type=text, metavar="NAME", default="auto", help="qwen3, deepseek_r1, mistral, auto or none"
    )
    server.add_argument(
        "--override-generation-config", default="{}", metavar="JSON",
        help='sampling parameters of requests that do not say, before the checkpoint\'s own: \'{"temperature": 0}\'',
    )  # fmt: skip
    server.add_argument("--embedding-pooling", default="mean", choices=("mean", "last"), help="how an embedding is made")
    server.add_argument(
        "--score-method", default="auto", choices=("auto", "yes-no", "embedding"),
        help="of /v1/rerank and /v1/score; yes-no: as Qwen3-Reranker; auto: that where the model is one",
    )  # fmt: skip
    server.add_argument(
        "--data-parallel-size", type=int, metavar="N", help="cores behind this server, each with its own cache (default: 1)"
    )
    add_routing_arguments(parser.add_argument_group("several cores, other fleets"))
    _add_limits(parser.add_argument_group("limits"))
    _add_security(parser.add_argument_group("security"))
    _add_supervision(parser.add_argument_group("operation"))
    add_fleet_arguments(parser.add_argument_group("several machines", "cores on the nodes of a Ray cluster"))
    add_engine_arguments(parser)


def _add_limits(group) -> None:
    for name, kind, metavar, default, words in (
        ("max-concurrent-per-key", int, "N", None, "requests in progress for one key"),
        ("max-queued-requests", int, "N", 4096, "samples that may wait; beyond: 429"),
        ("max-queued-tokens", int, "N", None, "prompt tokens that may wait; beyond: 429"),
        ("request-timeout", float, "SECONDS", None, "deadline of every request"),
        ("responses-store-bytes", int, "N", None, "of /v1/responses kept in memory (default: 64 MiB; 0 with --api-processes)"),
    ):
        group.add_argument(f"--{name}", type=kind, metavar=metavar, default=default, help=words)


def _add_security(group) -> None:
    group.add_argument("--api-key", action="append", metavar="KEY", help="a key that clients must send (repeatable)")
    group.add_argument("--api-key-file", type=text, metavar="FILE", help="a key a line; lines that begin with # are comments")
    group.add_argument(
        "--cors-origin", type=text, action="append", metavar="ORIGIN",
        help="SCHEME://HOST:PORT of pages whose scripts may call (repeatable; *: any)",
    )  # fmt: skip
    group.add_argument(
        "--special-tokens-in-content", default="token", choices=("token", "text"),
        help="what a special token that a message spells out becomes; text: no user can end his turn",
    )  # fmt: skip
    group.add_argument("--ssl-certfile", type=text, metavar="FILE", help="serve HTTPS with this certificate")
    group.add_argument("--ssl-keyfile", type=text, metavar="FILE", help="the certificate's key (default: in the certfile)")


def _add_supervision(group) -> None:
    for name, kind, metavar, default, words in (
        ("drain-timeout", float, "SECONDS", 30.0, "for running requests after SIGTERM"),
        ("stats-interval", float, "SECONDS", 5.0, "between lines of statistics; 0: none"),
        ("max-restarts", int, "N", 30, "deaths of the engine core in a minute before giving up"),
        ("heartbeat-timeout", float, "SECONDS", 15.0, "of silence: the core is restarted"),
        ("step-timeout", float, "SECONDS", 300.0, "inside one step: the core is restarted"),
        ("metrics-prefix", text, "NAME", "headrace", "of metrics; vllm: for dashboards made for vLLM"),
        ("trace", text, "FILE", None, "write a Perfetto trace of steps and requests"),
    ):
        group.add_argument(f"--{name}", type=kind, metavar=metavar, default=default, help=words)
    group.add_argument("--log-format", choices=FORMATS, default="text", help="of the log's lines, the engine's too")
    group.add_argument(
        "--standby", action=argparse.BooleanOptionalAction, default=True,
        help="keep a second process with everything imported, so that a restart takes as long as loading the weights",
    )  # fmt: skip
