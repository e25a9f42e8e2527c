"""When each transmission may go (channel.md §11).

One `RateLimiter` serves one transport identity, and all channels with this identity share it (C-234). Each
channel has a *lane* with its own bounded queues, and lanes with waiting transmissions take turns. The limiter
is the last step before dispatch (A-121). There is no clock: `now` is Unix time in milliseconds, and
`get_timer` says when to call `take`.

Two budgets are refilled at each epoch:

- messages: the first chunk of each message, or every chunk (`chunk_accounting="each"`). It delays messages.
- segments: every transmission of any kind, if the transport has a limit. It paces chunks (A-118).

    kind                    budgets it needs     goes while                       otherwise
    first transmission      messages, segments   there is any budget (C-226)      waits, in order
    retransmission          segments             below the threshold (C-091)      waits
    sync, repair            segments             no first transmission could go   waits
    ephemeral               messages, segments   below the threshold (C-181)      is dropped at once

A relay that answers `rate_limited` pauses all transmissions. A limit that a transport declares applies from
the beginning.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from strata.channels.persistence.interface import Change
from strata.channels.persistence.records import EpochCount, QueuedSend, put, remove
from strata.channels.rate_limit.budget import TransportBudget
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
    """The waiting transmissions of one channel."""

    __slots__ = ("changes", "ids", "next_position", "queues")

    def __init__(self) -> None:
        self.queues: tuple[deque[Transmission], ...] = (deque(), deque(), deque())
        self.ids: dict[tuple[Priority, str], int] = {}
        """The waiting transmissions, each with its position."""
        self.next_position = 1
        self.changes: list[Change] = []


class RateLimiter:
    """The budgets of one transport identity, and the queues before it."""

    def __init__(
        self, config: RateLimitConfig = DEFAULT_RATE_LIMIT_CONFIG, *, counted: EpochCount | None = None
    ) -> None:
        """`counted` is the stored count of an earlier run (C-235)."""
        self.config = config
        self._budget = TransportBudget(config, counted)
        self._stored_count = counted
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()  # the lane with the next turn comes first
        self.dropped_ephemerals = 0
        self.refused_background = 0

    # Queueing.

    def check_room(self, lane: str, count: int) -> None:
        """Raise `SendQueueFull` unless `count` more first transmissions can be queued."""
        waiting = len(self._lane(lane).queues[Priority.CONTENT])
        if waiting + count > self.config.max_queued:
            raise SendQueueFull(lane, waiting, self.config.max_queued)

    def offer(self, lane: str, message_ids: Sequence[str], *, opens_message: bool = True) -> None:
        """Queue the first transmissions of chunks: all, or none, and then raise `SendQueueFull` (C-227).

        With `opens_message` false, these are later chunks of a message whose first chunk was already charged.
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
        """Queue a retransmission, sync or repair. It is not stored, since a restart makes it again.

        Returns False if it is already waiting, or if too many are.
        """
        queues = self._lane(lane)
        if (priority, message_id) in queues.ids:
            return False
        if len(queues.queues[priority]) >= self.config.max_queued:
            self.refused_background += 1
            return False
        self._append(queues, Transmission(lane=lane, message_id=message_id, priority=priority))
        return True

    def admit_ephemeral(self, now: int) -> EphemeralDropReason | None:
        """Charge an ephemeral message, which is sent at once, or return why it must be dropped (C-181)."""
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
        """Queue the stored transmissions of an earlier run, in order (C-227)."""
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

    # Taking.

    def heads(self, lane: str) -> list[Transmission]:
        """The first transmission of each queue of a lane; the next one that `take` returns is among these."""
        queues = self._lanes.get(lane)
        return [] if queues is None else [queue[0] for queue in queues.queues if queue]

    def waits(self, lane: str) -> bool:
        """Whether a lane has a waiting transmission."""
        queues = self._lanes.get(lane)
        return queues is not None and any(queues.queues)

    def take(self, now: int, *, ready: Container[str] | None = None) -> Transmission | None:
        """Remove and return a transmission that may go now, charged to the budgets; None if none may go.

        With `ready` only these lanes are considered; the others have yet to prepare their transmissions.

        Report the outcome with `sent`, `put_back` or `withdraw`. Until then the transmission is stored as
        queued, so that after a crash it is sent again and not lost.
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
        """Report that a transmission was dispatched: the store may forget it."""
        lane = self._lanes.get(transmission.lane)
        if lane is not None and transmission.position:
            lane.changes.append(remove(QueuedSend, str(transmission.position)))

    def put_back(self, transmission: Transmission) -> None:
        """Return a transmission to its place, since a relay was full and it was not dispatched (C-232).

        In the epoch in which it was taken, its message is not charged again.
        """
        lane = self._lanes.get(transmission.lane)
        if lane is None:
            return
        queue = lane.queues[transmission.priority]
        # Several may come back, in any order, but chunks leave by position (C-069).
        place = bisect_left(queue, transmission.position, key=lambda waiting: waiting.position)
        queue.insert(place, transmission)
        lane.ids[transmission.priority, transmission.message_id] = transmission.position

    def withdraw(self, lane: str, message_id: str) -> None:
        """Remove a message from its lane, since it was acknowledged in the meantime or failed permanently."""
        queues = self._lanes.get(lane)
        if queues is None:
            return
        for priority, queue in zip(Priority, queues.queues, strict=True):
            position = queues.ids.pop((priority, message_id), None)
            if position is None:
                continue
            if position:
                del queue[bisect_left(queue, position, key=lambda waiting: waiting.position)]
                queues.changes.append(remove(QueuedSend, str(position)))
            else:
                queue.remove(next(waiting for waiting in queue if waiting.message_id == message_id))

    def close_lane(self, lane: str) -> None:
        """Forget a channel's lane; its stored queue stays in the store."""
        self._lanes.pop(lane, None)

    # Limits of a relay.

    def pause(self, now: int, retry_after_ms: int) -> None:
        """Stop all transmissions for this time, since a relay answered `rate_limited` (C-232)."""
        self._budget.advance(now)
        self._budget.pause(retry_after_ms)

    def learn_limit(self, limit: int, window_ms: int) -> None:
        """Keep to `limit` transmissions per `window_ms`, if no stricter limit is known (C-221, C-225)."""
        self._budget.learn_limit(limit, window_ms)

    # Queries.

    def get_timer(self, after: float = -math.inf) -> int | None:
        """When to call `take`, later than `after`. A time in the past means now; None: nothing waits for a
        later time."""
        times = [
            self._allowed_at(queue[0]) for lane in self._lanes.values() for queue in lane.queues if queue
        ]
        return min((at for at in times if at > after), default=None)

    def utilisation(self, now: int) -> int:
        """The used part of the fuller budget in this epoch, in percent (C-233)."""
        self._budget.advance(now)
        return self._budget.utilisation

    def queued(self, lane: str, priority: Priority = Priority.CONTENT) -> int:
        """The number of transmissions of this priority that wait in a lane."""
        queues = self._lanes.get(lane)
        return 0 if queues is None else len(queues.queues[priority])

    def changes_to_store(self, lane: str) -> list[Change]:
        """Return the changes to a lane's stored queue since the last call."""
        queues = self._lanes.get(lane)
        if queues is None:
            return []
        changes, queues.changes = queues.changes, []
        return changes

    def counts_to_store(self) -> list[Change]:
        """Return the changes to the stored count since the last call (C-235)."""
        count = self._budget.count
        if count == self._stored_count or count.epoch < 0:
            return []
        self._stored_count = count
        return [put(count)]

    def _lane(self, name: str) -> _Lane:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane()
        return lane

    def _append(self, lane: _Lane, transmission: Transmission) -> None:
        lane.queues[transmission.priority].append(transmission)
        lane.ids[transmission.priority, transmission.message_id] = transmission.position

    def _pop(self, lane: _Lane, queue: deque[Transmission]) -> Transmission:
        transmission = queue.popleft()
        lane.ids.pop((transmission.priority, transmission.message_id), None)
        message = self._needs_message_budget(transmission)
        self._budget.charge(message=message)
        return replace(transmission, counted_in=self._budget.epoch) if message else transmission

    def _may_go(self, transmission: Transmission) -> bool:
        return self._budget.messages_open or not self._needs_message_budget(transmission)

    def _needs_message_budget(self, transmission: Transmission) -> bool:
        if transmission.priority is not Priority.CONTENT or transmission.counted_in == self._budget.epoch:
            return False
        return transmission.opens_message or self.config.chunk_accounting == "each"

    def _allowed_at(self, transmission: Transmission) -> int:
        budget = self._budget
        waits = not budget.segments_open or not self._may_go(transmission)
        if transmission.priority is Priority.RETRANSMISSION:
            waits = waits or budget.approached
        return max(budget.open_at, budget.next_epoch_at) if waits else budget.open_at


def _record(transmission: Transmission) -> QueuedSend:
    return QueuedSend(transmission.position, transmission.message_id, transmission.opens_message)
