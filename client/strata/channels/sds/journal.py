"""Which records are out of date, and making them anew when asked: O(changes), whatever the log holds."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable

from strata.channels.sds.incoming import IncomingBuffer
from strata.channels.sds.ledger import Ledger
from strata.channels.sds.outgoing import OutgoingBuffer
from strata.channels.sds.repair import RepairBuffers
from strata.channels.sds.state import (
    BodyRecord,
    Change,
    ClockRecord,
    KeyframeRecord,
    KnownRecord,
    LogRecord,
    LostRecord,
    MissingRecord,
    OutgoingRecord,
    Record,
    RequestRecord,
    ResponseRecord,
    TipRecord,
    WaitingRecord,
)

__all__ = ["Journal"]


class Journal:
    """Marks of what changed, and the way from a mark to its record."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, str], None] = {}
        self._last_clock: ClockRecord | None = None

    def mark(self, kind: str, key: str) -> None:
        """This record may differ from what was last taken."""
        self._marks[kind, key] = None

    def take(
        self,
        clock: ClockRecord,
        ledger: Ledger,
        outgoing: OutgoingBuffer,
        incoming: IncomingBuffer,
        repair: RepairBuffers,
    ) -> list[Change]:
        """Everything that changed since the last call. Keyframes come first: bodies refer to them."""
        makers: dict[str, Callable[[str], Record | None]] = {
            "log": lambda key: _log_record(key, ledger),
            "known": lambda key: _known_record(key, ledger),
            "tip": lambda key: _tip_record(key, ledger),
            "outgoing": lambda key: _outgoing_record(key, outgoing),
            "waiting": lambda key: _waiting_record(key, incoming),
            "missing": lambda key: _missing_record(key, incoming),
            "lost": lambda key: LostRecord(key) if key in incoming.lost else None,
            "request": lambda key: _request_record(key, repair),
            "response": lambda key: _response_record(key, repair),
        }
        archive = ledger.archive
        died = set(archive.died)
        changes = [
            Change("keyframe", str(keyframe.number), KeyframeRecord(keyframe.number, keyframe.data))
            for keyframe in archive.born
            if keyframe.number not in died
        ]
        changes += [Change(kind, key, makers[kind](key)) for kind, key in self._marks]
        changes += [Change("keyframe", str(number), None) for number in archive.died]
        archive.born.clear()
        archive.died.clear()
        self._marks.clear()
        if clock != self._last_clock:
            self._last_clock = clock
            changes.append(Change("clock", "", clock))
        return changes


def _log_record(key: str, ledger: Ledger) -> Record | None:
    entry = ledger.log.get(key)
    if entry is None:
        return None
    return LogRecord(
        key,
        entry.sender_id,
        entry.lamport,
        entry.arrival,
        entry.hint,
        entry.own,
        entry.floor,
        entry.run,
        entry.dispatched,
        BodyRecord.of(entry.body),
    )


def _known_record(key: str, ledger: Ledger) -> Record | None:
    known = ledger.known.get(key)
    return KnownRecord(key, *known) if known is not None and key not in ledger.log else None


def _tip_record(key: str, ledger: Ledger) -> Record | None:
    since = ledger.tips.get(key)
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
    return WaitingRecord(
        key,
        waiting.sender_id,
        waiting.lamport,
        tuple(sorted(waiting.unmet)),
        waiting.hint,
        waiting.received_at,
        BodyRecord.of(waiting.body),
    )


def _missing_record(key: str, incoming: IncomingBuffer) -> Record | None:
    missing = incoming.missing.get(key)
    if missing is None:
        return None
    return MissingRecord(key, missing.entry.retrieval_hint, missing.entry.sender_id, missing.first_missing_at)


def _request_record(key: str, repair: RepairBuffers) -> Record | None:
    request = repair.requests.get(key)
    if request is None:
        return None
    return RequestRecord(key, request[1].retrieval_hint, request[1].sender_id, request[0])


def _response_record(key: str, repair: RepairBuffers) -> Record | None:
    response = repair.responses.get(key)
    return None if response is None else ResponseRecord(key, response[0])
