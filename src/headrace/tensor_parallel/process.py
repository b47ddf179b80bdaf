"""The process of a rank other than the first: builds its part of the model, then does what rank 0 says, step by step.

Started by `tensor_parallel.ranks` as `python -m headrace.tensor_parallel.process RANK SIZE PARENT RING MOUTH BUILDER NAME
LOGLEVEL LOGFORMAT`; RING and MOUTH are file descriptors. BUILDER, as module:function, makes the runner from the options, the
rank, and what joins the group when the device is known. It ends with rank 0, whatever ended that.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from headrace.config import prepare_threads
from headrace.errors import EngineDeadError, HeadraceError
from headrace.logs import configure
from headrace.parent import end_with_parent
from headrace.prewarm import prewarm
from headrace.tensor_parallel.messages import Begin, Built, FromRank, Here, LastWords, ToRank, from_wire
from headrace.tensor_parallel.ring import Reader

if TYPE_CHECKING:  # imports torch, which takes seconds
    import torch

    from headrace.model.shard import Group

logger = logging.getLogger(__name__)


def check(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


def main(rank: int, size: int, parent: int, ring: int, mouth: int, builder: str) -> int:
    end_with_parent()
    check(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_threads()
    words = socket.socket(fileno=mouth)

    def say(message: FromRank) -> None:
        words.send(msgspec.msgpack.encode(message))

    built = False
    try:
        inbox = Reader(ring, size - 1, rank - 1, lambda: check(parent))
        decoder = msgspec.msgpack.Decoder(ToRank, dec_hook=from_wire)
        begin = decoder.decode(inbox.receive())
        assert isinstance(begin, Begin)
        inbox.echo()
        prewarm(begin.config.device, rank)
        module, _, function = builder.partition(":")
        build = getattr(importlib.import_module(module), function)
        from headrace.tensor_parallel.obey import obey

        def join(device: torch.device) -> Group:
            from headrace.model.shard import Shard
            from headrace.tensor_parallel.cards import meet

            say(Here())
            return meet(Shard(rank, size), device, begin.port)

        runner = build(begin.config, rank, join)
        built = True
        say(Built())
        obey(runner, inbox, decoder)
        return 0
    except HeadraceError as e:
        say(LastWords(str(e), refused=not built and not isinstance(e, EngineDeadError)))
        return 2
    except Exception as e:
        logger.exception("rank %d fails", rank)
        say(LastWords(f"{type(e).__name__}: {e}"[:4000], refused=False))
        return 3


if __name__ == "__main__":
    configure(*sys.argv[7:10])
    rank, size, parent, ring, mouth = (int(argument) for argument in sys.argv[1:6])
    code = main(rank, size, parent, ring, mouth, sys.argv[6])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # as in engine.process
