"""Messages kept byte for byte, at a fraction of their size (C-145).

A message with a filter consists mostly of that filter, and a filter changes by ten bits for each new id. So
one filter in about forty is kept whole, as a *keyframe*, and the others as their difference from it. Then a
message costs about a twentieth of its wire size. Each message can be restored on its own. A keyframe is
dropped with the last body that needs it.

Participants that have received the same messages have nearly the same filters. So a sender without a suitable
keyframe uses the latest keyframe of any sender, and the cost does not depend on the number of senders.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import zlib
from collections import OrderedDict

import msgspec
from Crypto.Util.strxor import strxor

__all__ = ["Archive", "Body", "Keyframe"]

_MAX_CHAINS = 1_024
"""The most senders whose current keyframe is remembered."""
_DELTAS_PER_KEYFRAME_BYTES = 12
"""A delta longer than a keyframe divided by this begins a new keyframe: near the smallest sum of both."""


class Keyframe(msgspec.Struct, frozen=True, eq=False):
    """A whole filter, from which the differences of other filters are taken."""

    number: int
    data: bytes


class Body(msgspec.Struct, frozen=True, eq=False):
    """The bytes of one message: before its filter, the filter, and after it."""

    head: bytes
    tail: bytes = b""
    keyframe: Keyframe | None = None
    """If None, the whole message is in `head`."""
    delta: bytes = b""
    """The difference from the keyframe; empty if there is none."""

    def restore(self) -> bytes:
        """The message, byte for byte."""
        if self.keyframe is None:
            return self.head
        bloom_filter = self.keyframe.data
        if self.delta:
            bloom_filter = strxor(bloom_filter, zlib.decompress(self.delta))
        return self.head + bloom_filter + self.tail

    @property
    def size_bytes(self) -> int:
        """The bytes that this body takes, without its keyframe."""
        return len(self.head) + len(self.tail) + len(self.delta)


class Archive:
    """Makes bodies, and counts the users of each keyframe."""

    def __init__(self) -> None:
        self._chains: OrderedDict[str, int] = OrderedDict()
        """The number of each sender's current keyframe."""
        self._keyframes: dict[int, Keyframe] = {}
        """All keyframes in use, the latest last."""
        self._users: dict[int, int] = {}
        self._last_number = 0
        self.born: list[Keyframe] = []
        """The keyframes made since this list was last emptied."""
        self.died: list[int] = []
        """The numbers of keyframes that lost their last user since this list was last emptied."""
        self.size_bytes = 0
        """The bytes of all bodies and keyframes in use."""

    def keep(self, sender_id: str, data: bytes, bloom_filter: bytes | None) -> Body:
        """Keep a message until `release`. `bloom_filter` is its filter, if it has the channel's size."""
        body = self._make(sender_id, data, bloom_filter)
        self._count(body)
        return body

    def release(self, body: Body) -> None:
        """Drop a body."""
        self.size_bytes -= body.size_bytes
        keyframe = body.keyframe
        if keyframe is not None:
            users = self._users[keyframe.number] - 1
            if users:
                self._users[keyframe.number] = users
            else:
                del self._users[keyframe.number], self._keyframes[keyframe.number]
                self.size_bytes -= len(keyframe.data)
                self.died.append(keyframe.number)

    def adopt(self, body: Body) -> None:
        """Count a body that was made in an earlier run."""
        self._count(body)
        if body.keyframe is not None:
            self._last_number = max(self._last_number, body.keyframe.number)

    def _count(self, body: Body) -> None:
        self.size_bytes += body.size_bytes
        keyframe = body.keyframe
        if keyframe is not None:
            users = self._users.get(keyframe.number, 0)
            if not users:
                self.size_bytes += len(keyframe.data)
                self._keyframes[keyframe.number] = keyframe
            self._users[keyframe.number] = users + 1

    def _make(self, sender_id: str, data: bytes, bloom_filter: bytes | None) -> Body:
        if not bloom_filter:
            return Body(data)
        # head + filter + tail is the message wherever these bytes occur, so the first place will do.
        start = _find(data, bloom_filter)
        head, tail = data[:start], data[start + len(bloom_filter) :]
        for keyframe in self._candidates(sender_id, len(bloom_filter)):
            delta = b""
            if keyframe.data != bloom_filter:
                delta = _compressed(strxor(keyframe.data, bloom_filter))
            if len(delta) * _DELTAS_PER_KEYFRAME_BYTES <= len(bloom_filter):
                self._follow(sender_id, keyframe)
                return Body(head, tail, keyframe, delta)
        return Body(head, tail, self._begin(sender_id, bloom_filter))

    def _candidates(self, sender_id: str, size_bytes: int) -> list[Keyframe]:
        """The keyframes that may fit: the sender's, and the latest of any sender."""
        own = self._keyframes.get(self._chains.get(sender_id, 0))
        last = next(reversed(self._keyframes.values()), None)
        found = [own] if last is own else [own, last]
        # An earlier run may have had filters of another size.
        return [each for each in found if each is not None and len(each.data) == size_bytes]

    def _begin(self, sender_id: str, bloom_filter: bytes) -> Keyframe:
        self._last_number += 1
        keyframe = Keyframe(self._last_number, bloom_filter)
        self.born.append(keyframe)
        self._follow(sender_id, keyframe)
        return keyframe

    def _follow(self, sender_id: str, keyframe: Keyframe) -> None:
        self._chains[sender_id] = keyframe.number
        self._chains.move_to_end(sender_id)
        if len(self._chains) > _MAX_CHAINS:
            self._chains.popitem(last=False)


def _compressed(difference: bytes) -> bytes:
    """Deflate data that is nearly all zeros. Looking only for runs, with small tables, which are quick to
    clear, takes half the time and memory of zlib's defaults."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, 12, 5, zlib.Z_RLE)
    return compressor.compress(difference) + compressor.flush()


def _find(data: bytes, part: bytes) -> int:
    """The first position of a long part. Searching for all of it at once costs eighteen times as much."""
    beginning = part[:64]
    start = data.find(beginning)
    while start >= 0 and not data.startswith(part, start):
        start = data.find(beginning, start + 1)
    return start
