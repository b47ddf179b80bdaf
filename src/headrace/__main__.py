"""`headrace` and `python -m headrace`: the command line, and a Ctrl-C that comes at a bad time."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in headrace/__init__.py
if TYPE_CHECKING:
    from typing import Any

AGAIN_SECONDS = 0.01


def main() -> int:
    """As `headrace.cli.main`, and 130 for a Ctrl-C while that is still being imported."""
    sys.unraisablehook = _heard
    try:
        from headrace.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


def _heard(lost: Any) -> None:
    """A Ctrl-C in a callback that may not raise (every import has some) was only printed, and all went on: it comes again."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return
    import signal
    import threading

    main_thread = threading.main_thread().ident
    threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (main_thread, signal.SIGINT)).start()


if __name__ == "__main__":
    sys.exit(main())
