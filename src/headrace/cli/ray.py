"""`headrace ray update`: replace the cores of a server whose cores are in a Ray cluster, without breaking a stream."""

from __future__ import annotations

import argparse

from headrace.cli.options import LogOptions, add_options
from headrace.cli.parser import text
from headrace.errors import HeadraceError, ParameterError
from headrace.extras import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ray", nargs="?", type=text, metavar="ADDRESS", default="auto", help="HOST:PORT of the cluster's head (default: auto)"
    )
    parser.add_argument("--server", type=text, metavar="IP:PORT", help="whose cores (default: the only server of the cluster)")
    parser.add_argument(
        "--drain-timeout", type=float, metavar="SECONDS", default=300.0,
        help="for what an old core has to do; the rest goes on in others",
    )  # fmt: skip
    add_options(parser, LogOptions)


def run(args: argparse.Namespace) -> int:
    require("ray")
    if not 0.0 <= args.drain_timeout <= 1e7:
        raise ParameterError("drain_timeout", args.drain_timeout, "seconds in [0, 1e7]")
    if args.ray == "local":
        raise ParameterError("ADDRESS", args.ray, "HOST:PORT of a cluster's head, or auto")
    from headrace.distributed import ray_cluster, ray_control

    try:
        ray_cluster.join(args.ray)
    except ParameterError as e:
        raise ParameterError("ADDRESS", e.value, e.allowed) from None
    try:
        answer = ray_control.ask(args.server, {"drain_timeout": args.drain_timeout})
    finally:
        ray_cluster.leave()
    if "error" in answer:
        raise HeadraceError(answer["error"])
    print(f"{answer['replaced']} cores replaced")
    return 0
