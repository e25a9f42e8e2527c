"""The filter of received ids, bit for bit that of the JavaScript package (C-103, A-135).

Parameters come from the channel's configuration and never travel. The wire form is the bit array as 64-bit
big-endian words; bit n of a word counts from the least significant.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import mmh3

__all__ = ["BloomFilter", "BloomParameters", "RollingFilter"]

_LN2 = math.log(2)
_MOST_ERRORS = 10
"""A filter is trusted up to this multiple of its error rate: by default 1 %, with 63 % of its bits set."""


class BloomParameters:
    """The sizes of a filter for `capacity` ids at `error_rate`, and the positions of an id's bits."""

    def __init__(self, capacity: int, error_rate: float) -> None:
        bits_per_id = math.ceil(-math.log(error_rate) / _LN2**2)
        self.capacity = capacity
        self.bits = capacity * bits_per_id
        # JavaScript rounds halves up; Python rounds them to even.
        self.hashes = math.floor(_LN2 * bits_per_id + 0.5)
        self.size_bytes = (self.bits // 64 + 1) * 8
        # A filter at its capacity is half full, and `error_rate` of the ids that are not in it seem to be. A
        # filter in which ten times as many seem to be does not acknowledge: it was never rolled over.
        self._most_bits: float = self.bits * min(1.0, _MOST_ERRORS * error_rate) ** (1 / self.hashes)

    def is_overfull(self, data: bytes) -> bool:
        """Whether a filter in wire form has so many bits that it means nothing."""
        return int.from_bytes(data).bit_count() > self._most_bits

    def positions(self, message_id: str) -> Sequence[int]:
        """The numbers of this id's bits."""
        return _positions(message_id, self.hashes, self.bits)

    def contains(self, data: bytes | bytearray, positions: Iterable[int]) -> bool:
        """Whether a filter in wire form has all these bits; `data` must be `size_bytes` long."""
        # Byte b of a big-endian word holds bits 8·(7−b)…, hence the exclusive or with 7.
        for bit in positions:
            if not data[bit >> 3 ^ 7] >> (bit & 7) & 1:
                return False
        return True


@lru_cache(4_096)  # the filters of all syncs are checked for the same few messages
def _positions(message_id: str, hashes: int, bits: int) -> tuple[int, ...]:
    first, second = _hash(message_id), _hash(message_id + " b")
    return tuple([(first + i * second) % bits for i in range(hashes)])


def _hash(text: str) -> int:
    return abs(mmh3.hash(text, 0, True))


class BloomFilter:
    """A set of ids that answers "perhaps" or "certainly not"."""

    def __init__(self, parameters: BloomParameters) -> None:
        self._parameters = parameters
        self._bits = bytearray(parameters.size_bytes)
        self._encoded: bytes | None = None
        self.count = 0
        """Insertions so far."""

    @classmethod
    def from_bytes(cls, parameters: BloomParameters, data: bytes) -> BloomFilter:
        """The filter of this wire form. Its `count` is estimated from the bits.

        Raises `ValueError` if `data` is not `parameters.size_bytes` long.
        """
        if len(data) != parameters.size_bytes:
            raise ValueError(f"a filter with these parameters has {parameters.size_bytes} bytes")
        made = cls(parameters)
        made._bits[:] = data
        unset = max(parameters.bits - int.from_bytes(data).bit_count(), 1) / parameters.bits
        made.count = round(-math.log(unset) * parameters.bits / parameters.hashes)
        return made

    def insert(self, message_id: str) -> None:
        """Put an id into the set."""
        self.insert_at(self._parameters.positions(message_id))

    def insert_at(self, positions: Iterable[int]) -> None:
        """Put an id into the set by the positions of its bits."""
        bits = self._bits
        for bit in positions:
            bits[bit >> 3 ^ 7] |= 1 << (bit & 7)
        self._encoded = None
        self.count += 1

    def __contains__(self, message_id: str) -> bool:
        return self._parameters.contains(self._bits, self._parameters.positions(message_id))

    def to_bytes(self) -> bytes:
        """The wire form; made once for each state of the set."""
        if self._encoded is None:
            self._encoded = bytes(self._bits)
        return self._encoded


class RollingFilter:
    """A filter of the ids received last: at least half its capacity, at most all of it (C-102).

    Rebuilding a full filter would stall the channel. So a second filter is filled with the later half of the
    ids, and takes over when the first one is full.
    """

    def __init__(self, parameters: BloomParameters) -> None:
        self.parameters = parameters
        self._current = BloomFilter(parameters)
        self._next = BloomFilter(parameters)

    @cached_property
    def _half(self) -> int:
        return self.parameters.capacity // 2

    def insert(self, message_id: str) -> None:
        """Put an id into the set, which may drop the oldest ids."""
        positions = self.parameters.positions(message_id)
        if self._current.count >= self.parameters.capacity:
            self._current, self._next = self._next, BloomFilter(self.parameters)
        self._current.insert_at(positions)
        if self._current.count > self._half:
            self._next.insert_at(positions)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._current

    def to_bytes(self) -> bytes:
        """The wire form of the current filter."""
        return self._current.to_bytes()
