"""The received segments of one sending, and their payload once they suffice (C-203, C-215)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from Crypto.Hash import keccak

from strata.channels.segmentation.messages import Segment, message_hash
from strata.channels.segmentation.parity import SHARD_MULTIPLE, ParityCodec

__all__ = ["Instance", "assemble"]

_MAX_TRIMMED_ZEROS = 4096
"""The most zeros at a payload's end that are distinguished from padding without `original_length` (C-215)."""
_MAX_HASHED_BYTES = 64 << 20
"""The most bytes hashed in search of an unknown segment size."""


class Instance:
    """The received segments of one sending; once finished, only the indices of the segments still to come."""

    __slots__ = (
        "_awaited",
        "data_count",
        "first_received_at",
        "held_bytes",
        "message_hash",
        "message_ids",
        "number",
        "original_length",
        "parity_count",
        "parity_failed",
        "recovered",
        "request_id",
        "segments",
        "sender_id",
        "touched_at",
    )

    def __init__(self, number: int, sender_id: str, segment: Segment, now: int) -> None:
        self.number = number
        self.sender_id = sender_id
        self.message_hash = segment.entire_message_hash
        self.request_id = segment.request_id
        self.data_count = segment.data_segment_count
        self.parity_count = segment.parity_segment_count
        self.original_length: int | None = None
        self.first_received_at = now
        self.touched_at = now
        self.message_ids: list[str] = []
        self.segments: dict[int, bytes] = {}
        self.held_bytes = 0
        self.parity_failed = False
        self.recovered = False
        self._awaited: set[int] | None = None

    @property
    def finished(self) -> bool:
        """Whether the message was reassembled, so that only late segments are awaited."""
        return self._awaited is not None

    @property
    def complete(self) -> bool:
        """Whether there are enough segments to try to reassemble the message."""
        enough = len(self.segments) >= self.data_count
        return enough and not (self.parity_failed and self.missing)

    @property
    def missing(self) -> tuple[int, ...]:
        """The indices of the data segments that have not come."""
        return tuple(index for index in range(self.data_count) if index not in self.segments)

    @property
    def awaited(self) -> tuple[int, ...]:
        """The indices of all segments that have not come, data first."""
        return tuple(index for index in range(self.data_count + self.parity_count) if self.lacks(index))

    def lacks(self, index: int) -> bool:
        """Whether this segment has not come yet."""
        return index not in self.segments if self._awaited is None else index in self._awaited

    def agrees(self, segment: Segment) -> bool:
        """Whether a segment has the same counts (C-200)."""
        counts = (segment.data_segment_count, segment.parity_segment_count)
        return counts == (self.data_count, self.parity_count)

    def add(self, message_id: str, segment: Segment, now: int) -> None:
        """Add a segment that the instance lacks."""
        if self._awaited is not None:
            self._awaited.discard(segment.index)
            return
        self.segments[segment.index] = segment.payload
        self.message_ids.append(message_id)
        self.held_bytes += len(segment.payload)
        self.touched_at = now
        self.original_length = self.original_length or segment.original_length

    def finish(self, awaited: Iterable[int], now: int) -> None:
        """Drop the bytes, and await only these segments from now on."""
        self._awaited = set(awaited)
        self.segments = {}
        self.message_ids = []
        self.held_bytes = 0
        self.touched_at = now


def assemble(instance: Instance, codec: ParityCodec | None) -> bytes | None:
    """The payload, verified against its hash (C-204); None if the segments do not yield it."""
    if not instance.missing:
        payload = b"".join(instance.segments[index] for index in range(instance.data_count))
        return payload if message_hash(payload) == instance.message_hash else None
    if codec is None or instance.parity_failed:
        return None
    recovered = _recover(instance, codec)
    # One failure is enough: a try with another parity segment costs as much and would hardly help.
    instance.parity_failed = recovered is None
    instance.recovered = recovered is not None
    return recovered


def _recover(instance: Instance, codec: ParityCodec) -> bytes | None:
    count = instance.data_count
    data = {index: payload for index, payload in instance.segments.items() if index < count}
    parity = {index - count: payload for index, payload in instance.segments.items() if index >= count}
    widths = {len(payload) for payload in parity.values()}
    width = widths.pop()
    if widths or width % SHARD_MULTIPLE or any(len(payload) > width for payload in data.values()):
        return None
    padded = {index: payload.ljust(width, b"\x00") for index, payload in data.items()}  # C-214
    try:
        restored = codec.recover(count, instance.parity_count, padded, parity)
    except ValueError:
        return None
    if any(index not in data and index not in restored for index in range(count)):
        return None
    for size in _segment_sizes(count, width, data):
        payload = _joined(instance, size, data, restored)
        if payload is not None:
            return payload
    return None


def _segment_sizes(count: int, width: int, data: Mapping[int, bytes]) -> Iterator[int]:
    """The possible lengths of all segments but the last: a received one's, else all that pad to a shard."""
    full = {len(payload) for index, payload in data.items() if index < count - 1}
    if full or count == 1:
        yield from full or {width}
        return
    tries = max(1, min(SHARD_MULTIPLE, _MAX_HASHED_BYTES // (width * count)))
    yield from range(width, width - tries, -1)


def _joined(
    instance: Instance, size: int, data: Mapping[int, bytes], restored: Mapping[int, bytes]
) -> bytes | None:
    last = instance.data_count - 1
    front = b"".join(data.get(index) or restored[index][:size] for index in range(last))
    if last in data:
        payload = front + data[last]
    elif instance.original_length is not None:
        payload = front + restored[last][: max(0, instance.original_length - len(front))]
    else:
        return _trimmed(front + restored[last], len(front) + 1, instance.message_hash)
    return payload if message_hash(payload) == instance.message_hash else None


def _trimmed(padded: bytes, at_least: int, wanted: bytes) -> bytes | None:
    """`padded` without the zeros at its end that are padding according to the hash (C-215)."""
    length = max(len(padded.rstrip(b"\x00")), at_least)
    digest = keccak.new(digest_bits=256, data=padded[:length], update_after_digest=True)
    for _ in range(_MAX_TRIMMED_ZEROS):
        if digest.digest() == wanted:
            return padded[:length]
        if length == len(padded):
            return None
        # The hash continues by one zero, so a try costs one block and not the whole payload.
        digest.update(b"\x00")
        length += 1
    return None
