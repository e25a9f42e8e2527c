"""Shared parts of the commands that report: options, progress, tables."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from strata_pipeline.cli.app import named
from strata_pipeline.reports.text import visible

__all__ = ["Days", "Output", "print_row", "print_table"]

_MIN_TEXT = 12
_FILE_WIDTH = 160

Days = Annotated[
    int | None,
    typer.Option(metavar="N", help="Look at the last N days of the lake only.", min=1),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        metavar="DIR",
        help="Write tables (Parquet) and the report to this folder.",
        callback=named,
    ),
]


def print_row(event: str, row: Mapping[str, object]) -> None:
    """Print a row as a line of JSON."""
    print(msgspec.json.encode({"event": event, **row}).decode(), flush=True)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, wrapped: Container[str]) -> None:
    """Print a table to the terminal or a file; columns in `wrapped` are left-aligned and take the free
    room."""
    if not rows:
        return
    table = Table(box=None, pad_edge=False)
    for head in heads:
        if head in wrapped:
            table.add_column(head, overflow="fold", min_width=_MIN_TEXT)
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        # Strangers chose these texts: neither markup nor control sequences may reach the terminal.
        table.add_row(*(escape(visible(cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    console.print(table)
