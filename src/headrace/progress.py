"""Progress bars on stderr, made with rich; silent where stderr is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def token_progress(total: int, enabled: bool) -> Iterator[Callable[..., None]]:
    """Count requests and tokens: the yielded function takes (tokens so far or None, requests that have finished since)."""
    if not enabled:
        yield lambda tokens, finished=0: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[rate]}")
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total, rate="")
        began = time.perf_counter()

        def update(tokens: int | None, finished: int = 0) -> None:
            bar.update(task, advance=finished)
            if tokens is not None:
                bar.update(task, rate=f"{tokens / max(time.perf_counter() - began, 1e-9):,.0f} tok/s")

        yield update
