"""The state that must survive a restart, as records that are written individually (C-248, A-148).

`Participant.changes` returns the changes since the last call. Each stores a record under its kind and key, or
removes one. Applying a change twice does no harm. Changes to one key are merged, so the cost of writing
depends on the changes and not on the size of the log. All changes of one call belong in one transaction.

The filter and the debts of acknowledgement are not stored: the filter follows from the other records, and
the next sync settles the debts.

`Journal` notes which records are out of date, and makes those again on demand. `restore` fills the empty
parts of a participant from all its records.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from strata.channels.sds.bloom import BloomParameters
from strata.channels.sds.bodies import Archive, Body, Keyframe
from strata.channels.sds.events import Origin
from strata.channels.sds.incoming import IncomingBuffer, Missing, Reception, Waiting
from strata.channels.sds.log import NO_HORIZON, History, LoggedMessage
from strata.channels.sds.messages import HistoryEntry
from strata.channels.sds.outgoing import Outgoing, OutgoingBuffer, OutgoingState
from strata.channels.sds.repair import RepairBuffers

__all__ = [
    "RECORDS",
    "BodyRecord",
    "Change",
    "ClockRecord",
    "Journal",
    "KeyframeRecord",
    "KnownRecord",
    "LogRecord",
    "LostRecord",
    "MissingRecord",
    "OutgoingRecord",
    "Record",
    "RequestRecord",
    "ResponseRecord",
    "SdsState",
    "TipRecord",
    "WaitingRecord",
    "restore",
]


class BodyRecord(msgspec.Struct, frozen=True, array_like=True):
    """A message's bytes: those around the filter, and the filter as its difference from a keyframe."""

    head: bytes
    tail: bytes
    keyframe: int | None
    delta: bytes

    @classmethod
    def of(cls, body: Body) -> BodyRecord:
        """The record of a body."""
        return cls(body.head, body.tail, body.keyframe.number if body.keyframe else None, body.delta)

    def restore(self, keyframes: dict[int, Keyframe]) -> Body:
        """The body of a record. Raises `KeyError` if its keyframe is missing."""
        keyframe = None if self.keyframe is None else keyframes[self.keyframe]
        return Body(self.head, self.tail, keyframe, self.delta)


class ClockRecord(msgspec.Struct, frozen=True, tag="clock"):
    """The numbers that only grow."""

    lamport: int
    own_count: int
    last_arrival: int
    horizon: int


class KeyframeRecord(msgspec.Struct, frozen=True, tag="keyframe"):
    """A filter from which the filters of bodies differ."""

    number: int
    data: bytes


class LogRecord(msgspec.Struct, frozen=True, tag="log"):
    """A logged message; the retrieval hint is the map of C-254."""

    message_id: str
    sender_id: str
    lamport: int
    arrival: int
    retrieval_hint: bytes | None
    own: int
    floor: int
    run: int
    dispatched: bool
    body: BodyRecord


class KnownRecord(msgspec.Struct, frozen=True, tag="known"):
    """The id of a message that has left the log."""

    message_id: str
    lamport: int
    arrival: int


class TipRecord(msgspec.Struct, frozen=True, tag="tip"):
    """A logged message that no other message names (`strata.channels.sds.log.Unreferenced`)."""

    message_id: str
    since: int


class OutgoingRecord(msgspec.Struct, frozen=True, tag="outgoing"):
    """One of our messages that is not acknowledged. `body` is present only if it has left the log."""

    message_id: str
    number: int
    state: str
    dispatched_at: int | None
    retries: int
    seen_in: tuple[tuple[str, int], ...]
    body: BodyRecord | None


class WaitingRecord(msgspec.Struct, frozen=True, tag="waiting"):
    """A received message that waits for its dependencies."""

    message_id: str
    sender_id: str
    lamport: int
    unmet: tuple[str, ...]
    retrieval_hint: bytes | None
    received_at: int
    body: BodyRecord
    author: str | None = None
    sent_at: int | None = None
    alone: bool = False
    stored: bool = False
    stored_at: int | None = None


class MissingRecord(msgspec.Struct, frozen=True, tag="missing"):
    """A message that others name and that has not arrived."""

    message_id: str
    retrieval_hint: bytes | None
    sender_id: str | None
    first_missing_at: int
    released: bool = False
    told: bool = False


class LostRecord(msgspec.Struct, frozen=True, tag="lost"):
    """A message that was given up, or not wanted from the beginning."""

    message_id: str
    unwanted: bool = False


class RequestRecord(msgspec.Struct, frozen=True, tag="request"):
    """A message to request from others, and the time (outgoing repair buffer)."""

    message_id: str
    retrieval_hint: bytes | None
    sender_id: str | None
    at: int


class ResponseRecord(msgspec.Struct, frozen=True, tag="response"):
    """A message to send again for others, and the time (incoming repair buffer)."""

    message_id: str
    at: int


Record = (
    ClockRecord
    | KeyframeRecord
    | LogRecord
    | KnownRecord
    | TipRecord
    | OutgoingRecord
    | WaitingRecord
    | MissingRecord
    | LostRecord
    | RequestRecord
    | ResponseRecord
)

RECORDS: dict[str, type[Record]] = {
    "clock": ClockRecord,
    "keyframe": KeyframeRecord,
    "log": LogRecord,
    "known": KnownRecord,
    "tip": TipRecord,
    "outgoing": OutgoingRecord,
    "waiting": WaitingRecord,
    "missing": MissingRecord,
    "lost": LostRecord,
    "request": RequestRecord,
    "response": ResponseRecord,
}
"""Every kind of record with its type, with which a backend decodes the bytes that it stored."""

R = TypeVar("R", bound=Record)


class Change(msgspec.Struct, frozen=True):
    """Store this record under its kind and key; with None, delete the stored one."""

    kind: str
    key: str
    record: Record | None


class SdsState:
    """All records that a participant has stored: the sum of its changes."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self._tables: dict[str, dict[str, Record]] = {kind: {} for kind in RECORDS}
        self.apply(changes)

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes, in the order in which they were made."""
        for change in changes:
            if change.record is None:
                self._tables[change.kind].pop(change.key, None)
            else:
                self._tables[change.kind][change.key] = change.record

    def all(self, kind: type[R]) -> list[R]:
        """All records of a kind."""
        return list(self._tables[str(kind.__struct_config__.tag)].values())  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SdsState) and self._tables == other._tables

    __hash__ = None  # type: ignore[assignment]


class Journal:
    """The marks of records that changed, and the functions that make a record for a mark."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, str], None] = {}
        self._last_clock: ClockRecord | None = None
        self._archive: Archive
        self._makers: dict[str, Callable[[str], Record | None]] = {}

    def watch(
        self, history: History, outgoing: OutgoingBuffer, incoming: IncomingBuffer, repair: RepairBuffers
    ) -> None:
        """Read the records from these parts of a participant."""
        self._archive = history.archive
        self._makers = {
            "log": lambda key: _log_record(key, history),
            "known": lambda key: _known_record(key, history),
            "tip": lambda key: _tip_record(key, history),
            "outgoing": lambda key: _outgoing_record(key, outgoing),
            "waiting": lambda key: _waiting_record(key, incoming),
            "missing": lambda key: _missing_record(key, incoming),
            "lost": lambda key: LostRecord(key, incoming.lost[key]) if key in incoming.lost else None,
            "request": lambda key: _request_record(key, repair),
            "response": lambda key: _response_record(key, repair),
        }

    def mark(self, kind: str, key: str) -> None:
        """Note that a record may differ from the one last taken."""
        self._marks[kind, key] = None

    def take(self, clock: ClockRecord) -> list[Change]:
        """Return all changes since the last call. New keyframes come first, since bodies refer to them."""
        archive = self._archive
        if not self._marks and not archive.born and not archive.died and clock == self._last_clock:
            return []
        died = set(archive.died)
        changes = [
            Change("keyframe", str(keyframe.number), KeyframeRecord(keyframe.number, keyframe.data))
            for keyframe in archive.born
            if keyframe.number not in died
        ]
        changes += [Change(kind, key, self._makers[kind](key)) for kind, key in self._marks]
        changes += [Change("keyframe", str(number), None) for number in archive.died]
        archive.born.clear()
        archive.died.clear()
        self._marks.clear()
        if clock != self._last_clock:
            self._last_clock = clock
            changes.append(Change("clock", "", clock))
        return changes


def _log_record(key: str, history: History) -> Record | None:
    logged = history.log.get(key)
    if logged is None:
        return None
    return LogRecord(
        key,
        logged.sender_id,
        logged.lamport,
        logged.arrival,
        logged.hint,
        logged.own,
        logged.floor,
        logged.run,
        logged.dispatched,
        BodyRecord.of(logged.body),
    )


def _known_record(key: str, history: History) -> Record | None:
    known = history.known.get(key)
    return KnownRecord(key, *known) if known is not None and key not in history.log else None


def _tip_record(key: str, history: History) -> Record | None:
    since = history.unreferenced.since(key)
    return None if since is None else TipRecord(key, since)


def _outgoing_record(key: str, buffer: OutgoingBuffer) -> Record | None:
    outgoing = buffer.get(key)
    if outgoing is None:
        return None
    return OutgoingRecord(
        key,
        outgoing.number,
        outgoing.state.value,
        outgoing.dispatched_at,
        outgoing.retries,
        tuple(sorted(outgoing.seen_in)),
        BodyRecord.of(outgoing.body) if outgoing.owns_body else None,
    )


def _waiting_record(key: str, incoming: IncomingBuffer) -> Record | None:
    waiting = incoming.waiting.get(key)
    if waiting is None:
        return None
    reception = waiting.reception
    return WaitingRecord(
        key,
        waiting.sender_id,
        waiting.lamport,
        tuple(sorted(waiting.unmet)),
        reception.hint,
        waiting.received_at,
        BodyRecord.of(waiting.body),
        reception.origin.author,
        reception.origin.sent_at,
        waiting.alone,
        reception.stored,
        reception.origin.stored_at,
    )


def _missing_record(key: str, incoming: IncomingBuffer) -> Record | None:
    missing = incoming.missing.get(key)
    if missing is None:
        return None
    entry = missing.entry
    return MissingRecord(
        key,
        entry.retrieval_hint,
        entry.sender_id,
        missing.first_missing_at,
        missing.released,
        missing.told,
    )


def _request_record(key: str, repair: RepairBuffers) -> Record | None:
    request = repair.requests.get(key)
    if request is None:
        return None
    return RequestRecord(key, request[1].retrieval_hint, request[1].sender_id, request[0])


def _response_record(key: str, repair: RepairBuffers) -> Record | None:
    response = repair.responses.get(key)
    return None if response is None else ResponseRecord(key, response[0])


def restore(
    state: SdsState,
    parameters: BloomParameters,
    now: int,
    history: History,
    outgoing: OutgoingBuffer,
    incoming: IncomingBuffer,
    repair: RepairBuffers,
) -> ClockRecord:
    """Fill the empty parts of a participant, and return the numbers it continues from."""
    clock = next(iter(state.all(ClockRecord)), ClockRecord(0, 0, 0, NO_HORIZON))
    keyframes = {each.number: Keyframe(each.number, each.data) for each in state.all(KeyframeRecord)}
    history.log.last_arrival = clock.last_arrival
    history.known.horizon = clock.horizon
    for record in sorted(state.all(KnownRecord), key=lambda each: each.arrival):
        history.known.add(record.message_id, record.lamport, record.arrival)
        history.filter.insert(record.message_id)
    _restore_log(state, keyframes, history)
    for tip in sorted(state.all(TipRecord), key=lambda each: each.since):
        history.unreferenced.restore(tip.message_id, min(tip.since, now))
    _restore_outgoing(state, keyframes, parameters, history, outgoing, now)
    for waiting in sorted(state.all(WaitingRecord), key=lambda each: each.received_at):
        body = waiting.body.restore(keyframes)
        history.archive.adopt(body)
        history.filter.insert(waiting.message_id)
        origin = Origin(waiting.author, waiting.sent_at, stored_at=waiting.stored_at)
        incoming.hold(
            Waiting(
                waiting.message_id,
                waiting.sender_id,
                waiting.lamport,
                body,
                set(waiting.unmet),
                Reception(waiting.retrieval_hint, origin, waiting.stored),
                received_at=min(waiting.received_at, now),
                alone=waiting.alone,
            )
        )
    for missing in sorted(state.all(MissingRecord), key=lambda each: each.first_missing_at):
        entry = HistoryEntry(missing.message_id, missing.retrieval_hint, missing.sender_id)
        kept = incoming.missing[missing.message_id] = Missing(entry, min(missing.first_missing_at, now), now)
        kept.released, kept.told = missing.released, missing.told
    incoming.lost.update((each.message_id, each.unwanted) for each in state.all(LostRecord))
    _restore_repair(state, repair, now)
    return clock


def _restore_log(state: SdsState, keyframes: dict[int, Keyframe], history: History) -> None:
    for record in sorted(state.all(LogRecord), key=lambda each: each.arrival):
        body = record.body.restore(keyframes)
        history.archive.adopt(body)
        history.log.add(
            LoggedMessage(
                record.message_id,
                record.sender_id,
                record.lamport,
                body,
                arrival=record.arrival,
                hint=record.retrieval_hint,
                own=record.own,
                floor=record.floor,
                run=record.run,
                dispatched=record.dispatched,
            )
        )
        history.known.add(record.message_id, record.lamport, record.arrival)
        if record.dispatched:
            history.filter.insert(record.message_id)


def _restore_outgoing(
    state: SdsState,
    keyframes: dict[int, Keyframe],
    parameters: BloomParameters,
    history: History,
    outgoing: OutgoingBuffer,
    now: int,
) -> None:
    for record in sorted(state.all(OutgoingRecord), key=lambda each: each.number):
        logged = history.log.get(record.message_id)
        if record.body is not None:
            body = record.body.restore(keyframes)
            history.archive.adopt(body)
        elif logged is not None:
            body = logged.body
        else:
            continue
        restored = Outgoing(record.message_id, record.number, body, parameters.positions(record.message_id))
        restored.owns_body = record.body is not None
        restored.state = OutgoingState(record.state)
        restored.dispatched_at = record.dispatched_at
        restored.retries = record.retries
        restored.seen_in = set(record.seen_in)
        outgoing.restore(restored, now)


def _restore_repair(state: SdsState, repair: RepairBuffers, now: int) -> None:
    for request in state.all(RequestRecord):
        entry = HistoryEntry(request.message_id, request.retrieval_hint, request.sender_id)
        repair.requests.put(request.message_id, repair.within_reach(request.at, now), entry)
    for response in state.all(ResponseRecord):
        repair.responses.put(response.message_id, repair.within_reach(response.at, now), None)
    # Requests that had been left to other participants are scheduled again.
    for missing in state.all(MissingRecord):
        repair.want(HistoryEntry(missing.message_id, missing.retrieval_hint, missing.sender_id), now)
