"""`strata-pipeline audit`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from strata.protocol.ids import is_did

from strata_pipeline.cli.app import (
    BootstrapFile,
    Json,
    LakePlace,
    Master,
    SparkConf,
    failures_told,
    session_on,
)
from strata_pipeline.cli.progress import steps_shown
from strata_pipeline.cli.tips import read_tip, write_tip
from strata_pipeline.cli.watching import MetricsFile, watched
from strata_pipeline.errors import UsageError
from strata_pipeline.lake_format import GENESIS

if TYPE_CHECKING:
    from strata_pipeline.jobs.audit import Audited
    from strata_pipeline.metrics import JobMetrics

__all__ = ["audit_command"]

_STEPS = {
    "batches": "holding {0.batches:,} batches against the manifests",
    "packets": "verifying {0.packets:,} packets",
    "doubles": "looking for packets that the lake holds twice",
    "log": "comparing with the relay's log",
}
_SHOWN = 20


def audit_command(
    lake: LakePlace,
    database_url: Annotated[
        str | None,
        typer.Option(
            envvar="STRATA_PIPELINE_DATABASE_URL",
            metavar="URL",
            help="The relay's PostgreSQL, to compare the lake with the log; read access is enough.",
            show_default=False,
        ),
    ] = None,
    bootstrap_file: BootstrapFile = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIP",
            help="Read only what was added after this tip of an earlier audit, or this number of a manifest.",
        ),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DID",
            help="The relay whose tombstones count; may repeat. An erasure by another relay is a fault.",
            show_default=False,
        ),
    ] = None,
    tip_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read only what was added after the tip in this file, and write the new one there when all "
            "of it holds. The first time, when there is no such file, the whole lake is read.",
            dir_okay=False,
        ),
    ] = None,
    metrics_file: MetricsFile = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Verify a lake: packets, manifests, agreement with the log.

    Exit code 0 means that all of it holds. The tip that is printed stands for the whole lake: with a copy of
    the tip, anyone can prove later that nothing was changed. With --since an audit reads only the new part;
    only a whole audit reads the older files again.
    """
    from strata_pipeline.jobs.audit import audit

    with failures_told():
        if since is not None and tip_file is not None:
            raise UsageError("--since and --tip-file both say where to begin: leave one out")
        relays = relay or []
        for did in relays:
            if not is_did(did):
                raise UsageError(
                    f"--relay takes a DID, and {did!r} is none: a relay's manifest names its own"
                )
        command = "audit" if since is None and tip_file is None else "audit-since"
        with (
            watched(command, lake, metrics_file) as metrics,
            contextlib.nullcontext(since if tip_file is None else read_tip(tip_file)) as begin,
            session_on(lake, "audit", master, conf) as spark,
            steps_shown("auditing", json, spark) as show,
        ):

            def progress(step: str, audited: Audited) -> None:
                if step in _STEPS:
                    show(_STEPS[step].format(audited))

            audited = audit(
                spark,
                lake,
                url=database_url,
                bootstrap=bootstrap_file,
                since=begin or GENESIS,
                relays=relays,
                progress=progress,
            )
            _note(metrics, audited)
            if json:
                told = msgspec.to_builtins(audited) | {"event": "audit", "holds": audited.holds}
                print(msgspec.json.encode(told).decode(), flush=True)
            else:
                _tell(audited)
            if not audited.holds:
                raise typer.Exit(1)
            if tip_file is not None:
                write_tip(tip_file, audited.tip)


def _note(metrics: JobMetrics, audited: Audited) -> None:
    metrics.set("strata_audit_holds", float(audited.holds))
    for name in ("batches", "packets", "quarantined"):
        metrics.set(f"strata_audit_{name}", getattr(audited, name))
    metrics.set_findings(audited.counts)
    metrics.set("strata_lake_broken", 0)


def _tell(audited: Audited) -> None:
    behind = f" behind {audited.after}" if audited.after else ""
    print(f"{audited.packets:,} packets in {audited.batches:,} batches{behind}, up to {audited.reached}")
    print(f"tip {audited.tip}")
    if audited.quarantined:
        print(
            f"{audited.quarantined:,} rows of the log were put aside when they were archived: see quarantine/"
        )
    for did, count in sorted(audited.erased_by.items()):
        print(f"{count:,} rows were erased since, by {did}")
    if audited.left_behind:
        left = f"{audited.left_behind:,} objects were replaced, or left by interrupted writers"
        print(f"{left}: archive, compact and erase delete them after their grace")
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
