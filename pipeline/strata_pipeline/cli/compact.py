"""`strata-pipeline compact`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from strata_pipeline.cli.app import Json, LakeFolder, Master, SparkConf, failures_told, say, spark_conf

if TYPE_CHECKING:
    from strata_pipeline.jobs.compact import Compacted

__all__ = ["compact_command"]


def compact_command(
    lake: LakeFolder, master: Master = None, conf: SparkConf = None, json: Json = False
) -> None:
    """Rewrite the small files of finished days as large ones.

    The contents of the lake stay the same.
    """
    from strata_pipeline.jobs.compact import compact
    from strata_pipeline.session import open_session

    with failures_told(), open_session("compact", master=master, conf=spark_conf(conf)) as spark:
        with Console(stderr=True).status("compacting") as status:

            def progress(done: Compacted) -> None:
                status.update(f"compacting: {done.days} days done")

            done = compact(spark, lake, progress=progress)
    text = f"compacted {done.days} days: {done.files_before} files became {done.files_after}"
    say(text, json, event="compacted", **msgspec.to_builtins(done))
