"""Manifests: one for each batch of the archive, each containing the hash of the previous one. No I/O.

A batch is part of the lake once its manifest exists, and not before. The chain states what the lake must
hold: which sequences, how many packets, in `rows` a hash over every id in its place, in `contents` a hash
over every body and annotation, and in `witnesses` the hash of the file that says when other relays first
received packets. With the hash of the last manifest, anyone can prove later that nothing before it was
changed.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from strata.protocol.sequences import Span, first_of_day

from strata_pipeline.lake_format.sealing import read_sealed, refuse, text_of, with_hash

__all__ = [
    "FORMAT",
    "GENESIS",
    "ChainEnd",
    "Manifest",
    "check_chain",
    "decode",
    "encode",
    "manifests_of_day",
    "seal",
]

FORMAT = 3
"""The version of manifests that this program writes and reads."""

GENESIS = "0" * 64
"""The hash of the previous manifest in the first one."""

_is_hash = re.compile(r"[0-9a-f]{64}").fullmatch


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one batch added to the lake."""

    format: int = FORMAT
    number: int
    """0 for the first, and so on without a gap."""
    after: int
    """Where the previous batch ended; this one's sequences are `after < sequence <= up_to`, of one day."""
    up_to: int
    packets: int
    """Rows under `packets/`."""
    quarantined: int
    """Rows under `quarantine/`: rows of the log that are not valid packets."""
    rows: str
    """The digest of all these rows in log order (see `digest`)."""
    contents: str
    """The digest of the rows' bodies and annotations, and of all columns of a quarantined row."""
    witnesses: str = ""
    """The hash of the file with the times at which other relays first received rows of this batch (see
    `witnesses`); empty if no row has such a time."""
    body_bytes: int
    kinds: dict[str, int]
    """Packets by folder."""
    last_packet_id: str
    """In hex; identifies the log."""
    last_received_at: int
    written_at: int
    """Unix seconds by the writer's clock. Informative."""
    previous: str
    """The hash of the previous manifest, `GENESIS` for the first."""
    hash: str = ""
    """BLAKE3-256 of the canonical JSON of all the above."""

    @property
    def span(self) -> Span:
        """The sequences of the batch."""
        return Span(self.after, self.up_to)


def seal(manifest: Manifest) -> Manifest:
    """The manifest with its hash."""
    return with_hash(manifest)


def encode(manifest: Manifest) -> bytes:
    """The text of its file."""
    return text_of(manifest)


def decode(text: bytes, name: str) -> Manifest:
    """Read one manifest. Raises `LakeError` with this `name` if it is damaged or of another version."""
    manifest = read_sealed(text, Manifest, FORMAT, name)
    if manifest.witnesses and _is_hash(manifest.witnesses) is None:  # it is a part of a file's name
        refuse(name, "it is damaged: `witnesses` is not a hash")
    return manifest


class ChainEnd(NamedTuple):
    """The end of a chain, which its next manifest must follow; without arguments, that of the empty chain."""

    number: int = 0
    """The number of the next manifest."""
    tip: str = GENESIS
    up_to: int = 0


def check_chain(manifests: Iterable[Manifest], before: ChainEnd = ChainEnd()) -> ChainEnd:  # noqa: B008
    """Raise `LakeError` unless these are the manifests that follow `before`, each bound to the previous one.

    Returns the new end of the chain. Each manifest is read once, in order, so they may be a stream.
    """
    first, previous, after = before
    number = first - 1
    for number, manifest in enumerate(manifests, first):
        name = f"manifest {manifest.number}"
        if manifest.number != number:
            refuse(f"manifest {number}", "it is missing, and those after it prove that it was there")
        if manifest.previous != previous:
            refuse(name, f"it does not follow manifest {number - 1}: one of the two was replaced")
        if manifest.after != after or manifest.up_to <= after:
            refuse(name, f"it begins behind sequence {manifest.after}, and the one before ended at {after}")
        previous, after = manifest.hash, manifest.up_to
    return ChainEnd(number + 1, previous, after)


def manifests_of_day(manifests: Sequence[Manifest], day: int) -> list[Manifest]:
    """The manifests of a checked chain whose packets were received on a day."""
    first, end = (
        bisect.bisect_left(manifests, first_of_day(one), key=lambda manifest: manifest.up_to)
        for one in (day, day + 1)
    )
    return list(manifests[first:end])
