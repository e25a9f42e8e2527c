"""The log of a channel, and the memory of what was ever in it.

The log is ordered by Lamport time, then by id, and so is equal for all participants (C-118). It is bounded:
what was logged first leaves first, whatever its Lamport time, so that a stranger with extreme times can
neither stay for ever nor push out what came after. An id stays known for longer than its message.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator

from strata.channels.sds.bodies import Body
from strata.channels.sds.messages import HistoryEntry

__all__ = ["Entry", "KnownIds", "Log", "SortedKeys"]

Key = tuple[int, str]
_CHUNK = 512


class SortedKeys:
    """Keys in order, in chunks: adding and removing cost the same however many there are."""

    def __init__(self) -> None:
        self._chunks: list[list[Key]] = []
        self._last: list[Key] = []
        """The greatest key of each chunk."""

    def add(self, key: Key) -> None:
        """Put a key in its place; nearly always that is the end."""
        if not self._chunks:
            self._chunks.append([key])
            self._last.append(key)
            return
        at = min(bisect_left(self._last, key), len(self._last) - 1)
        chunk = self._chunks[at]
        if key > chunk[-1]:
            chunk.append(key)
        else:
            insort(chunk, key)
        if len(chunk) > 2 * _CHUNK:
            # At the end keys are appended, so there the first part is left full.
            cut = 2 * _CHUNK if at == len(self._chunks) - 1 else _CHUNK
            self._chunks[at : at + 1] = [chunk[:cut], chunk[cut:]]
            self._last[at : at + 1] = [chunk[cut - 1], chunk[-1]]
        else:
            self._last[at] = chunk[-1]

    def remove(self, key: Key) -> None:
        """Take a key out that is there."""
        at = bisect_left(self._last, key)
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, key)]
        if chunk:
            self._last[at] = chunk[-1]
        else:
            del self._chunks[at], self._last[at]

    def __iter__(self) -> Iterator[Key]:
        for chunk in self._chunks:
            yield from chunk

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def down_from(self, key: Key) -> Iterator[Key]:
        """The keys not greater than this one, greatest first."""
        at = bisect_left(self._last, key)
        if at < len(self._chunks):
            chunk = self._chunks[at]
            for place in range(bisect_right(chunk, key) - 1, -1, -1):
                yield chunk[place]
        for earlier in range(at - 1, -1, -1):
            yield from reversed(self._chunks[earlier])


class Entry:
    """A logged message."""

    __slots__ = (
        *("arrival", "body", "dispatched", "floor", "hint", "lamport", "message_id", "own", "run"),
        "sender_id",
    )

    def __init__(
        self,
        message_id: str,
        sender_id: str,
        lamport: int,
        body: Body,
        *,
        arrival: int,
        hint: bytes | None = None,
        own: int = 0,
        floor: int = 0,
        run: int = 0,
        dispatched: bool = True,
    ) -> None:
        self.message_id = message_id
        self.sender_id = sender_id
        self.lamport = lamport
        self.body = body
        self.arrival = arrival
        """Position in the order of logging."""
        self.hint = hint
        self.own = own
        """Number of this message among one's own; 0 if it is another's."""
        self.floor = floor
        """Highest number of an own message that this one is or, by its history, follows."""
        self.run = run
        """The own messages numbered from here to `floor` follow each other: this one follows them all."""
        self.dispatched = dispatched

    def as_history(self, *, with_sender: bool) -> HistoryEntry:
        """How other messages name this one."""
        return HistoryEntry(self.message_id, self.hint, self.sender_id if with_sender else None)


class Log:
    """Entries by id, by Lamport time, and by when they came."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._keys = SortedKeys()
        # A dict that loses its first items finds the next one ever more slowly, so arrival is kept apart.
        self._arrivals: deque[str] = deque()
        self.last_arrival = 0

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, message_id: str) -> Entry | None:
        """The entry of this id, if it is in the log."""
        return self._entries.get(message_id)

    def add(self, entry: Entry) -> None:
        """Log a message that is not there yet."""
        self._entries[entry.message_id] = entry
        self._keys.add((entry.lamport, entry.message_id))
        self._arrivals.append(entry.message_id)
        self.last_arrival = max(self.last_arrival, entry.arrival)

    def remove(self, message_id: str) -> Entry | None:
        """Take a message out; None if it is not there."""
        entry = self._entries.pop(message_id, None)
        if entry is not None:
            self._keys.remove((entry.lamport, message_id))
        return entry

    def first_logged(self) -> Entry:
        """The entry that is to leave next."""
        while self._arrivals[0] not in self._entries:
            self._arrivals.popleft()
        return self._entries[self._arrivals[0]]

    def ordered(self) -> Iterator[Entry]:
        """All entries in the order that all participants share."""
        return (self._entries[message_id] for _, message_id in self._keys)

    def recent(self, count: int, limit: int, *, dispatched_only: bool) -> list[Entry]:
        """The last `count` entries with a Lamport time up to `limit`, oldest first (C-106).

        Without the limit one message with an extreme time would be in every history from then on.
        """
        found: list[Entry] = []
        for _, message_id in self._keys.down_from((limit, "\U0010ffff")):
            if len(found) == count:
                break
            entry = self._entries[message_id]
            if entry.dispatched or not dispatched_only:
                found.append(entry)
        found.reverse()
        return found


class KnownIds:
    """Ids of all that was logged, for as long as memory allows, with Lamport time and arrival.

    What is forgotten leaves its Lamport time as a *horizon*. A message from before the horizon may have been
    delivered already, so it is refused: it is then not acknowledged either, and its sender knows.
    """

    def __init__(self, capacity: int, horizon: int = 0) -> None:
        self._capacity = capacity
        self._known: dict[str, tuple[int, int]] = {}
        self._arrivals: deque[str] = deque()
        self.horizon = horizon

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._known

    def __iter__(self) -> Iterator[str]:
        """Ids in the order they came."""
        return iter(self._known)

    def get(self, message_id: str) -> tuple[int, int] | None:
        """Lamport time and arrival of this id, if known."""
        return self._known.get(message_id)

    def add(self, message_id: str, lamport: int, arrival: int) -> None:
        """Remember an id."""
        self._known[message_id] = (lamport, arrival)
        self._arrivals.append(message_id)

    def discard(self, message_id: str) -> None:
        """Forget an id that never was: its message failed."""
        self._known.pop(message_id, None)

    def trim(self, clock: int) -> list[str]:
        """Forget what is too much, and say which. Times beyond the own `clock` set no horizon."""
        forgotten: list[str] = []
        while len(self._known) > self._capacity:
            message_id = self._arrivals.popleft()
            lamport, _ = self._known.pop(message_id, (0, 0))
            if lamport <= clock:
                self.horizon = max(self.horizon, lamport)
            forgotten.append(message_id)
        return forgotten
