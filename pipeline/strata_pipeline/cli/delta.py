"""`strata-pipeline publish-delta`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from strata_pipeline.cli.app import Json, LakePlace, failures_told, say

__all__ = ["delta_command"]


def delta_command(
    lake: LakePlace,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild", help="Move the Delta log into _aside, in a bucket delete it, and make another."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Publish the lake as a Delta table.

    The log is in generations/_delta_log, in a bucket in packets/_delta_log. Readers of Delta
    (DuckDB, Polars, Trino, Spark with Delta, …) then find a consistent table, and skip files by sequence and
    time. The log copies no files. You can delete it at any time, and the next run writes it
    again: the chain of manifests is authoritative. An extra run changes nothing. After the first run,
    compact updates the log, and so does archive with --delta.
    """
    from strata_pipeline.lake.delta import publish
    from strata_pipeline.lake.places import open_lake

    with failures_told():
        done = publish(open_lake(lake), rebuild=rebuild)
    text = (
        f"version {done.version} of the Delta table tells of manifests up to {done.manifest}: "
        f"{done.added:,} files added, {done.removed:,} taken out, {done.rows:,} rows"
    )
    say(text, json, event="published", **msgspec.to_builtins(done))
