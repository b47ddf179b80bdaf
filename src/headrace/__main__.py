"""`headrace` and `python -m headrace`: the command line, and a Ctrl-C that comes while it is still being imported."""

import sys


def main() -> int:
    """As `headrace.cli.main`."""
    try:
        from headrace.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
