"""`strata-pipeline audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from strata_pipeline.cli.app import Json, LakeFolder, Master, SparkConf, failures_told, spark_conf

if TYPE_CHECKING:
    from strata_pipeline.jobs.audit import Audited

__all__ = ["audit_command"]

_STEPS = {
    "batches": "holding {0.batches:,} batches against the manifests",
    "packets": "verifying {0.packets:,} packets",
    "doubles": "looking for packets that the lake holds twice",
    "log": "comparing with the relay's log",
}
_SHOWN = 20


def audit_command(
    lake: LakeFolder,
    database_url: Annotated[
        str | None,
        typer.Option(
            envvar="STRATA_PIPELINE_DATABASE_URL",
            metavar="URL",
            help="The relay's PostgreSQL, to compare the lake with the log; read access is enough.",
            show_default=False,
        ),
    ] = None,
    bootstrap_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The relay's bootstrap file, if it has one: the keys it trusts."),
    ] = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Verify a lake: packets, manifests, agreement with the log.

    Exit code 0 means that all of it holds. The tip that is printed stands for the whole lake: with a copy of
    the tip, anybody can prove later that nothing was changed.
    """
    from strata_pipeline.jobs.audit import audit
    from strata_pipeline.session import open_session

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
        if finding.file is not None:
            place += f" in {finding.file}" + ("" if finding.row is None else f", row {finding.row}")
        detail = "" if finding.detail is None else f": {finding.detail}"
        print(f"  {finding.about}{where}{place}: {finding.reason}{detail}")
    for name, count in sorted(audited.counts.items()):
        print(f"{count:,} × {name}")
    with_log = " and log agrees" if audited.compared_up_to is not None else ""
    print(f"all of it holds{with_log}" if audited.holds else "NOT ALL OF IT HOLDS")
