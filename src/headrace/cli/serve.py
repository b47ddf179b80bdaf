"""`headrace serve [MODEL]`: the OpenAI-compatible server. The port is bound before anything slow happens."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import ipaddress
import json
import logging
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.api.tls import tls_context
from headrace.cli.fleet import ray_fleet
from headrace.cli.keys import admin_keys, check_admin, server_keys
from headrace.cli.options import engine_options, generation_defaults, given, named_model, server_options
from headrace.cli.port import bind
from headrace.cli.routing import Routing
from headrace.cli.serve_options import ServeOptions
from headrace.cli.serve_options import add_arguments as add_arguments
from headrace.engine.interrupts import uninterrupted
from headrace.engine.supervision import BUILDER
from headrace.errors import EngineDeadError, HeadraceError, ParameterError
from headrace.extras import is_installed, require
from headrace.logs import configure

if TYPE_CHECKING:
    import uvicorn

    from headrace.api.config import ServerConfig
    from headrace.api_processes.parent import ApiProcesses
    from headrace.engine.client import EngineClient
    from headrace.engine.core_process import EarlyCore
    from headrace.metrics.prometheus import PrometheusMetrics
    from headrace.metrics.trace import TraceFile

logger = logging.getLogger("headrace.server")


def run(args: argparse.Namespace, builder: str = BUILDER) -> int:
    """`builder`: module:function that makes the engine in the core's process."""
    began = time.perf_counter()
    if args.otlp_traces_endpoint is not None:
        require("otel")
    options = ServeOptions(**given(ServeOptions, args))
    configure("server", options.log_level, options.log_format)
    logger.setLevel(logging.INFO)  # what it does and how it fares is told at every level
    for remark in args.remarks:
        logger.warning("%s", remark)
    named_model(args)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whoever started this may have blocked some: then no child's end is seen
    listeners = bind(options.host, options.port, options.api_processes)
    loop = importlib.import_module("uvloop" if is_installed("uvloop") else "asyncio")
    return loop.run(serve(options, args, listeners, began, builder))


async def serve(
    options: ServeOptions, args: argparse.Namespace, listeners: list[socket.socket], began: float, builder: str
) -> int:  # fmt: skip
    """The exit code. The core's process is started first: what it imports takes longest."""
    # Ctrl-C ends this at once until it listens: asyncio's own handler lets it go on until something waits
    signal.signal(signal.SIGINT, signal.default_int_handler)
    early = await early_core(options, args, builder)
    try:
        server = Server(options, args, listeners, began, builder, early)
    except BaseException:
        if early is not None:
            await early.core.kill()
        raise
    return await server.run()


async def early_core(options: ServeOptions, args: argparse.Namespace, builder: str) -> EarlyCore | None:
    """None where it is not known yet how many there will be, and where."""
    engine = engine_options(args)
    if args.models or options.ray is not None or engine.get("data_parallel_size", 1) != 1:
        return None
    import zmq.asyncio

    from headrace.engine.core_process import CoreProcess, EarlyCore

    context, traced = zmq.asyncio.Context(), options.trace is not None
    device = engine.get("device", "auto")
    try:
        core = await CoreProcess.spawn(context, builder, options.log_level, options.log_format, traced, device)
    except (OSError, HeadraceError):  # the client will meet it again, and tell
        return None
    return EarlyCore(context, core)


def first_request(base: str, model: str, chats: bool, keyed: bool) -> str:
    """For a shell. `chats`: whether the model has a chat template; `keyed`: whether the server asks for a key."""
    question = [{"role": "user", "content": "Explain in one sentence why plants need water."}]
    asked = {"messages": question} if chats else {"prompt": "Plants need water because"}
    body = shlex.quote(json.dumps({"model": model, **asked, "max_tokens": 64}))
    path = "chat/completions" if chats else "completions"
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    return f"curl {base}/v1/{path} -H 'Content-Type: application/json'{key} \\\n    -d {body}"


def server_config(args: argparse.Namespace) -> ServerConfig:
    from headrace.api.config import ServerConfig

    options = server_options(args)
    if args.api_processes > 1 and options.setdefault("responses_store_bytes", 0):  # the next request may reach another one
        allowed = "0 with several --api-processes, which share no memory"
        raise ParameterError("responses_store_bytes", args.responses_store_bytes, allowed)
    if args.api_processes > 1 and args.lora_dir is not None:
        allowed = "none with several --api-processes: adapters come and go only where one process serves HTTP"
        raise ParameterError("lora_dir", args.lora_dir, allowed)
    return ServerConfig(**options, api_keys=server_keys(args), admin_keys=admin_keys(args))


class Server:
    """One run of the server, from the bound port to the exit code. Making one looks at all that the options say."""

    def __init__(
        self, options: ServeOptions, args: argparse.Namespace, listeners: list[socket.socket], began: float, builder: str,
        early: EarlyCore | None = None,
    ):  # fmt: skip
        self.options, self.listeners, self.began = options, listeners, began
        self.signals = 0
        self.stop = asyncio.Event()
        self.failed: str | None = None  # why this ends although nobody wanted it to
        self.trace: TraceFile | None = None
        self.tls = tls_context(options.ssl_certfile, options.ssl_keyfile)
        self.several = bool(args.models)
        self.client, self.metrics, self.http = self._parts(args, builder, early)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                loop.add_signal_handler(number, self._signal, number)
        host, port = self.listeners[0].getsockname()[:2]
        base = f"{'http' if self.tls is None else 'https'}://{host if ':' not in host else f'[{host}]'}:{port}"
        logger.info("listening on %s", base)
        self.routing.start()
        await self.client.start()
        serving = self._task(self.http.serve(sockets=self.listeners), "the HTTP server", vital=True)
        background = [self._task(self._loaded(base), "the message that the model is loaded")]
        if self.fleet is not None:
            background.append(self._task(self.fleet.run(self.client, port), "what adds and takes away cores"))
        if self.options.stats_interval > 0:
            from headrace.metrics.log_line import StatsLine

            lines = StatsLine(self.client, self.metrics).run(self.options.stats_interval, logger.info)
            background.append(self._task(lines, "the line of statistics"))
        await self.stop.wait()
        await self._end(serving, background)
        if self.failed is not None:
            logger.error("%s", self.failed)
        logger.info("ended")
        code = 0 if self.failed is None else 1
        if self.signals:
            os._exit(code)  # threads that still work are not waited for, and one more signal changes nothing
        return code

    def _task(self, work: Coroutine[Any, Any, Any], what: str, vital: bool = False) -> asyncio.Task[Any]:
        """A task whose end is looked at; without a `vital` one there is no server."""
        task = asyncio.create_task(work)

        def ended(task: asyncio.Task[Any]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                logger.error("%s failed", what, exc_info=error)
            if vital and not self.stop.is_set():
                self.failed = f"{what} has ended" + (f": {type(error).__name__}: {error}" if error is not None else "")
                self.stop.set()

        task.add_done_callback(ended)
        return task

    def _give_up(self, why: str) -> None:
        self.failed = self.failed or why
        self.stop.set()

    def _parts(self, args: argparse.Namespace, builder: str, early: EarlyCore | None):
        """The client of the engine, its metrics and what serves HTTP, put together and not started."""
        with uninterrupted():  # as in `headrace.cli`
            from headrace.cli.several import check_alone
            from headrace.config import EngineConfig
            from headrace.engine.client import EngineClient
            from headrace.engine.supervision import SupervisionConfig
            from headrace.metrics.prometheus import PrometheusMetrics
            from headrace.metrics.trace import TraceFile
            from headrace.sampling.params import defaults_in_words

        check_alone(args)
        options = self.options
        config, defaults = server_config(args), generation_defaults(options.override_generation_config)
        self.keyed, self.chats = bool(config.api_keys), True  # of several models each may have its own
        if self.several:
            return self._several(args, builder, config, defaults)
        self.fleet, wanted = ray_fleet(args, options), engine_options(args)
        check_admin(args, config.admin_keys, any(wanted.get(name) for name in ("lora", "lora_dir")))
        engine = EngineConfig(**wanted) if self.fleet is None else self.fleet.join(wanted)
        self.routing = Routing(options, engine, several=engine.data_parallel_size > 1 or self.fleet is not None)
        engine = self.routing.config
        client = EngineClient(
            engine,
            SupervisionConfig(**given(SupervisionConfig, args)), builder=builder,
            log_level=options.log_level, log_format=options.log_format,
            on_give_up=lambda why: self._give_up(f"the engine has ended: {why}"), traced=options.trace is not None,
            supplies=None if self.fleet is None else partial(self.fleet.supply, engine, builder, options),
            balancer=self.routing.balancer, early=early,
        )  # fmt: skip
        client.model_name = wanted.get("model") or client.model_name  # as it was given: for nodes its path may be another
        names = config.served_model_names or (client.model_name,)
        if taken := next((name for name in client.adapters() if name in names), None):
            raise ParameterError("lora", taken, "a name that the model itself does not have")
        client.generation_defaults |= defaults
        self.chats = bool(config.chat_template or client.tokenizer.chat_templates)
        logger.info("%s: tokenizer and configuration read", client.model_name)
        logger.info("sampling where a request says nothing: %s", defaults_in_words(client.generation_defaults))
        self.page, self.served = config.page, (config.served_model_names or (client.model_name,))[0]
        metrics = PrometheusMetrics(client, options.metrics_prefix, self.served)
        client.observers.append(metrics)
        if options.trace is not None:
            self.trace = TraceFile(options.trace)
            client.observers.append(self.trace)
        return client, metrics, self._http(client, config, metrics)

    def _several(self, args: argparse.Namespace, builder: str, config: ServerConfig, defaults: dict[str, Any]):
        """The same, of several models."""
        from headrace.api.http_server import http_server
        from headrace.cli.several import several_models
        from headrace.config import EngineConfig
        from headrace.several_models.app import create_models_app

        self.fleet = ray_fleet(args, self.options)  # None: whatever belongs to one has been refused
        self.routing = Routing(self.options, EngineConfig(), several=False)
        models, metrics, config = several_models(args, self.options, config, builder, defaults)
        check_admin(args, config.admin_keys, any(model.spec.engine.takes_adapters for model in models.served))
        self.page, self.served = config.page, (args.default_model or models.names[0])
        return models, metrics, http_server(create_models_app(models, config, metrics), self.options.log_level, self.tls)

    def _http(self, client: EngineClient, config: ServerConfig, metrics: PrometheusMetrics) -> uvicorn.Server | ApiProcesses:
        """The application in this process, or processes that each have one."""
        from headrace.api.app import create_app
        from headrace.api.glass_hub import GlassHub
        from headrace.api.http_server import http_server
        from headrace.api_processes.parent import ApiProcesses
        from headrace.api_processes.wire import Start
        from headrace.distributed.remote_wire import EngineState
        from headrace.engine.kill import kill_core

        options, glass = self.options, GlassHub(client, config.glass_text) if config.page else None
        killer = partial(kill_core, client) if self._may_kill(config) else None
        if options.api_processes == 1:
            return http_server(create_app(client, config, metrics, glass=glass, kill_core=killer), options.log_level, self.tls)
        start = Start(
            client.config, config, EngineState.of(client), client.model_name, client.generation_defaults, int(time.time()),
            options.log_level, client.supervision.heartbeat_timeout, options.ssl_certfile, options.ssl_keyfile,
        )  # fmt: skip
        restarts = client.supervision.max_restarts
        return ApiProcesses(client, metrics, start, options.log_format, restarts, self._give_up, glass)

    def _may_kill(self, config: ServerConfig) -> bool:
        """Whether the page may kill a core. Raises ParameterError where others than this machine's user could have it do so."""
        host = self.listeners[0].getsockname()[0]
        if config.allow_kill_core and not (ipaddress.ip_address(host).is_loopback and self.options.api_processes == 1):
            allowed = "off, unless --host is this machine's loopback address and --api-processes is 1"
            raise ParameterError("--allow-kill-core", "on", allowed)
        return config.allow_kill_core

    async def _end(self, serving: asyncio.Task[Any], background: list[asyncio.Task[Any]]) -> None:
        """Let what runs finish, as far as the time goes; who is cut off is told so."""
        timeout, client = self.options.drain_timeout, self.client
        end = time.monotonic() + timeout
        if self.failed is None:
            count = client.num_requests
            logger.info(
                "draining: %s; a second signal (Ctrl-C) ends it at once",
                f"{count} requests run, for at most {timeout:g} s" if count else "no request runs",
            )
            await self._unless_signalled(client.drain(timeout))
        for task in background:
            task.cancel()
        self.http.should_exit = True  # closes the port; what has been generated is still written to those who read it
        await self._unless_signalled(asyncio.wait({serving}, timeout=max(1.0, end - time.monotonic())))
        if count := client.num_requests:
            logger.warning("%d requests are cut off", count)
        await client.close(0.0 if self.signals > 1 else 2.0)
        await asyncio.wait({serving}, timeout=1.0)  # their streams' last words
        if self.signals < 2:
            self.http.force_exit = True
            await asyncio.wait({serving}, timeout=1.0)
        if self.fleet is not None:
            await self.fleet.leave()
        self.routing.close()
        if self.trace is not None:
            self.trace.close()

    async def _unless_signalled(self, work: Coroutine[Any, Any, Any]) -> None:
        """Wait for `work`, but not after a second signal."""
        task = asyncio.ensure_future(work)
        while not task.done() and self.signals < 2:
            await asyncio.wait({task}, timeout=0.05)
        task.cancel()

    async def _loaded(self, base: str) -> None:
        with contextlib.suppress(EngineDeadError):
            if self.several:
                logger.info("ready after %.2f s: models are loaded when they are asked for", time.perf_counter() - self.began)
            else:
                await self._tell_loaded()
            here = re.sub(r"//(0\.0\.0\.0|\[::\]):", "//localhost:", base)
            if self.page:
                logger.info("open %s/ in a browser", here)
            logger.info("try:\n  %s", first_request(here, self.served, self.chats, self.keyed))

    async def _tell_loaded(self) -> None:
        client = self.client
        info = await client.wait_loaded()
        logger.info(
            "ready after %.2f s: model loaded on %s in %s, weights %s (%.2f s), context %d, %d KV blocks of %d tokens",
            time.perf_counter() - self.began, info.device, info.dtype.removeprefix("torch."), info.weights,
            info.load_seconds, info.max_model_len, info.num_blocks, info.block_size,
        )  # fmt: skip
        if (count := client.config.data_parallel_size) > 1:
            up = await client.wait_settled()
            logger.info("%d of %d cores are ready after %.2f s", up, count, time.perf_counter() - self.began)

    def _signal(self, number: int) -> None:
        if number == signal.SIGHUP and self.signals:
            return  # of a terminal that closes the shell tells, and the kernel
        self.signals += 1
        if self.signals > 2:
            os._exit(0 if self.failed is None else 1)  # the core ends with its parent
        self.stop.set()
