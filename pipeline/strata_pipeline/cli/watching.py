"""Metrics of commands that a timer starts: the option, and a run from beginning to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata_pipeline.cli.app import exit_code

if TYPE_CHECKING:
    from strata_pipeline.metrics import JobMetrics

__all__ = ["MetricsFile", "watched"]

MetricsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write metrics to this file, for the textfile collector of node_exporter; its name ends with "
        ".prom. Counters continue from run to run.",
        dir_okay=False,
    ),
]


@contextmanager
def watched(command: str, lake: str, file: Path | None, listen: str | None = None) -> Iterator[JobMetrics]:
    """The metrics of a run, which also record how it ended; errors pass through. Raises `UsageError`."""
    from strata_pipeline.metrics import JobMetrics, served

    metrics = JobMetrics(command, lake, file)
    try:
        with served(metrics, listen):
            yield metrics
    except BaseException as error:
        metrics.ended(exit_code(error), error)
        raise
    metrics.ended(0)
