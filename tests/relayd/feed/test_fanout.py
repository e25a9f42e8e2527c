"""The newest entries that the live feed keeps, for readers that have almost reached its end."""

from __future__ import annotations

import pytest

from relayd.cursor import CursorCodec
from relayd.feed.fanout import Fanout
from relayd.store.types import LogEntry, NewPacket


def entry(sequence: int, body: bytes = b"{}") -> LogEntry:
    packet = NewPacket(sequence.to_bytes(32, "big"), "did:strata:x", "A", 900, None, body)
    return LogEntry(sequence, 900, packet)


@pytest.mark.req("R-155", "R-167")
def test_the_newest_entries_are_given_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("relayd.feed.fanout._RECENT_ENTRIES", 4)
    fanout = Fanout(CursorCodec(bytes(32)), 10)
    fanout.dispatch([entry(sequence) for sequence in range(11, 18)], 1000)
    for position in range(10, 13):
        assert fanout.recent_after(position) is None  # 11 to 13 are no longer there
    for position in range(13, 18):
        found = fanout.recent_after(position)
        assert found is not None
        assert [each.sequence for each in found] == list(range(position + 1, 18))


@pytest.mark.req("R-155", "R-167")
def test_the_newest_entries_have_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("relayd.feed.fanout._RECENT_BYTES", 100)
    fanout = Fanout(CursorCodec(bytes(32)), 0)
    for sequence in range(1, 31):  # many times over: dropped entries no longer count
        fanout.dispatch([entry(sequence, bytes(40))], 1000)
        kept = [each for each in range(sequence) if fanout.recent_after(each) is not None]
        assert kept == list(range(max(0, sequence - 2), sequence))
    fanout.dispatch([entry(31, bytes(101))], 1000)
    assert fanout.recent_after(30) is None and fanout.recent_after(31) == []
