"""A participant's record of its channel's past, within bounds: the log, the known ids, the filter.

The log is ordered by Lamport time, then by id, so the order is the same for all participants (C-118). The log
is bounded: the message that was logged first leaves first, regardless of its Lamport time. So a stranger's
message with an extreme time can neither stay for ever nor push out later messages. An id stays known for
longer than its message.

`Unreferenced` finds messages that a peer lacks without noticing. With a history of two entries, the third of
three messages sent at once is never named by another message. A participant that missed it sees no gap, and
the logs differ permanently. But a filter has no false negatives: if the filter of a received sync lacks such
an id, the peer lacks the message. Our next sync then names the message with the most recent ones, and the
peer's ordinary detection of gaps does the rest.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import islice, takewhile

from strata.channels.sds.bloom import BloomParameters, RollingFilter
from strata.channels.sds.bodies import Archive, Body
from strata.channels.sds.config import SdsConfig
from strata.channels.sds.messages import HistoryEntry
from strata.channels.sds.outgoing import OutgoingBuffer
from strata.channels.sds.receipts import Unheard, receipt

__all__ = ["NO_HORIZON", "History", "KnownIds", "LoggedMessage", "MessageLog", "SortedKeys", "Unreferenced"]

Key = tuple[int, str]
_CHUNK = 512
_MAX_LOOKS = 1_024
"""How many of the oldest ids are looked at at a time to find one that may be forgotten."""
_MOST_BEYOND = 0.1
"""How many ids beyond the capacity, as a share of it, are kept while none is found that may be forgotten."""
_STEP = 64
"""How many ids are added after a look in vain before the next one, and how many must then go at a time."""
NO_HORIZON = -1
"""A horizon below every Lamport time: no id has been forgotten yet."""
_MAX_UNREFERENCED = 1_024


class SortedKeys:
    """Sorted keys in chunks: adding and removing cost the same for any number of keys."""

    def __init__(self) -> None:
        self._chunks: list[list[Key]] = []
        self._last: list[Key] = []
        """The greatest key of each chunk."""

    def add(self, key: Key) -> None:
        """Put a key in its place, which is nearly always the end."""
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
            # Keys are mostly appended at the end, so there the first part is left full.
            cut = 2 * _CHUNK if at == len(self._chunks) - 1 else _CHUNK
            self._chunks[at : at + 1] = [chunk[:cut], chunk[cut:]]
            self._last[at : at + 1] = [chunk[cut - 1], chunk[-1]]
        else:
            self._last[at] = chunk[-1]

    def remove(self, key: Key) -> None:
        """Remove a key, which must be present."""
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
        """The keys up to and including this one, greatest first."""
        at = bisect_left(self._last, key)
        if at < len(self._chunks):
            chunk = self._chunks[at]
            for place in range(bisect_right(chunk, key) - 1, -1, -1):
                yield chunk[place]
        for earlier in range(at - 1, -1, -1):
            yield from reversed(self._chunks[earlier])


class LoggedMessage:
    """A message in the log, and its place there."""

    __slots__ = (
        "arrival",
        "body",
        "dispatched",
        "floor",
        "hint",
        "lamport",
        "message_id",
        "own",
        "run",
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
        """The position in the order of logging."""
        self.hint = hint
        self.own = own
        """The number of this message among our own messages; 0 if another participant sent it."""
        self.floor = floor
        """The highest number of one of our messages that this message is, or follows by its history."""
        self.run = run
        """The start of the run: this message follows (or is) all our messages from `run` to `floor`."""
        self.dispatched = dispatched

    def as_history(self) -> HistoryEntry:
        """The entry by which other messages name this one.

        It has the sender, which others need for repair, even if this participant does not repair.
        """
        return HistoryEntry(self.message_id, self.hint, self.sender_id)


class MessageLog:
    """Messages by id, by Lamport time, and by arrival."""

    def __init__(self) -> None:
        self._messages: dict[str, LoggedMessage] = {}
        self._keys = SortedKeys()
        # A dict that loses its first items finds the next one ever more slowly, hence the separate deque.
        self._arrivals: deque[str] = deque()
        self.last_arrival = 0
        self.last_own = 0
        """The number of our last message that was logged; 0 if there was none."""

    def __contains__(self, message_id: object) -> bool:
        return message_id in self._messages

    def __len__(self) -> int:
        return len(self._messages)

    def get(self, message_id: str) -> LoggedMessage | None:
        """The message of this id, if it is in the log."""
        return self._messages.get(message_id)

    def add(self, message: LoggedMessage) -> None:
        """Log a message that is not in the log yet."""
        self._messages[message.message_id] = message
        self._keys.add((message.lamport, message.message_id))
        self._arrivals.append(message.message_id)
        self.last_arrival = max(self.last_arrival, message.arrival)
        self.last_own = max(self.last_own, message.own)

    def remove(self, message_id: str) -> LoggedMessage | None:
        """Remove a message and return it; None if it is not there."""
        message = self._messages.pop(message_id, None)
        if message is not None:
            self._keys.remove((message.lamport, message_id))
            _sweep(self._arrivals, self._messages)
        return message

    def first_logged(self) -> LoggedMessage:
        """The message that has been in the log longest, and leaves next."""
        while self._arrivals[0] not in self._messages:
            self._arrivals.popleft()
        return self._messages[self._arrivals[0]]

    def put_off(self, message: LoggedMessage) -> None:
        """Let the message that would leave next leave after all the others."""
        self._arrivals.remove(message.message_id)
        self._arrivals.append(message.message_id)

    def ordered(self) -> Iterator[LoggedMessage]:
        """All messages, in the order that all participants share."""
        return (self._messages[message_id] for _, message_id in self._keys)

    def recent(self, count: int, limit: int, *, dispatched_only: bool) -> list[LoggedMessage]:
        """The last `count` messages with a Lamport time up to `limit`, oldest first (C-106).

        Without the limit, a message with an extreme time would be in every history from then on.
        """
        found: list[LoggedMessage] = []
        for _, message_id in self._keys.down_from((limit, "\U0010ffff")):
            if len(found) == count:
                break
            message = self._messages[message_id]
            if message.dispatched or not dispatched_only:
                found.append(message)
        found.reverse()
        return found

    def followed(self, count: int, limit: int, *, dispatched_only: bool) -> list[LoggedMessage]:
        """The messages that one sent now follows: the `recent` ones, and those with a Lamport time beyond
        `limit` while they are among the last `count` logged. Otherwise an answer to a message from a clock
        far ahead could come before it, and so could whatever its sender says once the clock is right."""
        recent = self.recent(count, limit, dispatched_only=dispatched_only)
        latest = islice(filter(None, map(self.get, reversed(self._arrivals))), count)
        beyond = [
            each for each in latest if each.lamport > limit and (each.dispatched or not dispatched_only)
        ]
        if not beyond:
            return recent
        return sorted([*recent, *beyond], key=lambda each: each.arrival)[-count:]


class KnownIds:
    """The ids of messages ever logged, up to `capacity`, with their Lamport times and arrivals.

    The *horizon* is the latest Lamport time of a forgotten id. A message not later than the horizon may have
    been delivered already, so it is refused. It is not acknowledged either, by which its sender notices.
    """

    def __init__(self, capacity: int, horizon: int = NO_HORIZON) -> None:
        self._capacity = capacity
        self._known: dict[str, tuple[int, int]] = {}
        self._arrivals: deque[str] = deque()
        self._most = int((1 + _MOST_BEYOND) * capacity)
        self._enough = capacity
        """How many ids there may be before the next look for one that may be forgotten."""
        self._is_turned = False
        """Whether ids at the front of `_arrivals` were put behind the others."""
        self.horizon = horizon

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._known

    def __iter__(self) -> Iterator[str]:
        """The ids in the order of arrival."""
        return iter(self._known)

    def latest(self, count: int) -> Iterator[str]:
        """The ids that were logged last, newest first."""
        return islice(reversed(self._known), count)

    def get(self, message_id: str) -> tuple[int, int] | None:
        """The Lamport time and arrival of this id, if known."""
        return self._known.get(message_id)

    def add(self, message_id: str, lamport: int, arrival: int) -> None:
        """Remember an id."""
        self._known[message_id] = (lamport, arrival)
        self._arrivals.append(message_id)

    def discard(self, message_id: str) -> None:
        """Forget the id of a message that never went out."""
        self._known.pop(message_id, None)
        _sweep(self._arrivals, self._known)

    def trim(self, clock: int, *, reading: float = math.inf, kept: Container[str] = frozenset()) -> list[str]:
        """Forget the oldest ids beyond the capacity, and return them. Times after `clock` set no horizon.

        `reading` is the Lamport time up to which a store has been read, while one is. Ids of later messages
        stay if possible: with a horizon at one of these, everything that is still to be read before it would
        be refused. Ids that are `kept` stay too.
        """
        forgotten: list[str] = []
        if self._is_turned and reading == math.inf:
            self._arrivals, self._is_turned, self._enough = deque(self._known), False, self._capacity
        while len(self._known) > self._enough:
            looked = islice(self._arrivals, _MAX_LOOKS)
            goes = next((each for each in looked if self._may_go(each, clock, reading, kept)), None)
            if goes is not None:
                self._enough = self._capacity
                forgotten.append(self._forget(goes, clock))
            elif len(self._known) <= self._most:
                self._arrivals.rotate(-_MAX_LOOKS)  # the next ones are looked at next time
                self._is_turned, self._enough = True, min(len(self._known) + _STEP, self._most)
            else:
                excess = min(_STEP, len(self._known) - self._capacity)
                forgotten += [self._forget(each, clock) for each in self._earliest(excess, kept)]
        return forgotten

    def _forget(self, message_id: str, clock: int) -> str:
        self._arrivals.remove(message_id)
        lamport, _ = self._known.pop(message_id, (0, 0))
        if lamport <= clock:
            self.horizon = max(self.horizon, lamport)
        return message_id

    def _may_go(self, message_id: str, clock: int, reading: float, kept: Container[str]) -> bool:
        lamport, _ = self._known.get(message_id, (0, 0))
        return not reading < lamport <= clock and message_id not in kept

    def _earliest(self, count: int, kept: Container[str]) -> list[str]:
        """The ids to forget if none may go: the later they are, the more is refused."""

        def harm(message_id: str) -> tuple[bool, int]:
            return message_id in kept, self._known.get(message_id, (0, 0))[0]

        return nsmallest(count, islice(self._arrivals, _MAX_LOOKS), harm)


def _sweep(arrivals: deque[str], there: Mapping[str, object]) -> None:
    """Drop the arrivals that are gone, once they are the majority. An arrival that left from the middle would
    otherwise stay until all before it have left, which never happens in a quiet channel."""
    if len(arrivals) > 2 * len(there) + _CHUNK:
        kept = [message_id for message_id in arrivals if message_id in there]
        arrivals.clear()
        arrivals.extend(kept)


class History:
    """The log and everything derived from it.

    `mark` is called with the kind and key of each record that changes. An unacknowledged message of ours
    keeps its bytes after it has left the log; the history needs the outgoing buffer for this.
    """

    def __init__(
        self,
        config: SdsConfig,
        parameters: BloomParameters,
        outgoing: OutgoingBuffer,
        mark: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._outgoing = outgoing
        self._mark = mark
        self.log = MessageLog()
        self.known = KnownIds(config.max_known_ids)
        self.archive = Archive()
        self.filter = RollingFilter(parameters)
        self.unreferenced = Unreferenced(
            self.log,
            parameters,
            2 * config.acknowledgement_timeout_ms,
            limit=config.max_repair_requests,
            mark=mark,
        )
        self.unheard = Unheard(2 * config.acknowledgement_timeout_ms)
        self._read_to: int | None = None
        """The Lamport time up to which a store was read; None while there is nothing to read."""

    def set_reading(self, on: bool) -> None:
        """Note whether a store may have messages that are still to be read: see `KnownIds.trim`."""
        if not on:
            self._read_to = None
        elif self._read_to is None:
            self._read_to = self.known.horizon  # how far it was read before is not known

    def add(
        self,
        message_id: str,
        sender_id: str,
        lamport: int,
        body: Body,
        history: Sequence[str],
        *,
        clock: int,
        now: int,
        hint: bytes | None = None,
        own: int = 0,
        stored: bool = False,
    ) -> None:
        """Log a message. `own` is its number among our own messages, `clock` our Lamport time as far
        as it is credible. `stored`: it was read from a store."""
        floor, run = self._follows(history, own)
        logged = LoggedMessage(
            message_id,
            sender_id,
            lamport,
            body,
            arrival=self.log.last_arrival + 1,
            hint=hint,
            own=own,
            floor=floor,
            run=run,
            dispatched=not own,
        )
        self.log.add(logged)
        self.known.add(message_id, lamport, logged.arrival)
        self.unreferenced.logged(message_id, history, now)
        self.unheard.logged(message_id)
        self._mark("log", message_id)
        while len(self.log) > self._config.max_history or (
            self.archive.size_bytes > self._config.max_history_bytes and len(self.log) > 1
        ):
            self._evict(self._leaves_next())
        reading: float = math.inf if self._read_to is None else self._read_to
        if stored:
            reading = lamport
            if self._read_to is not None and lamport <= clock:
                self._read_to = lamport
        for forgotten in self.known.trim(clock, reading=reading, kept=self.log):
            self._mark("known", forgotten)

    def _follows(self, history: Iterable[str], own: int) -> tuple[int, int]:
        """`LoggedMessage.floor` and `LoggedMessage.run` of a message with this history."""
        named = [logged for logged in map(self.log.get, history) if logged is not None]
        floor, run = max(((logged.floor, logged.run) for logged in named), default=(0, 0))
        if own:
            # The run continues if this message follows our message just before it.
            return own, run if run and floor == own - 1 else own
        return floor, run

    def dispatched(self, logged: LoggedMessage) -> None:
        """Note that one of our messages has gone out: others may have it, so it enters the filter (C-110)."""
        if not logged.dispatched:
            logged.dispatched = True
            self.filter.insert(logged.message_id)
            self._mark("log", logged.message_id)

    def learn_hint(self, logged: LoggedMessage, hint: bytes | None) -> None:
        """Keep the hint by which a store finds a message."""
        if hint is not None and hint != logged.hint:
            logged.hint = hint
            self._mark("log", logged.message_id)

    def withdraw(self, logged: LoggedMessage) -> None:
        """Remove one of our messages that never went out (C-110)."""
        self.log.remove(logged.message_id)
        self.known.discard(logged.message_id)
        self.unreferenced.discard(logged.message_id)
        self.archive.release(logged.body)
        self._mark("log", logged.message_id)

    def amend(
        self, logged: LoggedMessage, data: bytes, bloom_filter: bytes | None, history: Sequence[str]
    ) -> None:
        """Replace the bytes of one of our messages that has not gone out; `history` is its new history."""
        before = logged.body
        logged.body = self.archive.keep(logged.sender_id, data, bloom_filter)
        self.archive.release(before)
        floor, _ = self._follows(history, 0)
        if floor < logged.run:  # the messages that it was known to follow are no longer in its history
            logged.run = logged.own
        for named in history:
            self.unreferenced.discard(named)
        self._mark("log", logged.message_id)

    def _leaves_next(self) -> LoggedMessage:
        """The message that leaves the full log next.

        While a store is read, our last message stays: it is newer than what is read, and our next one must
        name it.
        """
        first = self.log.first_logged()
        if self._read_to is not None and first.own and first.own == self.log.last_own:
            self.log.put_off(first)
        return self.log.first_logged()

    def _evict(self, logged: LoggedMessage) -> None:
        """Drop a message from the full log, and remember its id."""
        self.log.remove(logged.message_id)
        self.unreferenced.discard(logged.message_id)
        outgoing = self._outgoing.get(logged.message_id)
        if outgoing is not None:
            outgoing.owns_body = True
            self._mark("outgoing", logged.message_id)
        else:
            self.archive.release(logged.body)
        self._mark("log", logged.message_id)
        self._mark("known", logged.message_id)


class Unreferenced:
    """Ids of logged messages that no other message names.

    `grace` is how many milliseconds a message may take to arrive before a peer counts as lacking it. At most
    `limit` messages are named in one sync.
    """

    def __init__(
        self,
        log: MessageLog,
        parameters: BloomParameters,
        grace: int,
        *,
        limit: int,
        mark: Callable[[str, str], None],
    ) -> None:
        self._log = log
        self._parameters = parameters
        self._grace = grace
        self._limit = limit
        self._since: dict[str, int] = {}
        """The steady time since which each id is unreferenced; oldest first."""
        self._lacked: dict[str, None] = {}
        """Ids that some peer was found to lack."""
        self._mark = mark

    def logged(self, message_id: str, history: Iterable[str], now: int) -> None:
        """Note that a message was logged: nothing names it yet, and it names `history`."""
        for named in history:
            self.discard(named)
        self._since[message_id] = now
        self._mark("tip", message_id)
        if len(self._since) > _MAX_UNREFERENCED:
            self.discard(next(iter(self._since)))

    def discard(self, message_id: str) -> None:
        """Drop a message that another message names, or that has left the log."""
        if self._since.pop(message_id, None) is not None:
            self._mark("tip", message_id)

    def since(self, message_id: str) -> int | None:
        """The steady time since which this message is unreferenced; None if it is not."""
        return self._since.get(message_id)

    def restore(self, message_id: str, since: int) -> None:
        """Restore an unreferenced message of an earlier run."""
        self._since[message_id] = since

    def dispatched(self) -> list[str]:
        """The unreferenced messages that others may have, oldest first."""
        found = [self._log.get(message_id) for message_id in self._since]
        return [logged.message_id for logged in found if logged is not None and logged.dispatched]

    def compare(self, bloom_filter: bytes, now: int) -> None:
        """Note which unreferenced messages a peer lacks, by its filter."""
        contains, positions = self._parameters.contains, self._parameters.positions
        for message_id in self._settled(now):
            if not contains(bloom_filter, positions(message_id)):
                self._note_lacked(message_id)

    def compare_receipts(self, receipts: Collection[bytes], now: int) -> None:
        """Note the same by a sync without a filter: it lists all messages unreferenced for its sender."""
        for message_id in self._settled(now):
            if receipt(message_id) not in receipts:
                self._note_lacked(message_id)

    def _settled(self, now: int) -> Iterator[str]:
        """The messages that should have reached everybody by now; those that prove nothing are dropped."""
        # A peer's filter has at least the last half of its capacity: older messages prove nothing.
        oldest = self._log.last_arrival - self._parameters.capacity // 4
        for message_id in list(self._since):
            logged = self._log.get(message_id)
            if logged is not None and logged.arrival >= oldest:
                break
            self.discard(message_id)
        return (
            message_id
            for message_id, _ in takewhile(lambda each: now - each[1] >= self._grace, self._since.items())
        )

    def _note_lacked(self, message_id: str) -> None:
        logged = self._log.get(message_id)
        # The bound is for a participant that sends no syncs, which never takes these.
        if logged is not None and logged.dispatched and len(self._lacked) < _MAX_UNREFERENCED:
            self._lacked[message_id] = None

    @property
    def some_lacked(self) -> bool:
        """Whether some peer lacks a message, to name in a sync."""
        return bool(self._lacked)

    def named_by_other(self, named: Iterable[str]) -> None:
        """Forget messages that another participant's sync names: peers that lack them know it now."""
        for message_id in named:
            self._lacked.pop(message_id, None)

    def take_lacked(self, named: Iterable[str]) -> list[str]:
        """Remove and return the oldest messages that some peer lacks, to name in a sync with `named`."""
        lacked, self._lacked = self._lacked, {}
        for message_id in named:
            lacked.pop(message_id, None)
        return [message_id for message_id in lacked if message_id in self._log][: self._limit]
