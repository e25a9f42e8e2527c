"""Negentropy, version 1: compares two sets of packets at a cost that depends on how much they differ.

Both sides hold items, each a timestamp and an id, sorted in that order. The initiator sends ranges of its set
with a fingerprint for each. If a fingerprint differs, the responder answers with the fingerprints of the
sixteenths of the range, or with all its ids if they are few:

    initiator                          responder
    initiate() ──── ranges ──────────▶ respond()
    receive()  ◀─── ranges that differ, split; or ids
               ──── … ───────────────▶                until nothing differs: `receive` returns no message

    Message := 0x61 Range*      Range := Bound mode payload      Bound := timestamp prefix
    mode 0: skip                mode 1: fingerprint              mode 2: all ids of the range

Both roles are byte-compatible with hoytech/negentropy `docs/negentropy-protocol-v1.md`. The cost of a peer's
message is bounded by its length: no count in it is trusted before the bytes are present.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, NamedTuple

from strata.protocol.errors import StrataError

__all__ = [
    "ID_BYTES",
    "MIN_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "Compared",
    "ItemSet",
    "NegentropyError",
    "Reconciler",
]

PROTOCOL_VERSION: Final = 0x61
ID_BYTES: Final = 32
MIN_FRAME_BYTES: Final = 4096
"""The smallest limit that `max_frame_bytes` may set."""

_FINGERPRINT_BYTES = 16
_SKIP, _FINGERPRINT, _IDS = range(3)
_BUCKETS = 16
_SPARE_BYTES = 200
"""The bytes left free below a frame's limit: room for the range that covers the remaining items."""
_STRIDE = 64
_MODULUS = 1 << 256
_INFINITY: Final = (1 << 64) - 1
_END: Final = (_INFINITY, b"")
_MOST_DIGITS = 10


_Item = tuple[int, bytes]


class NegentropyError(StrataError, ValueError):
    """The bytes are not a message of this protocol."""


class ItemSet:
    """The items of one side, sorted: timestamps from 0 to 2⁶⁴ − 2, ids of 32 bytes, no item twice.

    Raises `ValueError` for anything else. A sum is kept for every 64th item, so that the fingerprint of a
    range of any length costs at most 128 additions.
    """

    def __init__(self, items: Iterable[_Item]) -> None:
        self._items = sorted(items)
        before: _Item | None = None
        self._sums = [0]
        total = 0
        for count, item in enumerate(self._items, 1):
            timestamp, packet_id = item
            if not 0 <= timestamp < _INFINITY or len(packet_id) != ID_BYTES or item == before:
                raise ValueError("an item is a timestamp and 32 bytes, and there once")
            before = item
            total += int.from_bytes(packet_id, "little")
            if count % _STRIDE == 0:
                total %= _MODULUS
                self._sums.append(total)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> _Item:
        return self._items[index]

    def ids(self, lower: int, upper: int) -> list[bytes]:
        """The ids of a range of positions."""
        return [item[1] for item in self._items[lower:upper]]  # items before `lower` are not visited

    def position(self, bound: _Item, lower: int) -> int:
        """The first position from `lower` on whose item is not less than the bound."""
        return bisect_left(self._items, bound, lower)

    def fingerprint(self, lower: int, upper: int) -> bytes:
        """The fingerprint of the ids of a range of positions."""
        total = (self._sum(upper) - self._sum(lower)) % _MODULUS
        data = total.to_bytes(ID_BYTES, "little") + _varint(upper - lower)
        return hashlib.sha256(data).digest()[:_FINGERPRINT_BYTES]

    def _sum(self, upper: int) -> int:
        """The sum of all ids before a position."""
        whole = upper // _STRIDE
        rest = self.ids(whole * _STRIDE, upper)
        return self._sums[whole] + sum(int.from_bytes(packet_id, "little") for packet_id in rest)


class Compared(NamedTuple):
    """What the initiator learns from one message of the responder."""

    message: bytes | None
    """The message to send next; None if the comparison is complete."""
    have: list[bytes]
    """Ids that this side has and the other does not."""
    need: list[bytes]
    """Ids that the other side has and this one does not."""


class _Writer:
    """A message being written. A timestamp is written as its difference from the previous one."""

    def __init__(self) -> None:
        self.data = bytearray([PROTOCOL_VERSION])
        self._timestamp = 0

    def mark(self) -> tuple[int, int]:
        """The place to which `undo` returns."""
        return len(self.data), self._timestamp

    def undo(self, mark: tuple[int, int]) -> None:
        """Remove everything added since `mark`."""
        length, self._timestamp = mark
        del self.data[length:]

    def range(self, bound: _Item, mode: int, payload: bytes = b"") -> None:
        """Add a range that ends before `bound`."""
        timestamp, prefix = bound
        if timestamp == _INFINITY:
            self.data += b"\0"
        else:
            self.data += _varint(timestamp - self._timestamp + 1)
            self._timestamp = timestamp
        self.data += _varint(len(prefix)) + prefix + _varint(mode) + payload


class _MessageReader:
    """A message being read. Raises `NegentropyError` if it ends too soon or is malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 1
        self._timestamp = 0

    @property
    def has_more(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise NegentropyError("the message ends too soon")
        self._at += count
        return taken

    def number(self) -> int:
        value = 0
        for _ in range(_MOST_DIGITS):
            (digit,) = self.take(1)
            value = value << 7 | digit & 127
            if digit < 128:
                return value
        raise NegentropyError("a number is too long")

    def bound(self) -> _Item:
        number = self.number()
        if number == 0 or self._timestamp == _INFINITY:
            self._timestamp = _INFINITY
        else:
            self._timestamp = min(self._timestamp + number - 1, _INFINITY)
        length = self.number()
        if length > ID_BYTES:
            raise NegentropyError("a bound is longer than an id")
        return self._timestamp, self.take(length)

    def id_list(self) -> list[bytes]:
        data = self.take(self.number() * ID_BYTES)
        return [data[at : at + ID_BYTES] for at in range(0, len(data), ID_BYTES)]


class Reconciler:
    """One side of one comparison.

    `max_frame_bytes` bounds each message; 0 sets no bound, and less than `MIN_FRAME_BYTES` raises
    `ValueError`. `shift` moves the borders between sixteenths and should be different each time: otherwise an
    attacker who can choose ids whose sums agree could hide a difference permanently. The other side need not
    know it.
    """

    def __init__(self, items: ItemSet, *, max_frame_bytes: int = 0, shift: int = 0) -> None:
        if 0 < max_frame_bytes < MIN_FRAME_BYTES:
            raise ValueError(f"a frame has at least {MIN_FRAME_BYTES} bytes")
        self._items = items
        self._max_bytes = max_frame_bytes
        self._shift = shift

    def initiate(self) -> bytes:
        """The first message."""
        writer = _Writer()
        self._split(writer, 0, len(self._items), _END)
        return bytes(writer.data)

    def respond(self, message: bytes) -> bytes:
        """The answer to a message of the initiator. Raises `NegentropyError`.

        A message of another version is answered with the version that this side supports.
        """
        if _version(message) != PROTOCOL_VERSION:
            return bytes([PROTOCOL_VERSION])
        return self._answer(message, None)

    def receive(self, message: bytes) -> Compared:
        """Take the responder's answer. Raises `NegentropyError`."""
        if _version(message) != PROTOCOL_VERSION:
            raise NegentropyError(f"the other side speaks version {message[0] - 0x60}")
        compared = Compared(None, [], [])
        answer = self._answer(message, compared)
        return compared if len(answer) == 1 else compared._replace(message=answer)

    def _answer(self, message: bytes, compared: Compared | None) -> bytes:
        items, reader, writer = self._items, _MessageReader(message), _Writer()
        lower, before = 0, (0, b"")
        is_skipping = False
        while reader.has_more:
            bound, mode = reader.bound(), reader.number()
            upper = items.position(bound, lower)
            if mode == _FINGERPRINT:
                differs = reader.take(_FINGERPRINT_BYTES) != items.fingerprint(lower, upper)
            elif mode == _IDS:
                theirs = reader.id_list()
                differs = compared is None  # the initiator needs the responder's ids
                if compared is not None:
                    _compare(compared, items.ids(lower, upper), theirs)
            elif mode == _SKIP:
                differs = False
            else:
                raise NegentropyError(f"{mode} is not a mode")
            if differs:
                if is_skipping:
                    writer.range(before, _SKIP)
                mark = writer.mark()
                if mode == _IDS:
                    upper = self._list(writer, lower, upper, bound)
                else:
                    self._split(writer, lower, upper, bound)
                    if self._is_full(writer):
                        writer.undo(mark)
                        upper = lower  # this range is sent again, as part of the remaining items
                is_cut = upper < items.position(bound, lower)
                if is_cut or self._is_full(writer):
                    writer.range(_END, _FINGERPRINT, items.fingerprint(upper, len(items)))
                    break
            is_skipping = not differs
            lower, before = upper, bound
        return bytes(writer.data)

    def _split(self, writer: _Writer, lower: int, upper: int, bound: _Item) -> None:
        """Write a range: its ids if they are few, else the fingerprints of its sixteenths."""
        count = upper - lower
        if count < 2 * _BUCKETS:
            writer.range(bound, _IDS, _varint(count) + b"".join(self._items.ids(lower, upper)))
            return
        size, longer = divmod(count, _BUCKETS)
        shift = self._shift % size
        start = end = lower
        for bucket in range(_BUCKETS):
            end += size + (bucket < longer)
            border = end - shift if bucket < _BUCKETS - 1 else upper
            until = bound if border == upper else _between(self._items[border - 1], self._items[border])
            writer.range(until, _FINGERPRINT, self._items.fingerprint(start, border))
            start = border

    def _list(self, writer: _Writer, lower: int, upper: int, bound: _Item) -> int:
        """Write as many ids of a range as fit. Returns the position at which the next range begins."""
        if self._max_bytes:
            room = self._max_bytes - _SPARE_BYTES - len(writer.data)
            fitting = max(0, room // ID_BYTES + 1)
            if fitting < upper - lower:
                upper = lower + fitting
                bound = self._items[upper]
        writer.range(bound, _IDS, _varint(upper - lower) + b"".join(self._items.ids(lower, upper)))
        return upper

    def _is_full(self, writer: _Writer) -> bool:
        return bool(self._max_bytes) and len(writer.data) > self._max_bytes - _SPARE_BYTES


def _compare(compared: Compared, ours: Iterable[bytes], theirs: Iterable[bytes]) -> None:
    wanted = set(theirs)
    for packet_id in ours:
        if packet_id in wanted:
            wanted.discard(packet_id)
        else:
            compared.have.append(packet_id)
    compared.need.extend(sorted(wanted))


def _between(before: _Item, after: _Item) -> _Item:
    """The shortest bound that separates two neighbouring items."""
    if before[0] != after[0]:
        return after[0], b""
    shared = next(n for n, (one, other) in enumerate(zip(before[1], after[1], strict=True)) if one != other)
    return after[0], after[1][: shared + 1]


def _varint(number: int) -> bytes:
    """A number in base 128, the most significant digit first."""
    digits = [number & 127]
    while number := number >> 7:
        digits.append(number & 127 | 128)
    return bytes(reversed(digits))


def _version(message: bytes) -> int:
    if not message or not 0x60 <= message[0] <= 0x6F:
        raise NegentropyError("this is not a negentropy message")
    return message[0]
