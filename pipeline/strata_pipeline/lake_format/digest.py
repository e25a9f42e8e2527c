"""The digests of rows in a manifest: a hash over their places and ids, in the order of the log.

    row     = sequence ‖ received_at ‖ packet_id      8 and 8 bytes, signed, big endian; 32 bytes
    digest  = BLAKE3-256 of the rows, one after the other

A packet's id is the hash of what its author signed, so this binds the packets themselves; whether their
signatures verify is a separate check. A packet_id that is not 32 bytes long, which only a damaged row has, is
replaced by its own hash.

A second digest binds what an id does not: the signature in a body, the relay's findings
about the origin of media, and every column of a row that is not a packet.

    record  = sequence ‖ H(body) ‖ H(annotation) ‖ others      8 bytes, signed, big endian, and 3 × 32 bytes
    digest  = BLAKE3-256 of the records, one after the other

H is BLAKE3-256, or 32 zero bytes for NULL. `others` is 32 zero bytes for a packet, whose other columns are
all determined by its body; for a quarantined row it is the hash of its other columns (`others_hash`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blake3 import blake3

__all__ = ["NOTHING", "OTHERS", "ContentsDigest", "RowsDigest", "contents_bytes", "others_hash", "row_bytes"]

_ID_BYTES = 32

NOTHING = bytes(32)
"""The hash used for NULL: nobody can find bytes with this hash."""

OTHERS = (
    "received_at",
    "timestamp",
    "expires_at",
    "packet_id",
    "author_id",
    "content_type",
    "size",
    "reason",
    "detail",
)
"""The other columns of a quarantined row, in the order in which they are hashed."""


class RowsDigest:
    """The digest of rows that are added step by step, in log order."""

    def __init__(self) -> None:
        self._hash = blake3()
        self.rows = 0
        """The number of rows so far."""

    def update(self, rows: Iterable[tuple[int, int, bytes]]) -> None:
        """Add rows (sequence, received_at, packet_id) after those added before."""
        parts = [row_bytes(*row) for row in rows]
        self.update_bytes(b"".join(parts), len(parts))

    def update_bytes(self, joined: bytes, rows: int) -> None:
        """Add `rows` rows, joined in the form above."""
        self._hash.update(joined)
        self.rows += rows

    def hexdigest(self) -> str:
        """64 lowercase hex digits."""
        return self._hash.hexdigest()


class ContentsDigest:
    """The second digest, of rows that are added step by step, in log order."""

    def __init__(self) -> None:
        self._hash = blake3()

    def update(self, rows: Iterable[tuple[int, bytes | None, bytes | None, bytes]]) -> None:
        """Add rows (sequence, body, annotation, others) after those added before."""
        self.update_bytes(b"".join(contents_bytes(*row) for row in rows))

    def update_bytes(self, joined: bytes) -> None:
        """Add records, joined in the form above."""
        self._hash.update(joined)

    def hexdigest(self) -> str:
        """64 lowercase hex digits."""
        return self._hash.hexdigest()


def row_bytes(sequence: int, received_at: int, packet_id: bytes) -> bytes:
    """One row in the hashed form, 48 bytes."""
    if len(packet_id) != _ID_BYTES:
        packet_id = blake3(packet_id).digest()
    places = sequence.to_bytes(8, "big", signed=True) + received_at.to_bytes(8, "big", signed=True)
    return places + packet_id


def contents_bytes(
    sequence: int, body: bytes | None, annotation: bytes | None, others: bytes = NOTHING
) -> bytes:
    """One row in the form of the second digest, 104 bytes."""
    return sequence.to_bytes(8, "big", signed=True) + _hash(body) + _hash(annotation) + others


def others_hash(row: Mapping[str, int | str | bytes | None]) -> bytes:
    """The hash of a quarantined row's other columns.

    For each of `OTHERS` the hashed text has a byte 0 for NULL, or else a byte 1, the length in 8 bytes, and
    the value: a number in 8 bytes, signed, big endian; a string in UTF-8.
    """
    hashed = blake3()
    for name in OTHERS:
        value = row[name]
        if value is None:
            hashed.update(b"\0")
            continue
        if isinstance(value, int):
            value = value.to_bytes(8, "big", signed=True)
        elif isinstance(value, str):
            value = value.encode()
        hashed.update(b"\1" + len(value).to_bytes(8, "big") + value)
    return hashed.digest()


def _hash(value: bytes | None) -> bytes:
    return NOTHING if value is None else blake3(value).digest()
