"""`strata-pipeline audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from strata_pipeline.cli.app import Json, LakeFolder, Master, SparkConf, failures_told, spark_conf
from strata_pipeline.jobs.audit import Audited, audit
from strata_pipeline.session import open_session

__all__ = ["audit_command"]

_STEPS = {
    "batches": "holding {0.batches:,} batches against the manifests",
    "packets": "verifying {0.packets:,} packets",
    "doubles": "looking for packets that are there twice",
    "log": "comparing with the relay's log",
}
_SHOWN = 20


def audit_command(
    lake: LakeFolder,
    database_url: Annotated[
        str | None,
        typer.Option(
            envvar="STRATA_PIPELINE_DATABASE_URL",
            help="Compare with the relay's log too; a replica and a role that may only read will do.",
            show_default=False,
        ),
    ] = None,
    bootstrap_file: Annotated[
        Path | None, typer.Option(help="The relay's bootstrap file, if it has one: keys it trusts.")
    ] = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Verify every packet of a lake again, its chain of manifests, and that the relay's log agrees.

    Ends with 0 only when all of it holds. The tip it prints stands for the whole lake: who keeps it can prove
    later that nothing was changed.
    """
    console = Console(stderr=True)

    with failures_told(), open_session("audit", master=master, conf=spark_conf(conf)) as spark:
        with console.status("auditing") as status:

            def progress(step: str, audited: Audited) -> None:
                if step in _STEPS and not json:
                    status.update(_STEPS[step].format(audited))

            audited = audit(spark, lake, url=database_url, bootstrap=bootstrap_file, progress=progress)
    if json:
        told = msgspec.to_builtins(audited) | {"event": "audit", "holds": audited.holds}
        print(msgspec.json.encode(told).decode())
    else:
        _tell(audited)
    raise typer.Exit(0 if audited.holds else 1)


def _tell(audited: Audited) -> None:
    print(f"{audited.packets:,} packets in {audited.batches:,} batches, up to {audited.reached}")
    print(f"tip {audited.tip}")
    if audited.quarantined:
        print(
            f"{audited.quarantined:,} rows of the log were put aside when they were archived: see quarantine/"
        )
    if audited.compared_up_to is not None and audited.behind:
        print(f"the log has {audited.behind:,} packets more: run archive")
    for finding in audited.findings[:_SHOWN]:
        where = "" if finding.packet_id is None else f" {finding.packet_id}"
        place = "" if finding.sequence is None else f" at {finding.sequence}"
        detail = "" if finding.detail is None else f": {finding.detail}"
        print(f"  {finding.about}{where}{place}: {finding.reason}{detail}")
    for name, count in sorted(audited.counts.items()):
        print(f"{count:,} × {name}")
    with_log = " and log agrees" if audited.compared_up_to is not None else ""
    print(f"all of it holds{with_log}" if audited.holds else "NOT ALL OF IT HOLDS")
