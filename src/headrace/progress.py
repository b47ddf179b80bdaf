"""Progress bars on stderr, made with rich; silent where stderr is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def token_progress(total: int, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """Count requests and tokens: the yielded function takes (new tokens, requests that have finished)."""
    if not enabled:
        yield lambda tokens, finished: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[rate]}")
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total, rate="")
        began, tokens = time.perf_counter(), 0

        def update(new: int, finished: int) -> None:
            nonlocal tokens
            tokens += new
            rate = tokens / max(time.perf_counter() - began, 1e-9)
            bar.update(task, advance=finished, rate=f"{rate:,.0f} tok/s")

        yield update
