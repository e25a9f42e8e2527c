"""The state that must survive a restart, as records that are written individually (C-248, A-148).

`Participant.changes` returns the changes since the last call. Each stores a record under its kind and key, or
removes one. Applying a change twice does no harm. Changes to one key are merged, so the cost of writing
depends on the changes and not on the size of the log. All changes of one call belong in one transaction.

The filter and the debts of acknowledgement are not stored: the filter follows from the other records, and
the next sync settles the debts.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from strata.channels.sds.bodies import Body, Keyframe

__all__ = [
    "RECORDS",
    "BodyRecord",
    "Change",
    "ClockRecord",
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
    """A logged message that no other message names (`strata.channels.sds.history.Unreferenced`)."""

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
        config: Any = kind.__struct_config__
        return list(self._tables[config.tag].values())  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SdsState) and self._tables == other._tables

    __hash__ = None  # type: ignore[assignment]
