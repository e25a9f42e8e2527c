"""What a program that drives SDS itself needs: why a message is refused, a sync now, and what waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.channels import sds
from strata.channels.sds import (
    BloomFilter,
    BloomParameters,
    HistoryEntry,
    InvalidSdsMessage,
    Participant,
    SdsConfig,
    SdsFault,
    SdsMessage,
    SendRepair,
    SendSync,
    request_offset,
    response_offset,
)

T = 1_760_000_000_000
QUIET = SdsConfig(sync_min_interval_ms=0)


def participant(name: str, config: SdsConfig = QUIET) -> Participant:
    return Participant("room", name, config, now_ms=T, random=lambda: 0.5)


def said(n: int, *follows: str) -> bytes:
    history = tuple(HistoryEntry(each, None, "bob") for each in follows)
    return SdsMessage("bob", f"b{n}", "room", T + n, history, content=b"text %d" % n).encode()


def test_a_message_that_cannot_be_read_says_why() -> None:
    with pytest.raises(InvalidSdsMessage) as refused:
        SdsMessage.parse(b"\xff\xff\xff")
    assert refused.value.fault is SdsFault.UNDECODABLE and isinstance(refused.value, ValueError)
    wide = said(5, "b1", "b2", "b3")
    with pytest.raises(InvalidSdsMessage, match="too many entries") as refused:
        SdsMessage.parse(wide, max_entries=2)
    assert refused.value.fault is SdsFault.TOO_MANY_ENTRIES
    assert SdsMessage.parse(wide, max_entries=3) == SdsMessage.decode(wide)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_it_raises_where_decode_gives_none(data: bytes, most: int) -> None:
    if SdsMessage.decode(data, max_entries=most) is None:
        with pytest.raises(InvalidSdsMessage):
            SdsMessage.parse(data, max_entries=most)
    else:
        assert SdsMessage.parse(data, max_entries=most) == SdsMessage.decode(data, max_entries=most)


def test_a_sync_is_sent_when_it_is_asked_for() -> None:
    alice = participant("alice")
    assert not alice.sync_now(T) and alice.events() == []
    alice.receive(said(1), T + 1)
    alice.events()
    assert alice.sync_now(T + 2)
    (event,) = alice.events()
    assert isinstance(event, SendSync)
    assert SdsMessage.parse(event.data).history_ids == ["b1"]
    often = participant("alice", SdsConfig())
    often.receive(said(1), T + 1)
    due = often.get_timer()
    often.sync_now(T + 2)
    assert often.get_timer() != due, "and the next one comes later"


def test_what_waits_is_seen_with_what_it_waits_for_and_since_when() -> None:
    alice = participant("alice")
    alice.receive(said(3, "b1", "b2"), T + 10)
    (waiting,) = alice.waiting()
    assert (waiting.message_id, waiting.sender_id, waiting.lamport_timestamp) == ("b3", "bob", T + 3)
    assert waiting.unmet == ("b1", "b2") and waiting.since == T + 10
    alice.receive(said(2), T + 20)
    assert alice.waiting()[0].unmet == ("b1",)
    alice.receive(said(1), T + 30)
    assert alice.waiting() == []


def test_the_times_of_repair_are_seen_and_kept_to() -> None:
    alice = participant("alice")
    alice.receive(said(3, "b1"), T + 10)
    config = alice.config
    t_req = T + 10 + request_offset("alice", "b1", config.repair_t_min_ms, config.repair_t_max_ms)
    assert alice.repair_requests() == {"b1": t_req}
    carol = participant("carol")
    carol.receive(said(1), T)
    asking = SdsMessage("dave", "d1", "room", T + 9, repair_request=(HistoryEntry("b1", None, "bob"),))
    carol.receive(asking.encode(), T + 40)
    t_resp = T + 40 + response_offset("carol", "bob", "b1", config.repair_t_max_ms)
    assert carol.repair_responses() == {"b1": t_resp}
    carol.events()
    carol.handle_timer(t_resp - 1)
    assert carol.events() == []
    carol.handle_timer(t_resp)
    assert isinstance(carol.events()[0], SendRepair) and carol.repair_responses() == {}
    alice.clock_stepped(-1_000_000)
    assert alice.repair_requests() == {"b1": t_req - 1_000_000}, "by the wall, as it is now"


@given(st.sets(st.text(min_size=1, max_size=8), max_size=60))
def test_a_filter_comes_back_from_its_bytes(ids: set[str]) -> None:
    parameters = BloomParameters(100, 0.001)
    made = BloomFilter(parameters)
    for each in ids:
        made.insert(each)
    read = BloomFilter.from_bytes(parameters, made.to_bytes())
    assert read.to_bytes() == made.to_bytes()
    assert all(each in read for each in ids)
    assert abs(read.count - len(ids)) <= 2 + len(ids) // 8
    read.insert("one more")
    assert "one more" in read and read.to_bytes() != b""
    for wrong in (b"", made.to_bytes()[:-1], made.to_bytes() + b"x"):
        with pytest.raises(ValueError, match="bytes"):
            BloomFilter.from_bytes(parameters, wrong)


def test_a_full_filter_of_a_forger_is_read_too() -> None:
    parameters = BloomParameters(100, 0.001)
    full = BloomFilter.from_bytes(parameters, b"\xff" * parameters.size_bytes)
    assert "anything" in full and full.count > parameters.capacity


def test_the_functions_of_repair_are_public() -> None:
    for name in ("eligible", "hash64", "request_offset", "response_groups", "response_offset"):
        assert name in sds.__all__ and callable(getattr(sds, name))
