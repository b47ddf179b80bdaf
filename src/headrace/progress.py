"""Progress bars on stderr, made with rich; silent where stderr is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL = 0.1  # seconds between two counts of the tokens


@contextmanager
def token_progress(total: int, count: Callable[[], int], enabled: bool) -> Iterator[Callable[..., None] | None]:
    """Shows requests and tokens, of which `count` says how many there are. The yielded function is called after each step
    and takes the requests that have finished since; it is None where nobody looks."""
    if not enabled:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[rate]}")
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, rate="")
        began = counted = time.perf_counter()

        def update(finished: int = 0) -> None:
            nonlocal counted
            if finished:
                bar.update(task, advance=finished)
            if (now := time.perf_counter()) - counted >= INTERVAL:
                counted = now
                bar.update(task, rate=f"{count() / (now - began):,.0f} tok/s")

        yield update
