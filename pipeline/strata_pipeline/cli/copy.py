"""`strata-pipeline copy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from strata_pipeline.cli.app import Json, LakePlace, failures_told, reachable, say
from strata_pipeline.cli.progress import rows_shown

if TYPE_CHECKING:
    from strata_pipeline.jobs.copy import Copied

__all__ = ["copy_command"]


def copy_command(
    lake: LakePlace,
    to: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="The place of the copy: a folder, or s3://bucket/prefix.",
            show_default=False,
            callback=reachable,
        ),
    ],
    json: Json = False,
) -> None:
    """Copy a lake from a disk into a bucket, or back.

    The copy has the same manifests and the same tip. Each batch is checked against its manifest. What was
    erased from the lake is removed from the copy as well. At any moment the copy is a valid lake; an
    interrupted copy continues with the next run.
    """
    from strata_pipeline.jobs.copy import copy_lake

    with failures_told(), rows_shown("copying", json) as show:

        def progress(done: Copied) -> None:
            show(done.packets, done.packets + done.left)

        done = copy_lake(lake, to, progress=progress)
    erasures = f", {done.erasures:,} erasures" if done.erasures else ""
    copied = f"copied {done.batches:,} batches, {done.packets:,} packets{erasures}"
    text = f"{copied}; the copy stands at {done.reached}"
    say(text, json, event="done", **msgspec.to_builtins(done))
