"""Places of packets in a relay's log, as lines that a search of a lake writes and an erasure reads.

A place is what a tombstone says of a packet, before anybody has erased it:

    {"packet_id":"0x…","received_at":…,"sequence":…}

It tells nothing about the packet's content, type or author, so that such a list reveals no more than the
tombstones that are made from it.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.protocol import canonical
from strata.protocol.errors import ErrorCode, InvalidInput
from strata.protocol.fields import integer, is_content_id
from strata.protocol.sequences import DAY_SECONDS, day_of, day_text, first_of_day, is_day

__all__ = ["MAX_PLACE_BYTES", "PacketPlace", "place_line", "read_place"]

MAX_PLACE_BYTES: Final = 512
"""The most bytes of a line."""
_MEMBERS: Final = {"packet_id", "received_at", "sequence"}


@dataclass(frozen=True, slots=True)
class PacketPlace:
    """Where a relay's log has or had a packet. The id and the time are those of `tombstones.told_place`."""

    packet_id: str
    sequence: int
    received_at: int
    """Unix seconds, of the day that the sequence contains."""


def place_line(place: PacketPlace) -> bytes:
    """The line for a place, without its end."""
    return canonical.encode(
        {"packet_id": place.packet_id, "received_at": place.received_at, "sequence": place.sequence}
    )


def read_place(line: bytes) -> PacketPlace:
    """Read a line. Raises `InvalidInput`, which says what is wrong with it."""
    if len(line) > MAX_PLACE_BYTES:
        raise _refused(f"it is longer than {MAX_PLACE_BYTES} bytes")
    value, _ = canonical.parse(line)
    if not isinstance(value, dict) or value.keys() != _MEMBERS:
        raise _refused("it is not an object of packet_id, received_at and sequence alone")
    packet_id, received_at, sequence = (value[name] for name in sorted(_MEMBERS))
    if not isinstance(packet_id, str) or not is_content_id(packet_id):
        raise _refused("packet_id is not 0x and 64 hex digits in lower case")
    place = PacketPlace(packet_id, integer(sequence) or 0, -1 if (at := integer(received_at)) is None else at)
    day = day_of(place.sequence)
    if not is_day(day) or place.sequence <= first_of_day(day):
        raise _refused("the sequence is not a place in a log")
    if place.received_at // DAY_SECONDS != day:
        raise _refused(f"sequence is a place of {day_text(day)}, and received_at is not of that day")
    return place


def _refused(why: str) -> InvalidInput:
    return InvalidInput(ErrorCode.INVALID_SCHEMA, why)
