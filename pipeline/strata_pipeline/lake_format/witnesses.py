"""Witnesses: when the first relay received each packet that a peer brought. No I/O.

The log has this time beside the time of its own receipt (`witnessed_at`). The relay judges such a packet as
of then, and shows readers that time. The files of a lake have the relay's own time alone: a further column
would give a lake files of two schemas, which plain readers refuse, and another digest. So the times of a
batch stand in a file beside the packets, and the batch's manifest binds the file by its hash:

    sequence,witnessed_at
    85899345920001,1728000000
    …

Each line has two decimal numbers, in order of sequence, for exactly the rows of the batch that have such a
time, quarantined rows included. The times are those of the log when it was archived. A relay may learn later
that a packet was received still earlier elsewhere, and then its log says so and the lake does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from blake3 import blake3

from strata_pipeline.lake_format.manifest import Manifest
from strata_pipeline.lake_format.sealing import LakeError, refuse

__all__ = [
    "WITNESSES",
    "decode_witnesses",
    "encode_witnesses",
    "most_witnesses_bytes",
    "read_witnesses",
    "witnesses_hash",
    "witnesses_name",
]

WITNESSES = "_witnesses"
"""The folder of these files, each with the number of its manifest: `_witnesses/0000000000-<hash>.csv`."""

_HEAD = b"sequence,witnessed_at\n"
_LONGEST = 2 * len(b"-9223372036854775808,")
_LEAST, _MOST = -(2**63), 2**63 - 1


def encode_witnesses(rows: Iterable[tuple[int, int]]) -> bytes:
    """The file for rows (sequence, witnessed_at) in order of sequence; empty for no rows."""
    lines = "".join(f"{sequence},{at}\n" for sequence, at in rows)
    return _HEAD + lines.encode() if lines else b""


def most_witnesses_bytes(rows: int) -> int:
    """The most bytes of the file of a batch with so many rows."""
    return len(_HEAD) + rows * _LONGEST


def decode_witnesses(text: bytes, name: str, most_rows: int) -> list[tuple[int, int]]:
    """The rows of a file, of which there may be `most_rows`. Raises `LakeError` with this `name` for any text
    that `encode_witnesses` does not make."""
    if len(text) > most_witnesses_bytes(most_rows):
        refuse(name, f"it is too long for a batch of {most_rows} rows")
    try:
        pairs = (line.split(b",") for line in text.splitlines()[1:])
        rows = [(int(sequence), int(at)) for sequence, at in pairs]
    except ValueError:
        refuse(name, "it is damaged: a line is not a sequence and a time")
    if not rows or encode_witnesses(rows) != text:
        refuse(name, "it is damaged: it is not written as this program writes it")
    if any(one >= other for (one, _), (other, _) in pairwise(rows)):
        refuse(name, "it is damaged: its sequences do not rise")
    if not all(_LEAST <= number <= _MOST for row in rows for number in row):
        refuse(name, "it is damaged: a number is out of range")
    return rows


def witnesses_hash(text: bytes) -> str:
    """What a manifest says of a file: BLAKE3-256 of its bytes, or the empty string for an empty one."""
    return blake3(text).hexdigest() if text else ""


def witnesses_name(manifest: Manifest) -> str:
    """The name of the file of a batch that has one."""
    return f"{manifest.number:010}-{manifest.witnesses}.csv"


def read_witnesses(text: bytes, manifest: Manifest) -> Sequence[tuple[int, int]]:
    """The rows of the file of a batch, in order of sequence.

    Raises `LakeError` if the file is not the one that the manifest binds, or names a row of another batch.
    """
    name = f"{WITNESSES}/{witnesses_name(manifest)}"
    if witnesses_hash(text) != manifest.witnesses:
        raise LakeError(f"the lake's {name} was changed after it was written: its hash does not recompute")
    rows = decode_witnesses(text, name, manifest.packets + manifest.quarantined)
    if rows[0][0] <= manifest.after or rows[-1][0] > manifest.up_to:
        refuse(name, f"it names a row outside its batch, {manifest.span}")
    return rows
