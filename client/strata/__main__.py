"""`strata`, and `python -m strata`."""

from __future__ import annotations

from strata.protocol.interrupts import EndsAtOnce

__all__ = ["main"]


def main() -> None:
    """The entry point of the command."""
    with EndsAtOnce():
        from strata.tools.cli import main as run
    run()


if __name__ == "__main__":
    main()
