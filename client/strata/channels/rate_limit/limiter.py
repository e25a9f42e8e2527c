"""When each transmission may go (channel.md §11).

One `RateLimiter` stands for one transport identity and is shared by all channels that use it (C-234). Each
channel has a *lane*, bounded queues of its own, and lanes with something to send take turns. It is the last
step before dispatch (A-121). No clock: time is Unix time in milliseconds and comes in as `now`; `get_timer`
tells when `take` may have something.

Two budgets are refilled at each epoch:

- messages: the first chunk of each message, or every chunk (`chunk_accounting="each"`). It delays messages.
- segments: every transmission of whatever kind, if the transport has a limit. It paces chunks (A-118).

    what                    budgets it needs     goes while                       otherwise
    first transmission      messages, segments   there is any budget (C-226)      waits, in order
    retransmission          segments             below the threshold (C-091)      waits
    sync, repair            segments             no first transmission could go   waits
    ephemeral               messages, segments   below the threshold (C-181)      is dropped at once

A relay that answers `rate_limited` pauses all of it, and what it tells of its limit is kept to from then on.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from strata.channels.persistence.interface import Change
from strata.channels.persistence.records import EpochCount, QueuedSend, put, remove
from strata.channels.rate_limit.budget import Budget
from strata.channels.rate_limit.values import (
    DEFAULT_RATE_LIMIT_CONFIG,
    EphemeralDropReason,
    Priority,
    RateLimitConfig,
    SendQueueFull,
    Transmission,
)

__all__ = ["RateLimiter"]


class _Lane:
    """What one channel has waiting."""

    __slots__ = ("changes", "ids", "next_position", "queues")

    def __init__(self) -> None:
        self.queues: tuple[deque[Transmission], ...] = (deque(), deque(), deque())
        self.ids: set[tuple[Priority, str]] = set()
        self.next_position = 1
        self.changes: list[Change] = []


class RateLimiter:
    """The budgets of one transport identity and the queues before it."""

    def __init__(
        self, config: RateLimitConfig = DEFAULT_RATE_LIMIT_CONFIG, *, counted: EpochCount | None = None
    ) -> None:
        """`counted` is what a store kept of an earlier run (C-235)."""
        self._config = config
        self._budget = Budget(config, counted)
        self._stored_count = counted
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()  # whose turn is next comes first
        self.dropped_ephemerals = 0
        self.refused_background = 0

    # What comes in.

    def check_room(self, lane: str, count: int) -> None:
        """Raise `SendQueueFull` unless so many first transmissions more can be queued."""
        waiting = len(self._lane(lane).queues[Priority.CONTENT])
        if waiting + count > self._config.max_queued:
            raise SendQueueFull(lane, waiting, self._config.max_queued)

    def offer(self, lane: str, message_ids: Sequence[str], *, opens_message: bool = True) -> None:
        """Queue the first transmissions of a message's chunks: all, or `SendQueueFull` and none (C-227).

        `opens_message` false: these are later chunks of a message whose first one was charged already.
        """
        self.check_room(lane, len(message_ids))
        queues = self._lane(lane)
        for index, message_id in enumerate(message_ids):
            transmission = Transmission(
                lane=lane,
                message_id=message_id,
                priority=Priority.CONTENT,
                opens_message=opens_message and index == 0,
                position=queues.next_position,
            )
            queues.next_position += 1
            self._append(queues, transmission)
            queues.changes.append(put(_record(transmission)))

    def offer_again(self, lane: str, message_id: str, priority: Priority) -> bool:
        """Queue a retransmission, sync or repair, which its timer would bring again after a restart.

        False if it was not queued: it waits already, or too many do.
        """
        queues = self._lane(lane)
        if (priority, message_id) in queues.ids:
            return False
        if len(queues.queues[priority]) >= self._config.max_queued:
            self.refused_background += 1
            return False
        self._append(queues, Transmission(lane=lane, message_id=message_id, priority=priority))
        return True

    def admit_ephemeral(self, now: int) -> EphemeralDropReason | None:
        """Charge an ephemeral message that goes at once; or say why it must be dropped (C-181)."""
        budget = self._budget
        budget.advance(now)
        reason: EphemeralDropReason | None = None
        if budget.open_at > now or not (budget.messages_open and budget.segments_open):
            reason = EphemeralDropReason.REACHED
        elif budget.approached:
            reason = EphemeralDropReason.APPROACHED
        if reason is None:
            budget.charge(message=True)
        else:
            self.dropped_ephemerals += 1
        return reason

    def restore(self, lane: str, queued: Iterable[QueuedSend]) -> None:
        """Queue what a store kept of an earlier run, in its order (C-227)."""
        queues = self._lane(lane)
        for record in sorted(queued, key=lambda record: record.position):
            queues.next_position = max(queues.next_position, record.position + 1)
            self._append(
                queues,
                Transmission(
                    lane=lane,
                    message_id=record.message_id,
                    priority=Priority.CONTENT,
                    opens_message=record.opens_message,
                    position=record.position,
                ),
            )

    # What goes out.

    def heads(self, lane: str) -> list[Transmission]:
        """What is at the head of each of a lane's queues: `take` gives one of these next, if of this lane."""
        queues = self._lanes.get(lane)
        return [] if queues is None else [queue[0] for queue in queues.queues if queue]

    def take(self, now: int, *, ready: Container[str] | None = None) -> Transmission | None:
        """The transmission that may go now, charged to the budgets; None if none may.

        With `ready` only the lanes in it are looked at: the others have to prepare what they would send.

        Then say what became of it: `sent`, `put_back` or `withdraw`. Until then it is stored as queued, so
        a crash in between sends it again and does not lose it.
        """
        budget = self._budget
        budget.advance(now)
        if budget.open_at > now or not budget.segments_open:
            return None
        for priority in Priority:
            if priority is Priority.RETRANSMISSION and budget.approached:
                continue
            for name, lane in self._lanes.items():
                queue = lane.queues[priority]
                if ready is not None and name not in ready:
                    continue
                if queue and self._may_go(queue[0]):
                    self._lanes.move_to_end(name)
                    return self._pop(lane, queue)
        return None

    def sent(self, transmission: Transmission) -> None:
        """It was dispatched: the store may forget it."""
        lane = self._lanes.get(transmission.lane)
        if lane is not None and transmission.position:
            lane.changes.append(remove(QueuedSend, str(transmission.position)))

    def put_back(self, transmission: Transmission) -> None:
        """It was not dispatched, a relay being full: it takes its place again (C-232).

        In the epoch it was taken in, its message is not charged again.
        """
        lane = self._lanes.get(transmission.lane)
        if lane is None:
            return
        queue = lane.queues[transmission.priority]
        # Several may come back, in whatever order: chunks leave by position (C-069).
        place = bisect_left(queue, transmission.position, key=lambda waiting: waiting.position)
        queue.insert(place, transmission)
        lane.ids.add((transmission.priority, transmission.message_id))

    def withdraw(self, lane: str, message_id: str) -> None:
        """Take a message out of its lane: it was acknowledged meanwhile, or failed for good."""
        queues = self._lanes.get(lane)
        if queues is None:
            return
        for priority, queue in zip(Priority, queues.queues, strict=True):
            if (priority, message_id) not in queues.ids:
                continue
            queues.ids.discard((priority, message_id))
            for transmission in [waiting for waiting in queue if waiting.message_id == message_id]:
                queue.remove(transmission)
                if transmission.position:
                    queues.changes.append(remove(QueuedSend, str(transmission.position)))

    def close_lane(self, lane: str) -> None:
        """Forget a channel's lane; what a store has of its queue stays there."""
        self._lanes.pop(lane, None)

    # What a relay says.

    def pause(self, now: int, retry_after_ms: int) -> None:
        """A relay answered `rate_limited`: nothing goes for so long (C-232)."""
        self._budget.advance(now)
        self._budget.pause(retry_after_ms)

    def learn_limit(self, limit: int, window_ms: int) -> None:
        """A relay declared, or proved, to take so many in such a time; the strictest known holds (C-221)."""
        self._budget.learn_limit(limit, window_ms)

    # What can be known.

    def get_timer(self) -> int | None:
        """When `take` may have something; a time that has passed means now, None that nothing waits."""
        times = [
            self._allowed_at(lane.queues[priority][0])
            for lane in self._lanes.values()
            for priority in Priority
            if lane.queues[priority]
        ]
        return min(times, default=None)

    def utilisation(self, now: int) -> int:
        """How much of the fuller budget this epoch has used, from 0 to 100 (C-233)."""
        self._budget.advance(now)
        return self._budget.utilisation

    def queued(self, lane: str, priority: Priority = Priority.CONTENT) -> int:
        """How many transmissions of this kind wait in a lane."""
        queues = self._lanes.get(lane)
        return 0 if queues is None else len(queues.queues[priority])

    def changes_to_store(self, lane: str) -> list[Change]:
        """What a store has to do to hold a lane's queue, since the last call."""
        queues = self._lanes.get(lane)
        if queues is None:
            return []
        changes, queues.changes = queues.changes, []
        return changes

    def counts_to_store(self) -> list[Change]:
        """What a store has to do to hold the epoch's count, since the last call (C-235)."""
        count = self._budget.count
        if count == self._stored_count or count.epoch < 0:
            return []
        self._stored_count = count
        return [put(count)]

    # Inside.

    def _lane(self, name: str) -> _Lane:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane()
        return lane

    def _append(self, lane: _Lane, transmission: Transmission) -> None:
        lane.queues[transmission.priority].append(transmission)
        lane.ids.add((transmission.priority, transmission.message_id))

    def _pop(self, lane: _Lane, queue: deque[Transmission]) -> Transmission:
        transmission = queue.popleft()
        lane.ids.discard((transmission.priority, transmission.message_id))
        message = self._needs_message_budget(transmission)
        self._budget.charge(message=message)
        return replace(transmission, counted_in=self._budget.epoch) if message else transmission

    def _may_go(self, transmission: Transmission) -> bool:
        return self._budget.messages_open or not self._needs_message_budget(transmission)

    def _needs_message_budget(self, transmission: Transmission) -> bool:
        if transmission.priority is not Priority.CONTENT or transmission.counted_in == self._budget.epoch:
            return False
        return transmission.opens_message or self._config.chunk_accounting == "each"

    def _allowed_at(self, transmission: Transmission) -> int:
        budget = self._budget
        waits = not budget.segments_open or not self._may_go(transmission)
        if transmission.priority is Priority.RETRANSMISSION:
            waits = waits or budget.approached
        return max(budget.open_at, budget.next_epoch_at) if waits else budget.open_at


def _record(transmission: Transmission) -> QueuedSend:
    return QueuedSend(transmission.position, transmission.message_id, transmission.opens_message)
