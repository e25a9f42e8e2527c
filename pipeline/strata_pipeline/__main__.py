"""`strata-pipeline`, and `python -m strata_pipeline`."""

from __future__ import annotations

from strata.protocol.interrupts import EndsAtOnce

__all__ = ["main"]


def main() -> None:
    """The entry point of the command."""
    with EndsAtOnce():
        from strata_pipeline.cli import main as run
    run()


if __name__ == "__main__":
    main()
