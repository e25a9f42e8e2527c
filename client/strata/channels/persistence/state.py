"""The whole state of a participant: the records of SDS and of the channel, in one store (C-248, C-250).

    await store.apply(participant, [*sds_changes(sds.changes()), *reassembler.changes_to_store()])
    state = ChannelState.read(await store.load(participant))

All changes of one step belong in one `apply`. A crash then leaves either all of the step or nothing of it,
and no message is delivered by SDS but missing from reassembly (C-255).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from strata.channels.persistence.interface import Change, CorruptStore, Put, Raise, Remove, StoredState
from strata.channels.persistence.records import (
    EpochCount,
    InboxMessage,
    PartialSegment,
    QueryMark,
    QueuedSend,
    Record,
    RequestName,
    SegmentsFinished,
    SegmentsGivenUp,
    SenderName,
    SentChunk,
    read_records,
)
from strata.channels.sds import state as sds

__all__ = ["LAMPORT", "ChannelState", "sds_changes"]

LAMPORT = "lamport"
"""The counter that keeps the Lamport time in SDS's clock record from falling."""

_SDS_PREFIX = "sds."
_ENCODER = msgspec.msgpack.Encoder()

_FIELDS: dict[str, type[Record]] = {
    "sent_chunks": SentChunk,
    "segments": PartialSegment,
    "segments_finished": SegmentsFinished,
    "segments_given_up": SegmentsGivenUp,
    "queue": QueuedSend,
    "epochs": EpochCount,
    "inbox": InboxMessage,
    "query_marks": QueryMark,
    "request_names": RequestName,
    "sender_names": SenderName,
}


def sds_changes(changes: Iterable[sds.Change]) -> list[Change]:
    """Convert the changes that a `Participant` reported to changes of a store."""
    found: list[Change] = []
    for change in changes:
        kind = _SDS_PREFIX + change.kind
        if change.record is None:
            found.append(Remove(kind, change.key))
            continue
        found.append(Put(kind, change.key, _ENCODER.encode(change.record)))
        if isinstance(change.record, sds.ClockRecord):
            found.append(Raise(LAMPORT, change.record.lamport))
    return found


@dataclass(slots=True)
class ChannelState:
    """The state of a participant, as structs. Each mapping keeps the order of the records' first put."""

    sds: sds.SdsState = field(default_factory=sds.SdsState)
    sent_chunks: dict[str, SentChunk] = field(default_factory=dict)
    segments: dict[str, PartialSegment] = field(default_factory=dict)
    segments_finished: dict[str, SegmentsFinished] = field(default_factory=dict)
    segments_given_up: dict[str, SegmentsGivenUp] = field(default_factory=dict)
    queue: dict[str, QueuedSend] = field(default_factory=dict)
    epochs: dict[str, EpochCount] = field(default_factory=dict)
    inbox: dict[str, InboxMessage] = field(default_factory=dict)
    query_marks: dict[str, QueryMark] = field(default_factory=dict)
    request_names: dict[str, RequestName] = field(default_factory=dict)
    sender_names: dict[str, SenderName] = field(default_factory=dict)
    other: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Records of kinds that neither this module nor SDS knows, by kind and key."""

    @classmethod
    def read(cls, stored: StoredState) -> ChannelState:
        """Read the structs in a loaded state. Raises `CorruptStore` for a record that cannot be read."""
        known: dict[str, Any] = {
            name: read_records(kind, stored.records.get(kind.KIND, {})) for name, kind in _FIELDS.items()
        }
        kinds = {kind.KIND for kind in _FIELDS.values()} | {_SDS_PREFIX + kind for kind in sds.RECORDS}
        other = {kind: records for kind, records in stored.records.items() if kind not in kinds}
        return cls(sds=_sds_state(stored), other=other, **known)


def _sds_state(stored: StoredState) -> sds.SdsState:
    state = sds.SdsState()
    lamport = stored.counters.get(LAMPORT, 0)
    for kind in sds.RECORDS:
        for key, record in _read_sds(kind, stored.records.get(_SDS_PREFIX + kind, {})).items():
            if isinstance(record, sds.ClockRecord) and record.lamport < lamport:
                record = msgspec.structs.replace(record, lamport=lamport)
            state.apply([sds.Change(kind, key, record)])
    return state


@functools.cache
def _decoder(kind: str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(sds.RECORDS[kind])


def _read_sds(kind: str, stored: Mapping[str, bytes]) -> dict[str, Any]:
    decode = _decoder(kind).decode
    try:
        return {key: decode(value) for key, value in stored.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptStore(f"a record of kind {_SDS_PREFIX}{kind} cannot be read: {error}") from None
