"""`headrace serve [MODEL]`: the OpenAI-compatible server. The port is bound before anything slow happens."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.options import add_engine_arguments, engine_options
from headrace.config import api_key_from_environment
from headrace.errors import EngineDeadError, ParameterError

if TYPE_CHECKING:
    from headrace.metrics.trace import TraceFile

BUILDER = "headrace.engine.build:build_engine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="as --model (default: the embedded model)")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    server.add_argument("--port", type=int, default=8000, help="0: any free one, which is printed")
    server.add_argument("--served-model-name", action="append", help="name clients use (repeatable; default: the model's)")
    server.add_argument("--api-key", action="append", help="a key that clients must send (repeatable)")
    server.add_argument("--api-key-file", help="a file with one key a line")
    server.add_argument("--max-concurrent-per-key", type=int, help="requests in progress for one key")
    server.add_argument("--max-queued-requests", type=int, default=4096, help="samples that may wait; beyond: 429")
    server.add_argument("--max-queued-tokens", type=int, help="prompt tokens that may wait; beyond: 429")
    server.add_argument("--request-timeout", type=float, help="deadline of every request in seconds")
    server.add_argument("--drain-timeout", type=float, default=30.0, help="seconds for running requests after SIGTERM")
    server.add_argument("--cors-origin", action="append", help="origin that browsers may call from (repeatable; *: any)")
    server.add_argument("--chat-template", help="a jinja2 file instead of the checkpoint's template")
    server.add_argument("--tool-parser", default="auto", help="hermes, llama3_json, mistral, pythonic, auto or none")
    server.add_argument("--reasoning-parser", default="auto", help="a parser's name, auto or none")
    server.add_argument(
        "--override-generation-config", default="{}", metavar="JSON",
        help='sampling parameters of requests that do not say, before the checkpoint\'s own: \'{"temperature": 0}\'',
    )  # fmt: skip
    server.add_argument("--embedding-pooling", default="mean", choices=("mean", "last"))
    server.add_argument("--metrics-prefix", default="headrace", help="vllm: for dashboards made for vLLM")
    server.add_argument("--stats-interval", type=float, default=5.0, help="seconds between lines of statistics; 0: none")
    server.add_argument("--trace", metavar="FILE", help="write a Perfetto trace of steps and requests")
    server.add_argument("--max-restarts", type=int, default=30, help="deaths of the engine core in a minute before giving up")
    server.add_argument("--heartbeat-timeout", type=float, default=15.0, help="seconds of silence: the core is restarted")
    server.add_argument("--step-timeout", type=float, default=300.0, help="seconds inside one step: the core is restarted")
    server.add_argument(
        "--standby", action=argparse.BooleanOptionalAction, default=True,
        help="keep a second process with everything imported, so that a restart takes as long as loading the weights",
    )  # fmt: skip
    server.add_argument("--ssl-certfile", help="serve HTTPS with this certificate")
    server.add_argument("--ssl-keyfile")
    add_engine_arguments(parser)


def run(args: argparse.Namespace, builder: str = BUILDER) -> int:
    """`builder`: module:function that makes the engine in the core's process."""
    began = time.perf_counter()
    if args.model_tag is not None and args.model is not None:
        raise ParameterError("MODEL", args.model_tag, "one model, as MODEL or as --model")
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", args.metrics_prefix):
        raise ParameterError("--metrics-prefix", args.metrics_prefix, "a name of letters, digits and _")
    if not 0 <= args.stats_interval < 1e7:
        raise ParameterError("--stats-interval", args.stats_interval, "seconds in [0, 1e7]")
    args.model = args.model_tag or args.model
    listener = bind(args.host, args.port)
    loop = importlib.import_module("uvloop" if importlib.util.find_spec("uvloop") else "asyncio")
    return loop.run(Server(args, listener, began, builder).run())


def bind(host: str, port: int) -> socket.socket:
    """Listen on exactly this address. Raises ParameterError at once if that is not possible."""
    if not 0 <= port <= 65535:
        raise ParameterError("--port", port, "an integer in [0, 65535]")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as e:
        raise ParameterError("--host, --port", f"{host}:{port}", f"an address that can be bound ({e.strerror or e})") from None
    return listener


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    keys = list(args.api_key or [])
    if args.api_key_file:
        try:
            keys += Path(args.api_key_file).read_text().split()
        except OSError as e:
            raise ParameterError("--api-key-file", args.api_key_file, f"a readable file ({e.strerror})") from None
    if from_environment := api_key_from_environment():
        keys.append(from_environment)
    return tuple(keys)


def generation_defaults(text: str) -> dict[str, Any]:
    """What stands in for the checkpoint's generation_config.json. Raises ParameterError for what is not one of its values."""
    from headrace.sampling.params import SamplingParams

    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not set(given) <= set(names):
        raise ParameterError("--override-generation-config", text, "a JSON object with some of " + ", ".join(names))
    SamplingParams(**given)
    return given


def server_config(args: argparse.Namespace):
    from headrace.api.config import ServerConfig

    template = None
    if args.chat_template:
        try:
            template = Path(args.chat_template).read_text()
        except OSError as e:
            raise ParameterError("--chat-template", args.chat_template, f"a readable file ({e.strerror})") from None
    return ServerConfig(
        served_model_names=tuple(args.served_model_name or ()),
        api_keys=api_keys(args),
        max_concurrent_per_key=args.max_concurrent_per_key,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        request_timeout=args.request_timeout,
        cors_origins=tuple(args.cors_origin or ()),
        chat_template=template,
        tool_parser=None if args.tool_parser == "none" else args.tool_parser,
        reasoning_parser=None if args.reasoning_parser == "none" else args.reasoning_parser,
        embedding_pooling=args.embedding_pooling,
    )


class Server:
    """One run of the server, from the bound port to the exit code."""

    def __init__(self, args: argparse.Namespace, listener: socket.socket, began: float, builder: str):
        self.args, self.listener, self.began, self.builder = args, listener, began, builder
        self.signals = 0
        self.stop = asyncio.Event()
        self.trace: TraceFile | None = None

    def stage(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.2f} s] {text}", file=sys.stderr, flush=True)

    async def run(self) -> int:
        args = self.args
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal)
        host, port = self.listener.getsockname()[:2]
        scheme = "https" if args.ssl_certfile else "http"
        base = f"{scheme}://{host if ':' not in host else f'[{host}]'}:{port}"
        self.stage(f"listening on {base}")
        client, metrics, http = self._parts()
        await client.start()
        serving = asyncio.create_task(http.serve(sockets=[self.listener]))
        background = [asyncio.create_task(self._loaded(client, base))]
        if args.stats_interval > 0:
            from headrace.metrics.log_line import StatsLine

            background.append(asyncio.create_task(StatsLine(client, metrics).run(args.stats_interval, self.stage)))
        stopping = asyncio.create_task(self.stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        failed = await self._end(client, http, serving, background)
        if failed is not None:
            print(f"headrace: the engine has ended: {failed}", file=sys.stderr, flush=True)
        self.stage("ended")
        if self.signals > 1:
            os._exit(0 if failed is None else 1)  # at once: not even threads that still work are waited for
        http.force_exit = True
        await asyncio.wait({serving}, timeout=1.0)
        return 0 if failed is None else 1

    def _parts(self):
        """The client of the engine, its metrics and the HTTP server, put together and not started."""
        import uvicorn

        from headrace.api.app import create_app
        from headrace.config import EngineConfig
        from headrace.engine.client import EngineClient
        from headrace.engine.supervision import SupervisionConfig
        from headrace.metrics.prometheus import PrometheusMetrics
        from headrace.metrics.trace import TraceFile

        args = self.args
        config, defaults = server_config(args), generation_defaults(args.override_generation_config)
        client = EngineClient(
            EngineConfig(**engine_options(args)),
            SupervisionConfig(
                heartbeat_timeout=args.heartbeat_timeout, step_timeout=args.step_timeout, max_restarts=args.max_restarts,
                standby=args.standby,
            ),
            builder=self.builder, log_level=args.log_level.upper(), on_give_up=lambda why: self.stop.set(),
            traced=args.trace is not None,
        )  # fmt: skip
        client.generation_defaults |= defaults
        self.stage(f"{client.model_name}: tokenizer and configuration read")
        metrics = PrometheusMetrics(client, args.metrics_prefix, (config.served_model_names or (client.model_name,))[0])
        client.observers.append(metrics)
        if args.trace is not None:
            self.trace = TraceFile(args.trace)
            client.observers.append(self.trace)
        app = create_app(client, config, metrics)
        http = uvicorn.Server(
            uvicorn.Config(
                app, log_level=args.log_level, access_log=False, lifespan="on", timeout_keep_alive=75,
                ssl_certfile=args.ssl_certfile, ssl_keyfile=args.ssl_keyfile, server_header=False,
            )
        )  # fmt: skip
        http.capture_signals = contextlib.nullcontext  # type: ignore  # ours drain first
        return client, metrics, http

    async def _end(self, client, http, serving: asyncio.Task[None], background: list[asyncio.Task[None]]) -> str | None:
        """Let what runs finish, as far as the time goes. Returns why the engine had ended before, if it had."""
        timeout = self.args.drain_timeout
        end = time.monotonic() + timeout
        if client.dead is None:
            self.stage(f"draining for at most {timeout:g} s")
            await self._unless_signalled(client.drain(timeout))
        failed = client.dead
        for task in background:
            task.cancel()
        http.should_exit = True  # closes the port; what has been generated is still written to those who read it
        await self._unless_signalled(asyncio.wait({serving}, timeout=max(1.0, end - time.monotonic())))
        await client.close(0.0 if self.signals > 1 else 2.0)
        if self.trace is not None:
            self.trace.close()
        return failed

    async def _unless_signalled(self, work: Coroutine[Any, Any, Any]) -> None:
        """Wait for `work`, but not after a second signal."""
        task = asyncio.ensure_future(work)
        while not task.done() and self.signals < 2:
            await asyncio.wait({task}, timeout=0.05)
        task.cancel()

    async def _loaded(self, client, base: str) -> None:
        with contextlib.suppress(EngineDeadError):
            info = await client.wait_loaded()
            self.stage(
                f"model loaded on {info.device} in {info.dtype} ({info.load_seconds:.2f} s): context {info.max_model_len}, "
                f"{info.num_blocks} KV blocks of {info.block_size} tokens"
            )
            name = (self.args.served_model_name or [client.model_name])[0]
            print(
                f"\nReady. Try:\n  curl {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
                f'    -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Where does the water go?"}}], '
                f'"max_tokens": 64}}\'\n',
                file=sys.stderr,
                flush=True,
            )

    def _signal(self) -> None:
        self.signals += 1
        self.stop.set()
