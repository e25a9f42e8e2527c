"""Read access to a participant: its log, the missing and waiting messages, the outgoing messages."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable

from strata.channels.sds.events import SdsStatistics, WaitingMessage
from strata.channels.sds.incoming import IncomingBuffer, Waiting
from strata.channels.sds.log import History, LoggedMessage
from strata.channels.sds.messages import HistoryEntry, SdsMessage
from strata.channels.sds.outgoing import OutgoingBuffer, OutgoingState, WireCache
from strata.channels.sds.repair import RepairBuffers
from strata.channels.sds.timing import SteadyClock

__all__ = ["Looking"]


class Looking:
    """The queries that a participant answers about itself. `Participant` provides the parts."""

    statistics: SdsStatistics
    _clock: SteadyClock
    _history: History
    _incoming: IncomingBuffer
    _outgoing: OutgoingBuffer
    _repair: RepairBuffers
    _wire_cache: WireCache

    def log(self) -> list[HistoryEntry]:
        """The whole log, in the order that all participants share. The cost grows with its length."""
        return [entry.as_history() for entry in self._history.log.ordered()]

    def encoded(self, message_id: str) -> bytes | None:
        """A logged or unacknowledged message as it travels, byte for byte; None if it is unknown.

        After a restart, own messages that had not been dispatched are sent as these bytes.
        """
        if (data := self._wire_cache.get(message_id)) is not None:
            return data
        kept = self._outgoing.get(message_id) or self._history.log.get(message_id)
        return None if kept is None else kept.body.restore()

    def message(self, message_id: str) -> SdsMessage | None:
        """A logged or unacknowledged message; None if it is unknown."""
        data = self.encoded(message_id)
        return None if data is None else SdsMessage.read(data)

    def place(self, message_ids: Iterable[str]) -> tuple[int, str] | None:
        """The place of the first of these messages in the order of `log`: its Lamport time and its id.

        None if none of them is remembered.
        """
        known = ((self._history.known.get(each), each) for each in message_ids)
        return min(((found[0], each) for found, each in known if found is not None), default=None)

    def counts(self) -> tuple[int, int, int]:
        """The counts of others' messages received (including held ones), missing, and given up."""
        incoming = self._incoming
        return (
            self.statistics.delivered + len(incoming.waiting),
            len(incoming.missing),
            len(incoming.lost),
        )

    def retrieval_hint(self, message_id: str) -> bytes | None:
        """The hint by which a store finds a logged message; None if it is not known."""
        entry = self._history.log.get(message_id)
        return None if entry is None else entry.hint

    def knows(self, message_id: str) -> bool:
        """Whether a message is in the log, or was."""
        return message_id in self._history.known

    def is_here(self, message_id: str) -> bool:
        """Whether a message was received and is no longer wanted: it is known, or waits for others."""
        return message_id in self._history.known or message_id in self._incoming.waiting

    def missing(self) -> list[HistoryEntry]:
        """Messages that others name and that have not arrived, longest missing first."""
        return [missing.entry for missing in self._incoming.missing.values()]

    def released(self) -> frozenset[str]:
        """The missing messages that no message waits for any more."""
        return frozenset(id_ for id_, missing in self._incoming.missing.items() if missing.released)

    def missing_since(self) -> dict[str, int]:
        """When each missing message was first found missing, in wall milliseconds."""
        return {
            message_id: self._clock.was_at(missing.first_missing_at)
            for message_id, missing in self._incoming.missing.items()
        }

    def waiting(self) -> list[WaitingMessage]:
        """Received messages that wait for others, in the order of their arrival."""
        return [
            WaitingMessage(
                each.message_id,
                each.sender_id,
                each.lamport,
                tuple(sorted(each.unmet)),
                self._clock.was_at(each.received_at),
            )
            for each in self._incoming.waiting.values()
        ]

    def repair_requests(self) -> dict[str, int]:
        """`T_req` of each missing message: when to request it from others, in wall milliseconds (C-156)."""
        return {key: self._clock.was_at(at) for key, at in self._repair.requests.times().items()}

    def repair_responses(self) -> dict[str, int]:
        """`T_resp` of each requested message: when to send it again, in wall milliseconds (C-157)."""
        return {key: self._clock.was_at(at) for key, at in self._repair.responses.times().items()}

    def outgoing(self) -> dict[str, OutgoingState]:
        """The own messages that are not acknowledged, and the state of each."""
        return self._outgoing.states()

    def is_outgoing(self, message_id: str) -> bool:
        """Whether this is one of our messages that is not acknowledged."""
        return message_id in self._outgoing

    def undispatched(self) -> list[str]:
        """The own messages that have never gone out, in the order in which they were wrapped."""
        return self._outgoing.undispatched()

    def last_before(self, lamport: int) -> LoggedMessage | None:
        """The latest logged message with a Lamport time before `lamport`."""
        found = self._history.log.recent(1, lamport - 1, dispatched_only=False)
        return found[0] if found else None

    @property
    def is_waiting(self) -> bool:
        """Whether any received message waits for others."""
        return bool(self._incoming.waiting)

    @property
    def is_crowded(self) -> bool:
        """Whether little room is left for messages that wait for others."""
        return self._incoming.is_crowded

    def first_waiting(self) -> Waiting | None:
        """The first message, in the order that all share, that waits for others."""
        return min(self._incoming.waiting.values(), key=Waiting.log_order, default=None)
