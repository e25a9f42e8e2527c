"""`strata-pipeline reputation`."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from strata_pipeline.cli.app import Json, Master, SparkConf, failures_told, named, spark_conf
from strata_pipeline.cli.progress import steps_shown
from strata_pipeline.errors import UsageError

if TYPE_CHECKING:
    from strata_pipeline.jobs.reputation import Scored

__all__ = ["reputation_command"]

_LAST_SECOND = 2**53
"""The same bound as for the lines of probe logs."""
_COLUMNS = f"{'state':<12}{'score':>6}  {'latency':>9}  {'uptime':>6}  {'observations':>12}  relay"


def reputation_command(
    probes: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="The folder of probe logs (*.jsonl): the output of `strata relays export` of each client.",
            show_default=False,
            callback=named,
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Score as of this time: Unix seconds, or 2026-11-21T12:00:00Z.",
            show_default="now",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Write the scores and malformed lines to this folder, as Parquet.",
            callback=named,
        ),
    ] = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Score relays from the probe logs of many clients.

    The scores cover seven days and follow the formula that every client uses.
    """
    from strata_pipeline.jobs.reputation import reputation, require_probes
    from strata_pipeline.session import open_session

    with failures_told():
        moment = _moment(at)
        require_probes(probes)  # before Spark starts, which takes seconds
        with (
            open_session("reputation", master=master, conf=spark_conf(conf)) as spark,
            steps_shown("scoring relays", json, spark),
        ):
            scored = reputation(spark, probes, at=moment, output=output)
    if json:
        for row in scored.relays:
            print(msgspec.json.encode({"event": "relay", **row}).decode())
        told = msgspec.to_builtins(scored)
        print(msgspec.json.encode({"event": "done", **told, "relays": len(scored.relays)}).decode())
    else:
        _tell(scored)


def _moment(text: str | None) -> float | None:
    if text is None:
        return None
    wrong = UsageError(f"--at {text}: a time is Unix seconds, or 2026-11-21T12:00:00Z")
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        if not abs(seconds) <= _LAST_SECOND:
            raise wrong
        return seconds
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise wrong from None
    # Times in logs are UTC, and so is a time given without a zone.
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _tell(scored: Scored) -> None:
    if scored.relays:
        print(_COLUMNS)
    for row in scored.relays:
        print(_line(row))
    print(f"{scored.lines:,} lines, {len(scored.relays):,} relays")
    for count, what in (
        (scored.malformed, "malformed lines are put aside"),
        (scored.future, "observations from the future are ignored: some client's clock is wrong"),
        (scored.old, "observations are older than seven days"),
    ):
        if count:
            print(f"{count:,} {what}")


def _line(row: dict[str, Any]) -> str:
    latency = "-" if row["latency_seconds"] is None else f"{row['latency_seconds'] * 1000:.1f} ms"
    uptime = "-" if row["uptime"] is None else f"{row['uptime']:.0%}"
    # A stranger wrote the URL into a log: only its printable characters reach the terminal.
    url = "".join(letter if letter.isprintable() else "�" for letter in row["url"])
    figures = f"{row['score']:>6.2f}  {latency:>9}  {uptime:>6}  {row['observations']:>12,}"
    return f"{row['standing']:<12}{figures}  {url}"
