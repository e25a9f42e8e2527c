"""Erasures: what has been erased from a lake since its manifests were written, and why. No I/O.

A manifest states what a batch held when it was archived, and is never rewritten, so that a noted hash of the
chain keeps proving what it proved. Later erasures are recorded beside the chain. A record states what the
batches of one day hold now, and names by its hash a file of tombstones signed by the relay, one for each
erased row (`strata.protocol.tombstones`). The rows keep their sequences, times of receipt and ids, which the
manifest binds, and move from the packets to the quarantined rows.

A relay signs one tombstone for an id, and a lake may hold a packet at further places: its rows there are
erased by the same tombstone. Their lines name the place:

    {"received_at":…,"sequence":…,"tombstone":{…}}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import msgspec
from strata.protocol import canonical
from strata.protocol.errors import ErrorCode, InvalidInput
from strata.protocol.fields import integer
from strata.protocol.sequences import is_day
from strata.protocol.tombstones import Tombstone, read_tombstone

from strata_pipeline.lake_format.manifest import GENESIS, Manifest
from strata_pipeline.lake_format.sealing import read_sealed, refuse, text_of, with_hash

__all__ = [
    "ErasedBatch",
    "Erasure",
    "check_erasures",
    "decode_erasure",
    "encode_erasure",
    "line_elsewhere",
    "read_tombstone_line",
    "seal_erasure",
    "told",
]

_FORMAT = 1
_BEGINS_ELSEWHERE = b'{"received_at":'


class ErasedBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a batch holds after an erasure."""

    manifest: str
    """The hash of the batch's manifest."""
    packets: int
    quarantined: int
    contents: str
    body_bytes: int
    kinds: dict[str, int]


class Erasure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One erasure from one day of a lake."""

    format: int = _FORMAT
    number: int
    """0 for the first, and so on without a gap."""
    day: int
    """Days since 1970-01-01 UTC."""
    written_at: int
    """Unix seconds by the writer's clock. Informative."""
    batches: list[ErasedBatch]
    tombstones: str
    """BLAKE3-256 of the file of tombstones: a line for each row, in canonical form and in order of sequence,
    and a newline."""
    erased: int
    """The number of packets erased: one for each tombstone, except those of rows that were already
    quarantined when they were archived. Of an erased row only the place remains."""
    previous: str
    """The hash of the previous record, `GENESIS` for the first."""
    hash: str = ""
    """BLAKE3-256 of the canonical JSON of all the above."""


def seal_erasure(erasure: Erasure) -> Erasure:
    """The record with its hash."""
    return with_hash(erasure)


def encode_erasure(erasure: Erasure) -> bytes:
    """The text of its file."""
    return text_of(erasure)


def decode_erasure(text: bytes, name: str) -> Erasure:
    """Read one record. Raises `LakeError` with this `name` if it is damaged or of another version."""
    erasure = read_sealed(text, Erasure, _FORMAT, name)
    if not is_day(erasure.day):
        refuse(name, f"{erasure.day} is not a day")
    return erasure


def check_erasures(erasures: Iterable[Erasure]) -> None:
    """Raise `LakeError` unless these are all records from the first, each bound to the previous one."""
    previous = GENESIS
    for number, erasure in enumerate(erasures):
        if (erasure.number, erasure.previous) != (number, previous):
            refuse(f"erasure {number}", "it is missing, or does not follow the one before")
        previous = erasure.hash


def line_elsewhere(tombstone: bytes, sequence: int, received_at: int) -> bytes:
    """The line for a row with the id of a tombstone, given as its text, at another place than that names.

    The time of receipt is that of `strata.protocol.tombstones.told_place`.
    """
    told, _ = canonical.parse(tombstone)
    return canonical.encode({"received_at": received_at, "sequence": sequence, "tombstone": told})


def read_tombstone_line(line: bytes) -> tuple[Tombstone, bytes]:
    """The tombstone in a line of a record's file, with the place of the row that it stands for; and its text,
    which is empty if the tombstone itself names another place.

    Raises `InvalidInput` for a line that does not hold a tombstone with a valid signature.
    """
    if not line.startswith(_BEGINS_ELSEWHERE):
        return read_tombstone(line), line
    value, _ = canonical.parse(line)
    members = value if isinstance(value, dict) else {}
    sequence, received_at = integer(members.get("sequence")), integer(members.get("received_at"))
    if len(members) != 3 or sequence is None or received_at is None:
        raise InvalidInput(ErrorCode.INVALID_SCHEMA, "not a tombstone with a place")
    tombstone = read_tombstone(canonical.encode(members.get("tombstone")))
    return dataclasses.replace(tombstone, sequence=sequence, received_at=received_at), b""


def told(manifests: Iterable[Manifest], erasures: Sequence[Erasure]) -> list[Manifest]:
    """These manifests, updated to what their batches hold now. Their hashes remain those of the chain.

    Raises `LakeError` for a record that contradicts its manifest.
    """
    now = {batch.manifest: batch for erasure in erasures for batch in erasure.batches}
    return [_told(manifest, now.get(manifest.hash)) for manifest in manifests]


def _told(manifest: Manifest, batch: ErasedBatch | None) -> Manifest:
    if batch is None:
        return manifest
    if (
        batch.packets + batch.quarantined != manifest.packets + manifest.quarantined
        or batch.packets > manifest.packets
    ):
        refuse(f"erasure of manifest {manifest.number}", "it tells of other rows than the manifest")
    return msgspec.structs.replace(
        manifest,
        packets=batch.packets,
        quarantined=batch.quarantined,
        contents=batch.contents,
        body_bytes=batch.body_bytes,
        kinds=batch.kinds,
    )
