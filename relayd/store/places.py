"""Erase packets at places that are named one by one, whether or not the log still has their rows.

Retention drops whole days, and a packet of such a day may still lie in a lake. It has no row to empty, but a
tombstone is what a lake needs to erase it, and what keeps it out of the log (`erasing`). So a place without a
row gets a tombstone alone. Tombstones are never taken back: each place must be one that the log can have had.

- A row at the place must have the place's id and time. It is emptied, as `erasing` does.
- A place without a row must lie in a day that retention has dropped, or before the first day of the log. In
  any other day, the log holds all places that it has given out.
- The duplicate index outlives the rows. If it knows the id, it must know the id at this place; if it still
  remembers the day, it must know the id.

The id of a packet without a row is recorded for good: a manifest that a peer has is never too old to come in
again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import asyncpg
from strata.protocol.ids import Signer
from strata.protocol.places import PacketPlace
from strata.protocol.sequences import day_of, day_text
from strata.protocol.tombstones import Tombstone, sign_tombstone, told_place

from relayd.moderation import Act, SubjectKind
from relayd.store.connection import connected
from relayd.store.erasing import EMPTY_ROWS, PUT_TOMBSTONES, SPARED, one_batch, vacuum
from relayd.store.moderation import Ruling, ring, take_turn, write_all
from relayd.store.queries import HEAD

__all__ = ["Fate", "KnownPlaces", "PlaceEraser", "PlacesErased", "RefusedPlace", "Row", "judge"]

_BATCH: Final = 100
"""Places in one transaction. No packet comes in meanwhile, for some 20 ms."""
_SKEW_SECONDS: Final = 300
"""No relay takes a time of first receipt later than its own clock's. That clock may be set back before the
packet is stored."""
_MAX_REFUSALS: Final = 100
"""The most refusals that are listed; the others are counted."""

_LOCK: Final = f"{HEAD} FOR UPDATE"
"""As an append and retention do: in between, no packet comes in and no day is dropped."""
_ROWS: Final = (
    "SELECT sequence, received_at, packet_id, content_type = ANY ($2::bytea[]), octet_length(body) > 0,"
    " tableoid::regclass::text FROM packets WHERE sequence = ANY ($1::bigint[]) ORDER BY sequence"
)
_BURIED: Final = (
    "SELECT packet_id, sequence FROM tombstones"
    " WHERE packet_id = ANY ($1::bytea[]) OR sequence = ANY ($2::bigint[])"
)
_IDS: Final = "SELECT packet_id, sequence, received_at FROM packet_ids WHERE packet_id = ANY ($1::bytea[])"
_PARTITIONS: Final = r"""
SELECT i.inhparent::regclass::text, substring(e.bound FROM 'FROM \(''?([0-9]+)')::bigint,
    substring(e.bound FROM 'TO \(''?([0-9]+)')::bigint
FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
CROSS JOIN LATERAL (SELECT pg_get_expr(c.relpartbound, c.oid) AS bound) AS e
WHERE i.inhparent IN ('packets'::regclass, 'packet_ids'::regclass)
"""
_REMEMBER: Final = (
    "INSERT INTO packet_ids (packet_id, sequence, received_at)"
    " SELECT * FROM unnest($1::bytea[], $2::bigint[], $3::bigint[])"
)


class Fate(enum.Enum):
    """What becomes of a place."""

    ERASE = enum.auto()
    """The log has its row, which is emptied."""
    BURY = enum.auto()
    """The log has no row there any more: it gets a tombstone alone."""
    ALREADY = enum.auto()
    """It has a tombstone, and no row with contents."""
    SPARE = enum.auto()
    """Its packet carries keys."""
    REFUSE = enum.auto()


class Row(NamedTuple):
    """A row of the log at one of the places."""

    packet_id: bytes
    received_at: int
    is_spared: bool
    is_full: bool
    table: str


@dataclass(slots=True)
class KnownPlaces:
    """What the log knows of some places."""

    head: int
    """The last sequence of the log."""
    dropped_to: int
    """Retention has dropped all days below this; 0 if it has dropped none."""
    begins: int | None
    """The border below the first day that the log has; None if it has no day."""
    ids_dropped_to: int = 0
    """The duplicate index has forgotten ids below this; 0 if it remembers all."""
    generations: list[tuple[int, int]] = field(default_factory=list)
    """From where to where the duplicate index remembers all ids."""
    rows: dict[int, Row] = field(default_factory=dict)
    buried: dict[str, int] = field(default_factory=dict)
    """The place of the tombstone of each id."""
    tombstones: dict[int, str] = field(default_factory=dict)
    """The id in the tombstone of each place."""
    ids: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """Places and times of receipt by the first relay, according to the duplicate index, of each id."""


class RefusedPlace(NamedTuple):
    """A place for which nothing was done, and why."""

    packet_id: str
    sequence: int
    reason: str


@dataclass(slots=True)
class PlacesErased:
    """The result of an erasure."""

    erased: int = 0
    """Rows of the log that were emptied."""
    dropped: int = 0
    """Places without a row, which have a tombstone now."""
    already: int = 0
    spared: int = 0
    """Packets that carry keys or their revocation: without them a revoked key could sign again."""
    refused: int = 0
    refusals: list[RefusedPlace] = field(default_factory=list)
    """The first of those that were refused."""


def judge(place: PacketPlace, known: KnownPlaces) -> tuple[Fate, str]:
    """What to do about a place, and the reason for a refusal."""
    row, at, name = known.rows.get(place.sequence), place.sequence, place.packet_id
    if row is not None:
        found, received_at = told_place(row.packet_id, row.received_at)
        if found != name:
            return Fate.REFUSE, f"the log has {found} there"
        if received_at != place.received_at:
            return Fate.REFUSE, f"the log received it at {received_at}, and not at {place.received_at}"
        if row.is_spared:
            return Fate.SPARE, ""
    if known.tombstones.get(at, name) != name:
        return Fate.REFUSE, f"the tombstone there is that of {known.tombstones[at]}"
    if name in known.buried and not (row is not None and row.is_full):
        return Fate.ALREADY, ""  # an id has one tombstone, which is for every place in a lake
    if row is not None:
        return Fate.ERASE, ""
    why = _contradicted(place, known)
    return (Fate.REFUSE, why) if why else (Fate.BURY, "")


def _contradicted(place: PacketPlace, known: KnownPlaces) -> str:
    """Why the log cannot have had a packet at a place where it has no row; empty if it can."""
    at, day = place.sequence, day_of(place.sequence)
    if at > known.head:
        return f"the log ends at {known.head}" if known.head else "the log is empty"
    if known.dropped_to and at >= known.dropped_to:
        return f"retention has not dropped {day_text(day)}, and the log has no row there"
    if not known.dropped_to and (known.begins is None or at >= known.begins):
        return f"retention has dropped no day, and of {day_text(day)} the log has no row there"
    if places := known.ids.get(place.packet_id):
        # Of a packet that a peer brought, the index has the time at which the first relay received it.
        if any(there == at and first <= place.received_at + _SKEW_SECONDS for there, first in places):
            return ""
        other, received_at = min(places)
        return f"the log has had it at {other}, received at {received_at}"
    if known.dropped_to and at >= known.ids_dropped_to:
        if any(first <= at < end for first, end in known.generations):
            return f"the log remembers the ids of {day_text(day)}, and this is none of them"
        return f"the log has never had packets of {day_text(day)}"
    return ""


class PlaceEraser:
    """Erases at places over its own connection. `signer` is the relay, whose DID the tombstones bear."""

    def __init__(
        self, url: str, signer: Signer, *, connect_timeout: float = 10.0, batch: int = _BATCH
    ) -> None:
        self._url = url
        self._signer = signer
        self._connect_timeout = connect_timeout
        self._batch = batch

    async def erase(
        self,
        places: Sequence[PacketPlace],
        *,
        reason: str,
        actor: str,
        via: str,
        now: int,
        progress: Callable[[PlacesErased], None] = lambda done: None,
    ) -> PlacesErased:
        """Erase the packets at these places, which are distinct.

        Then the tables are vacuumed, so that the old rows do not remain in them. Raises `StoreUnavailable`.
        If it is interrupted or cancelled, whole batches are done, and the same call does the rest.
        """
        done, tables = PlacesErased(), set[str]()
        # `Ruling.subject` is replaced by the id of each place.
        ruling = Ruling(SubjectKind.PACKET, "", False, reason, actor, via)
        async with connected(self._url, "relayd erase", self._connect_timeout) as connection:
            for some in self._batches(places):
                # Signed beforehand: the log waits as long as the transaction lasts.
                stones = [self._tombstone(place, now) for place in some]
                async with one_batch(connection):
                    await connection.execute(_LOCK)
                    known = await _known(connection, some, f"{_ROWS} FOR UPDATE")
                    fates = _judged(some, known, done)
                    await _write(connection, some, stones, fates, known, ruling, now)
                # An earlier run may have been interrupted before it came to the tables.
                tables |= {
                    known.rows[place.sequence].table
                    for place, fate in zip(some, fates, strict=True)
                    if fate in (Fate.ERASE, Fate.ALREADY) and place.sequence in known.rows
                }
                progress(done)
            for table in sorted(tables):
                await vacuum(connection, table)
        return done

    async def survey(self, places: Sequence[PacketPlace]) -> PlacesErased:
        """What `erase` would do now; nothing is changed. Raises `StoreUnavailable`."""
        done = PlacesErased()
        async with connected(self._url, "relayd erase", self._connect_timeout) as connection:
            for some in self._batches(places):
                _judged(some, await _known(connection, some, _ROWS), done)
        return done

    def _batches(self, places: Sequence[PacketPlace]) -> Iterator[Sequence[PacketPlace]]:
        return (places[start : start + self._batch] for start in range(0, len(places), self._batch))

    def _tombstone(self, place: PacketPlace, now: int) -> bytes:
        stone = Tombstone(place.packet_id, place.sequence, place.received_at, now, self._signer.did)
        return sign_tombstone(stone, self._signer)


async def _known(connection: asyncpg.Connection, places: Sequence[PacketPlace], of_rows: str) -> KnownPlaces:
    sequences = [place.sequence for place in places]
    ids = [_digest(place) for place in places]
    head = await connection.fetchval(HEAD)
    partitions = await connection.fetch(_PARTITIONS)
    days, generations = (
        [(first, end) for parent, first, end in partitions if parent == name]
        for name in ("packets", "packet_ids")
    )
    known = KnownPlaces(
        head,
        dropped_to=_kept_to(days),
        begins=min((first for first, _ in days if first is not None), default=None),
        ids_dropped_to=_kept_to(generations),
        generations=[(first, end) for first, end in generations if first is not None],
    )
    for sequence, received_at, packet_id, *rest in await connection.fetch(of_rows, sequences, SPARED):
        known.rows[sequence] = Row(packet_id, received_at, *rest)
    for packet_id, sequence in await connection.fetch(_BURIED, ids, sequences):
        _bury(known, told_place(packet_id, 0)[0], sequence)
    for packet_id, sequence, received_at in await connection.fetch(_IDS, ids):
        known.ids.setdefault(f"0x{packet_id.hex()}", set()).add((sequence, received_at))
    return known


def _kept_to(ranges: Sequence[tuple[int | None, int]]) -> int:
    """The end of the partition that has no beginning: of what was dropped, it keeps what retention spares."""
    return next((end for first, end in ranges if first is None), 0)


def _judged(places: Sequence[PacketPlace], known: KnownPlaces, done: PlacesErased) -> list[Fate]:
    """The fate of each place, counted in `done`."""
    fates = []
    for place in places:
        fate, why = judge(place, known)
        match fate:
            case Fate.ERASE:
                done.erased += 1
            case Fate.BURY:
                done.dropped += 1
            case Fate.ALREADY:
                done.already += 1
            case Fate.SPARE:
                done.spared += 1
            case Fate.REFUSE:
                done.refused += 1
                if len(done.refusals) < _MAX_REFUSALS:
                    done.refusals.append(RefusedPlace(place.packet_id, place.sequence, why))
        if fate in (Fate.ERASE, Fate.BURY):  # the next places are judged as after this one
            _bury(known, place.packet_id, place.sequence)
        fates.append(fate)
    return fates


def _bury(known: KnownPlaces, name: str, sequence: int) -> None:
    known.buried[name] = sequence
    known.tombstones[sequence] = name


async def _write(
    connection: asyncpg.Connection,
    places: Sequence[PacketPlace],
    stones: Sequence[bytes],
    fates: Sequence[Fate],
    known: KnownPlaces,
    ruling: Ruling,
    now: int,
) -> None:
    """Write the tombstones of a batch, empty the rows, record the ids and the rulings."""
    taken = [
        (place, stone)
        for place, stone, fate in zip(places, stones, fates, strict=True)
        if fate in (Fate.ERASE, Fate.BURY)
    ]
    if not taken:
        return
    sequences = [place.sequence for place, _ in taken]
    ids = [row.packet_id if (row := known.rows.get(place.sequence)) else _digest(place) for place, _ in taken]
    await connection.execute(
        PUT_TOMBSTONES, ids, sequences, [now] * len(taken), [stone for _, stone in taken]
    )
    await connection.execute(EMPTY_ROWS, [sequence for sequence in sequences if sequence in known.rows])
    # Nothing is recorded of days before the log's: the duplicate index has no partition for these.
    forgotten = {
        place.packet_id: place  # the first place of each id
        for place, _ in reversed(taken)
        if place.packet_id not in known.ids
        and (place.sequence < known.dropped_to or place.sequence in known.rows)
    }
    await connection.execute(
        _REMEMBER,
        [_digest(place) for place in forgotten.values()],
        [place.sequence for place in forgotten.values()],
        [place.received_at for place in forgotten.values()],
    )
    await take_turn(connection)
    subjects = [place.packet_id for place, _ in taken]
    await write_all(connection, ruling, subjects, Act.ERASE, now)
    await ring(connection)


def _digest(place: PacketPlace) -> bytes:
    return bytes.fromhex(place.packet_id[2:])
