"""`python -m relax_hpc` is `relax-hpc`."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""As shells and typer say it: 128 + SIGINT."""


def main() -> None:
    """Carry out the command line. Ctrl-C ends it without a traceback, while modules are imported too."""
    try:
        from relax_hpc.cli import app
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    app(prog_name="relax-hpc")


if __name__ == "__main__":
    main()
