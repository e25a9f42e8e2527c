"""`strata-pipeline find`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from strata.protocol.fields import is_content_id
from strata.protocol.ids import is_did
from strata.protocol.places import place_line

from strata_pipeline.cli.app import Json, LakePlace, Master, SparkConf, failures_told, session_on
from strata_pipeline.cli.progress import steps_shown
from strata_pipeline.errors import UsageError

if TYPE_CHECKING:
    from strata_pipeline.jobs.find import Searched

__all__ = ["find_command"]

_MOST = 1_000
"""The most packets or authors that are looked for at a time."""


def find_command(
    lake: LakePlace,
    packet_ids: Annotated[
        list[str] | None, typer.Argument(metavar="PACKET_ID", help="The packets to look for.")
    ] = None,
    authors: Annotated[
        list[str] | None,
        typer.Option(
            "--author",
            metavar="DID",
            help="Look for all packets of this author; may repeat.",
            show_default=False,
        ),
    ] = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Name the places of packets, for relayd erase --places.

    It changes nothing. Each line on stdout has a packet's id, its place in the log and its time of receipt,
    and nothing else. relayd erase --places gives each place a tombstone, even if retention has dropped its
    day from the log; then strata-pipeline erase removes the packet from the lake. Packets that carry keys or
    revoke them are left out. The counts are on stderr, with --json as JSON. Exit code 1 if a packet is not
    there, or if a damaged row cannot be named.
    """
    from strata_pipeline.jobs.find import Searched, find

    with failures_told():
        ids = [name.lower() for name in packet_ids or []]
        dids = authors or []
        _check(ids, dids)
        searched = Searched()
        with (
            session_on(lake, "find", master, conf) as spark,
            steps_shown("looking for packets", json, spark),
        ):
            for place in find(spark, lake, searched, authors=dids, packet_ids=ids):
                print(place_line(place).decode())
    counts = {"event": "found", **msgspec.to_builtins(searched)}
    typer.echo(msgspec.json.encode(counts).decode() if json else _text(searched), err=True)
    if searched.absent or searched.unnamed:
        raise typer.Exit(1)


def _check(packet_ids: list[str], authors: list[str]) -> None:
    if bool(packet_ids) is bool(authors):
        raise UsageError("name packets, or authors with --author")
    if len(packet_ids) + len(authors) > _MOST:
        raise UsageError(f"more than {_MOST:,} are looked for at a time: run it again for the others")
    for did in authors:
        if not is_did(did):
            raise UsageError(f"--author takes a DID, and {did!r} is none")
    for name in packet_ids:
        if not is_content_id(name):
            raise UsageError(f"{name!r} is not a packet id: 0x and 64 hex digits are needed")


def _text(searched: Searched) -> str:
    text = f"{searched.places:,} places"
    if searched.quarantined:
        text += f", {searched.quarantined:,} of them of rows in quarantine"
    if searched.spared:
        text += f"; {searched.spared:,} packets stay: they carry keys, or revoke them"
    if searched.erased:
        text += f"; {searched.erased:,} are erased already"
    if searched.unnamed:
        text += (
            f"; {searched.unnamed:,} rows in quarantine have a damaged time of receipt, and no relay can be "
            "asked to erase them"
        )
    if searched.absent:
        text += f"; {searched.absent:,} of the packets are not in the lake"
    return text
