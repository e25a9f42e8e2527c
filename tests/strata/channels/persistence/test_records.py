"""Records are read back as the structs they were; foreign and damaged records are distinguished."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from strata.channels.persistence import (
    ChannelState,
    CorruptStore,
    ParticipantKey,
    Put,
    Raise,
    SqlitePersistence,
    StoredState,
    sds_changes,
)
from strata.channels.persistence.records import (
    EpochCount,
    InboxMessage,
    PartialSegment,
    QueryMark,
    QueuedSend,
    Record,
    SegmentsFinished,
    SegmentsGivenUp,
    SenderName,
    SentChunk,
    put,
    remove,
)
from strata.channels.sds import state as sds

RECORDS: tuple[Record, ...] = (
    SentChunk("m2", "r1", b"h" * 32, 1, 3, True, True, "bob"),
    PartialSegment("m5", "bob", 2, 9, b"segment"),
    SegmentsFinished(3, "bob", b"h" * 32, 8, 1, (2, 8), 10, "r9"),
    QueuedSend(1, "m2", True),
    EpochCount(42, 3, 9),
    SegmentsGivenUp(3, "bob", b"h" * 32, ("m1", "m2"), "r1"),
    InboxMessage(7, "r1", b"h" * 32, "bob", b"payload", 11, b"p" * 32, "did:bob", 9, 10, "m1"),
    QueryMark(5, 6),
    SenderName("bob", "did:bob"),
)
BODY = sds.BodyRecord(b"head", b"tail", 1, b"delta")
SDS_RECORDS: dict[str, sds.Record] = {
    "clock": sds.ClockRecord(lamport=1_760_000_000_000, own_count=2, last_arrival=3, horizon=4),
    "keyframe": sds.KeyframeRecord(1, b"filter"),
    "known": sds.KnownRecord("m0", 5, 1),
    "missing": sds.MissingRecord("m4", bytes(range(32)), "bob", 3),
    "lost": sds.LostRecord("m9"),
    "request": sds.RequestRecord("m4", None, "bob", 5),
    "response": sds.ResponseRecord("m1", 6),
}


@pytest.mark.req("C-248", "C-249", "C-250", "C-254")
async def test_every_state_the_documents_name_comes_back(tmp_path: Path) -> None:
    participant = ParticipantKey("room", "alice")
    reported = [sds.Change(kind, kind, record) for kind, record in SDS_RECORDS.items()]
    store = await SqlitePersistence.open(tmp_path / "channels.db")
    await store.apply(participant, [*map(put, RECORDS), *sds_changes(reported)])
    await store.close()
    store = await SqlitePersistence.open(tmp_path / "channels.db")
    state = ChannelState.read(await store.load(participant))
    await store.close()
    found = [
        *state.sent_chunks.values(),
        *state.segments.values(),
        *state.segments_finished.values(),
        *state.queue.values(),
        *state.epochs.values(),
        *state.segments_given_up.values(),
        *state.inbox.values(),
        *state.query_marks.values(),
        *state.sender_names.values(),
    ]
    assert found == list(RECORDS)
    assert state.sds == sds.SdsState(reported)
    assert state.other == {}


def test_sds_records_are_removed_as_they_were_put() -> None:
    stored = StoredState()
    reported = [sds.Change(kind, kind, record) for kind, record in SDS_RECORDS.items()]
    stored.apply(sds_changes(reported))
    stored.apply(sds_changes([sds.Change(kind, kind, None) for kind in SDS_RECORDS]))
    assert stored.records == {}


@pytest.mark.req("C-248")
def test_the_lamport_time_never_goes_back() -> None:
    stored = StoredState()
    for lamport in (5, 9, 7):
        clock = sds.ClockRecord(lamport=lamport, own_count=0, last_arrival=0, horizon=0)
        stored.apply(sds_changes([sds.Change("clock", "", clock)]))
    (clock,) = ChannelState.read(stored).sds.all(sds.ClockRecord)
    assert clock.lamport == 9


def test_removing_takes_the_record_that_was_put() -> None:
    for record in RECORDS:
        state = StoredState()
        state.apply([put(record)])
        assert state.records
        state.apply([remove(type(record), record.key)])
        assert not state.records


def test_records_of_other_kinds_pass_through() -> None:
    state = StoredState()
    state.apply([Put("mine", "1", b"whatever"), Raise("mine", 1)])
    assert ChannelState.read(state).other == {"mine": {"1": b"whatever"}}


@pytest.mark.parametrize("kind", ["sent_chunk", "sds.clock"])
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["m1"]),
        msgspec.msgpack.encode([1, 2, 3, 4]),
        msgspec.msgpack.encode(["m?", "r1", b"", 0, 1]).replace(b"?", b"\xff"),
    ],
)
def test_a_damaged_record_is_a_typed_error(kind: str, value: bytes) -> None:
    state = StoredState()
    state.apply([Put(kind, "m1", value)])
    with pytest.raises(CorruptStore, match=kind):
        ChannelState.read(state)


def test_a_field_added_later_is_read_past_and_a_missing_optional_one_is_filled() -> None:
    state = StoredState()
    fields = ["m1", "r1", b"h", 0, 1]
    state.apply([Put("sent_chunk", "m1", msgspec.msgpack.encode(fields))])
    state.apply([Put("sent_chunk", "m2", msgspec.msgpack.encode([*fields, True, True, "bob", "later"]))])
    assert ChannelState.read(state).sent_chunks == {
        "m1": SentChunk("m1", "r1", b"h", 0, 1),
        "m2": SentChunk("m1", "r1", b"h", 0, 1, True, True, "bob"),
    }


@pytest.mark.parametrize("module", ["strata.channels.segmentation", "strata.channels.rate_limit.limiter"])
def test_the_core_loads_neither_sqlite_nor_asyncio(module: str) -> None:
    code = f"import sys, {module}; print(' '.join(sys.modules))"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=plain
    )
    assert module in run.stdout.split()
    assert not {"asyncio", "sqlite3"} & set(run.stdout.split())
