"""Manifests: one for each batch of the archive, each containing the hash of the previous one. No I/O.

A batch is part of the lake once its manifest exists, and not before. The chain states what the lake must
hold: which sequences, how many packets, in `rows` a hash over every id in its place, from format 2 on, in
`contents`, a hash over every body and annotation, and from format 3 on, in `witnesses`, the hash of the file
that says when other relays first received packets. With the hash of the last manifest, anyone can prove later
that nothing before it was changed.

A chain may continue in a later format, but not in an earlier one. It enters format 3 with its first batch
that has witnesses, so a lake without peers stays one of format 2, which older programs read. `migrated` makes
a manifest of format 2 from one of format 1 and `as_format_1` reverses that, so that hashes noted before a
migration still prove what they proved.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from strata.protocol.errors import InvalidInput
from strata.protocol.lake.sealing import LakeError, hash_of, refuse, text_of
from strata.protocol.lake.sequences import Span, first_of_day

__all__ = [
    "FORMAT",
    "FORMATS",
    "GENESIS",
    "WITNESSED",
    "ChainEnd",
    "Manifest",
    "as_format_1",
    "check_chain",
    "decode",
    "encode",
    "manifests_of_day",
    "migrated",
    "seal",
]

FORMAT = 2
"""The version in which this program begins a chain, and continues one of an earlier version."""

FORMATS = (1, 2, 3)
"""The versions that it reads."""

GENESIS = "0" * 64
"""The hash of the previous manifest in the first one."""

WITNESSED = 3
"""The first version with witnesses."""

_is_hash = re.compile(r"[0-9a-f]{64}").fullmatch


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one batch added to the lake."""

    format: int = 1
    """1, 2 with `contents`, or 3 with `witnesses` as well."""
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
    contents: str = ""
    """Format 2: the digest of the rows' bodies and annotations, and of all columns of a quarantined row. A
    file of format 1 does not have it."""
    witnesses: str = ""
    """Format 3: the hash of the file with the times at which other relays first received rows of this batch
    (see `witnesses`); empty if no row has such a time. A file of an earlier format does not have it."""
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
    return msgspec.structs.replace(manifest, hash=hash_of(_members(manifest)))


def encode(manifest: Manifest) -> bytes:
    """The text of its file."""
    return text_of(_members(manifest))


def decode(text: bytes, name: str) -> Manifest:
    """Read one manifest. Raises `LakeError` with this `name` if it is damaged or of another version."""
    try:
        head = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise LakeError(f"{name} is damaged: it is not JSON") from None
    version = head.get("format") if type(head) is dict else None
    if type(version) is not int or version not in FORMATS:
        known = ", ".join(map(str, FORMATS[:-1])) + f" and {FORMATS[-1]}"
        refuse(
            name, f"its format is {version!r} and this program knows {known}: use the program that wrote it"
        )
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.ValidationError as error:
        refuse(name, f"it is damaged: {error}")
    if (manifest.format > 1) != bool(manifest.contents):
        refuse(name, "it is damaged: `contents` belongs to format 2 and later ones, and only there")
    if (manifest.format >= WITNESSED) != ("witnesses" in head):
        refuse(name, "it is damaged: `witnesses` belongs to format 3, and only there")
    if manifest.witnesses and _is_hash(manifest.witnesses) is None:  # it is a part of a file's name
        refuse(name, "it is damaged: `witnesses` is not a hash")
    try:
        recomputed = hash_of(_members(manifest))
    except InvalidInput:  # a number outside the range of JSON
        recomputed = ""
    if manifest.hash != recomputed:
        refuse(name, "it was changed after it was written: its hash does not recompute")
    return manifest


class ChainEnd(NamedTuple):
    """The end of a chain, which its next manifest must follow; without arguments, that of the empty chain."""

    number: int = 0
    """The number of the next manifest."""
    tip: str = GENESIS
    up_to: int = 0
    format: int = 1

    def format_of_next(self, witnesses: str) -> int:
        """The format of the next manifest, whose batch has these `witnesses`."""
        return max(FORMAT, self.format, WITNESSED if witnesses else FORMAT)


def check_chain(manifests: Iterable[Manifest], before: ChainEnd = ChainEnd()) -> ChainEnd:  # noqa: B008
    """Raise `LakeError` unless these are the manifests that follow `before`, each bound to the previous one.

    Returns the new end of the chain. Each manifest is read once, in order, so they may be a stream.
    """
    first, previous, after, version = before
    number = first - 1
    for number, manifest in enumerate(manifests, first):
        name = f"manifest {manifest.number}"
        if manifest.number != number:
            refuse(f"manifest {number}", "it is missing, and those after it prove that it was there")
        if manifest.previous != previous:
            refuse(name, f"it does not follow manifest {number - 1}: one of the two was replaced")
        if manifest.after != after or manifest.up_to <= after:
            refuse(name, f"it begins behind sequence {manifest.after}, and the one before ended at {after}")
        if manifest.format < version:
            refuse(name, f"it is of format {manifest.format}, and the one before of format {version}")
        previous, after, version = manifest.hash, manifest.up_to, manifest.format
    return ChainEnd(number + 1, previous, after, version)


def manifests_of_day(manifests: Sequence[Manifest], day: int) -> list[Manifest]:
    """The manifests of a checked chain whose packets were received on a day."""
    first, end = (
        bisect.bisect_left(manifests, first_of_day(one), key=lambda manifest: manifest.up_to)
        for one in (day, day + 1)
    )
    return list(manifests[first:end])


def migrated(manifest: Manifest, contents: str, previous: str) -> Manifest:
    """A manifest of format 1, converted to format 2 and sealed, after the one with the hash `previous`; one
    of a later format keeps its format."""
    version = max(FORMAT, manifest.format)
    return seal(msgspec.structs.replace(manifest, format=version, contents=contents, previous=previous))


def as_format_1(manifest: Manifest, previous: str) -> Manifest:
    """The manifest that was passed to `migrated`, after the one with the hash `previous` in format 1."""
    return seal(msgspec.structs.replace(manifest, format=1, contents="", previous=previous))


def _members(manifest: Manifest) -> dict[str, object]:
    members: dict[str, object] = msgspec.to_builtins(manifest)
    if manifest.format == 1:
        del members["contents"]
    if manifest.format < WITNESSED:
        del members["witnesses"]
    return members
