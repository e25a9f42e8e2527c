"""`strata`, and `python -m strata`."""

from __future__ import annotations

import sys

from strata.protocol.interrupts import EndsAtOnce

__all__ = ["main"]


def main() -> None:
    """The entry point of the command."""
    with EndsAtOnce():
        try:
            from strata.tools.cli import main as run
        except ModuleNotFoundError as error:
            if error.name not in ("rich", "typer"):
                raise
            sys.exit(
                f"strata: {error.name} is not installed; the command needs: pip install 'strata-sdk[cli]'"
            )
    run()


if __name__ == "__main__":
    main()
