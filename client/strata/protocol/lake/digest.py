"""What a manifest says about rows: a hash over their places and ids, in the order of the log.

    row     = sequence ‖ received_at ‖ packet_id      8 and 8 bytes, signed, big endian; 32 bytes
    digest  = BLAKE3-256 of the rows, one after the other

A packet's id is the hash of what its author signed, so this binds the packets themselves; whether their
signatures hold is asked apart. A packet_id that is not 32 bytes long, which only a damaged row has, is
replaced by its own hash.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

__all__ = ["RowsDigest", "row_bytes"]

_ID_BYTES = 32


class RowsDigest:
    """The digest of rows that come bit by bit, in log order."""

    def __init__(self) -> None:
        self._hash = blake3()
        self.rows = 0
        """How many there were."""

    def update(self, rows: Iterable[tuple[int, int, bytes]]) -> None:
        """Add (sequence, received_at, packet_id); they follow those before."""
        parts = [row_bytes(*row) for row in rows]
        self.update_bytes(b"".join(parts), len(parts))

    def update_bytes(self, joined: bytes, rows: int) -> None:
        """Add that many rows in the form above."""
        self._hash.update(joined)
        self.rows += rows

    def hexdigest(self) -> str:
        """64 lowercase hex digits."""
        return self._hash.hexdigest()


def row_bytes(sequence: int, received_at: int, packet_id: bytes) -> bytes:
    """One row as it is hashed: 48 bytes."""
    if len(packet_id) != _ID_BYTES:
        packet_id = blake3(packet_id).digest()
    places = sequence.to_bytes(8, "big", signed=True) + received_at.to_bytes(8, "big", signed=True)
    return places + packet_id
