"""The file of `relayd erase --places`, and what its output says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import typer
from strata.protocol.errors import InvalidInput
from strata.protocol.places import MAX_PLACE_BYTES, PacketPlace, read_place
from strata.protocol.text_files import utf8_of

from relayd.cli import console

if TYPE_CHECKING:
    from relayd.store.places import PlacesErased

__all__ = ["MAX_PLACES", "read_places", "tell_places"]

MAX_PLACES: Final = 1_000_000
"""The most places of a file, all of which are in memory."""


def read_places(name: str, *, limit: int = MAX_PLACES) -> list[PacketPlace]:
    """The places in a file, `-` for stdin, in its order. Raises OSError, and ValueError for a line that names
    no place or one that an earlier line names, and for a file without places."""
    found: dict[int, tuple[int, PacketPlace]] = {}
    shown = "stdin" if name == "-" else name
    with _opened(name) as source:
        for number, line in enumerate(iter(lambda: source.readline(MAX_PLACE_BYTES + 2), b""), 1):
            if number == 1:
                line = utf8_of(line)
            if not line.strip():
                continue
            try:
                place = read_place(line.rstrip(b"\r\n"))
            except InvalidInput as error:
                hint = "Give the lines of strata-pipeline find as they are"
                raise ValueError(f"{shown}, line {number}: {error.reason}. {hint}") from None
            before, other = found.setdefault(place.sequence, (number, place))
            if before != number:
                what = "the same place" if other == place else "another packet for the same place"
                raise ValueError(f"{shown}, line {number}: line {before} names {what}")
            if len(found) > limit:
                raise ValueError(f"{shown} names more than {limit:,} places: split it")
    if not found:
        raise ValueError(f"{shown} names no place: strata-pipeline find has found nothing")
    return [place for _, place in found.values()]


def tell_places(done: PlacesErased, *, dry_run: bool, json: bool) -> None:
    """Print what was done, or what would be done."""
    if json:
        refusals = [one._asdict() for one in done.refusals]
        counts = {name: getattr(done, name) for name in ("erased", "dropped", "already", "spared", "refused")}
        console.print_json({**counts, "refusals": refusals, "dry_run": dry_run})
        return
    would = "would be " if dry_run else ""
    typer.echo(f"{done.erased} packets {would}erased")
    typer.echo(f"{done.dropped} that retention has dropped {'would get' if dry_run else 'got'} a tombstone")
    if done.already:
        typer.echo(f"{done.already} were erased before")
    if done.spared:
        typer.echo(f"{done.spared} stay: they carry keys, or revoke them")
    if done.refused:
        typer.echo(f"{done.refused} {'would be' if dry_run else 'were'} refused:")
    for one in done.refusals:
        typer.echo(f"  {one.packet_id} at {one.sequence}: {one.reason}")
    if done.refused > len(done.refusals):
        typer.echo(f"  and {done.refused - len(done.refusals)} more")


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    with Path(name).open("rb") as source:
        yield source
