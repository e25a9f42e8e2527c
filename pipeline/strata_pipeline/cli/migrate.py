"""`strata-pipeline migrate-lake`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from strata_pipeline.cli.app import (
    BootstrapFile,
    Json,
    LakeFolder,
    Master,
    SparkConf,
    failures_told,
    say,
    session_on,
)
from strata_pipeline.cli.progress import steps_shown

__all__ = ["migrate_command"]


def migrate_command(
    lake: LakeFolder,
    database_url: Annotated[
        str | None,
        typer.Option(
            envvar="STRATA_PIPELINE_DATABASE_URL",
            metavar="URL",
            help="The relay's PostgreSQL, to audit against the log; read access is enough.",
            show_default=False,
        ),
    ] = None,
    bootstrap_file: BootstrapFile = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Audit an older lake, and bring its manifests to format 2.

    From then on an audit detects altered annotations and quarantined rows without the log. If the audit has
    findings, nothing is changed. The tip changes; the old manifests stay in _aside.
    """
    from strata_pipeline.jobs.migrate import migrate_lake

    with failures_told(), session_on(lake, "migrate-lake", master, conf) as spark:
        with steps_shown("migrating", json, spark) as progress:
            done = migrate_lake(spark, lake, url=database_url, bootstrap=bootstrap_file, progress=progress)
    text = f"{done.batches:,} batches are of format 2 now; the tip was {done.tip_before} and is {done.tip}"
    if not done.batches:
        text = f"all batches are of format 2 or later already; tip {done.tip}"
    say(text, json, event="migrated", **msgspec.to_builtins(done))
