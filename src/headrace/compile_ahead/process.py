"""The process that compiles: `python -m headrace.compile_ahead.process PARENT`, with what it is to do on standard input.

It writes a line of JSON to standard output whenever there is news: how many kernels there are and how many are compiled, and at
the end which. It ends with its parent, and leaves no file half written.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.compile_ahead.cards import Card
from headrace.compile_ahead.notes import drop_damaged, is_complete, kernel_cache, read_note, turn, write_note
from headrace.config import EngineConfig, show_cards, use_temporary_directory
from headrace.errors import HeadraceError
from headrace.parent import end_with_parent, leave_signals_to_parent
from headrace.scheduler.config import Limits

ROOM = 4 << 20  # bytes of temporary files: with fewer no kernel can be compiled
UNKEPT = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


class Work(msgspec.Struct):
    """What is to be compiled, and by how many processes (0: as many as suit this machine)."""

    config: EngineConfig
    limits: Limits
    card: Card
    note: str  # where it is noted that all is there
    processes: int = 0


class News(msgspec.Struct, omit_defaults=True):
    """What is said on the way."""

    done: int = 0
    total: int = 0
    failed: int = 0
    ended: bool = False
    refused: dict[str, str] = {}  # kernel -> why this card cannot have it
    unkept: str = ""  # why Triton's cache takes nothing
    full: str = ""  # the directory of temporary files and why it takes no more, if that is so


def main(parent: int) -> int:
    end_with_parent(signal.SIGTERM)
    leave_signals_to_parent()
    signal.signal(signal.SIGTERM, end)
    work = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Work)
    if os.getppid() != parent:
        return 1
    show_cards([])  # of no use here, and a context takes time and memory
    logging.disable(logging.INFO)
    said = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # of compilers
    if full := why_full():
        say(said, News(full=full))
        return 0
    with tempfile.TemporaryDirectory(prefix="headrace-compile-") as home:
        use_temporary_directory(home)  # for the assembler's files, too
        with turn(note := Path(work.note)):
            if is_complete(note):  # somebody else's doing meanwhile
                kernels = read_note(note)["kernels"]
                say(said, News(kernels, kernels, ended=True))
                return 0
            try:
                kernel_cache().mkdir(parents=True, exist_ok=True)
            except OSError as error:
                say(said, News(unkept=why_unkept(error)))
                return 0
            drop_damaged(note)
            try:
                compile_all(work, Path(home), partial(say, said))
            except (OSError, subprocess.CalledProcessError) as error:
                if not (why := no_room(error, Path(home).parent)):
                    raise
                say(said, News(**why))
            except HeadraceError as error:  # of the model
                print(f"headrace: {error}", file=sys.stderr)
                return 1
    return 0


def end(*_: Any) -> None:
    """Clean up; a second signal, as whoever ends a whole group sends, does not disturb that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def no_room(error: Exception, directory: Path) -> dict[str, Any]:
    """`full` or `unkept` of the news where that is why something failed; `directory`: of temporary files."""
    if full := why_full(directory):
        return {"full": full}
    return {"unkept": why_unkept(error)} if isinstance(error, OSError) and error.errno in UNKEPT else {}


def why_unkept(error: OSError) -> str:
    return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"


def why_full(directory: Path | None = None) -> str:
    """Which directory takes no more temporary files, and why; "": it does. None: that of this process."""
    try:
        directory = directory or Path(tempfile.gettempdir())
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(ROOM))
    except OSError as error:
        return f"{directory or 'TMPDIR'} ({error.strerror})"
    return ""


def say(said: Any, news: News) -> None:
    said.write(msgspec.json.encode(news) + b"\n")
    said.flush()


def compile_all(work: Work, home: Path, tell: Any) -> None:
    from triton import knobs

    from headrace.compile_ahead import no_device
    from headrace.compile_ahead.pool import Pool, num_processes

    original, launches = noted(work)
    no_device.build_without_loading(home)
    made = home / "made"
    made.mkdir()

    def compile_one(number: int) -> None:
        found: dict[str, Any] = {}
        try:
            kernel = no_device.compile_noted(launches[number], original)
            found["places"] = no_device.places_of(kernel)
            if kernel.metadata.shared > work.card.shared_memory:
                found["refused"] = f"{kernel.metadata.shared} bytes of shared memory, this card has {work.card.shared_memory}"
        except Exception as error:
            found |= no_room(error, home.parent)
            found["refused"] = f"{type(error).__name__}: {error}"[:500]
            raise
        finally:
            (made / str(number)).write_text(json.dumps(found))

    total = len(launches)
    tell(News(0, total))
    jobs = [partial(compile_one, number) for number in range(total)]
    with Pool(jobs, work.processes or num_processes(), Path(knobs.cache.dir), lambda n: tell(News(n, total))) as pool:
        tally = pool.run()
    found = {int(path.name): json.loads(path.read_text() or "{}") for path in made.iterdir()}
    refused = {launches[n].name: entry["refused"] for n, entry in found.items() if "refused" in entry}
    if not tally.failed:
        write_note(Path(work.note), total, (place for entry in found.values() for place in entry["places"]))
    full, unkept = (next((entry[why] for entry in found.values() if why in entry), "") for why in ("full", "unkept"))
    if tally.failed and not full:  # a fork may not have had the room to say so
        full = why_full(home.parent)
    tell(News(tally.done, total, tally.failed, True, refused, unkept, full))
    shutil.rmtree(made, ignore_errors=True)


def noted(work: Work) -> tuple[Any, list[Any]]:
    """Triton's own compilation, and what it is to be asked for; the slowest kernels first, so that none is left at the end."""
    import torch

    from headrace.attention.select import choose_cache_dtype
    from headrace.compile_ahead import no_device
    from headrace.compile_ahead.played_ranks import with_part_of_vocabulary
    from headrace.compile_ahead.steps import Places, Played, Stage
    from headrace.compile_ahead.weights import META, weights_without_data
    from headrace.model.checkpoint import resolve_checkpoint
    from headrace.model.families import model_config_from_hf
    from headrace.model.shard import Shard

    torch.set_num_threads(1)
    no_device.install(work.card.capability, multiprocessors=work.card.multiprocessors)
    launches, original = no_device.note_launches()
    checkpoint = resolve_checkpoint(work.config)
    ranks = work.config.tensor_parallel_size
    model = Shard(0, ranks).config(model_config_from_hf(checkpoint.config))
    dtype = getattr(torch, dtype_name(work.config.dtype, model.dtype, bool(checkpoint.quantized_to())))
    cache_dtype = choose_cache_dtype(work.config.kv_cache_dtype, dtype, META)
    shown, weights = weights_without_data(checkpoint, model, dtype, work.config.quantization)
    weights = weights if ranks == 1 else with_part_of_vocabulary(weights, model, ranks)
    config, adapters = work.config, None
    if config.takes_adapters:
        adapters = Places(config.max_loras, config.max_lora_rank, config.lora_experts)
    eager = config.enforce_eager
    Stage(Played(shown, weights, work.limits, cache_dtype, work.card.name, eager, adapters, ranks)).play()
    return original, sorted(launches, key=lambda found: not found.name.startswith(SLOW))


SLOW = ("_roles", "_wide", "_varlen", "_filter", "_narrow", "_skinny", "_gemv", "_decode_attention", "_split")


def dtype_name(wanted: str, stored: str, narrow: bool) -> str:
    """As engine.forwards.choose_dtype has it on a card with bfloat16."""
    return wanted if wanted != "auto" else ("float16" if stored == "float16" and not narrow else "bfloat16")


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)
