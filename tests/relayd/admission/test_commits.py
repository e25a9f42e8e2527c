"""What a commit causes: answers first, then the feed, then one write for all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from strata.protocol.errors import ErrorCode

from relayd.admission.commits import Commits
from relayd.faults import FaultLog
from relayd.metrics import Metrics
from relayd.slices import Slices
from relayd.store import NewPacket
from relayd.store.types import Appended, AppendOutcome, Disposition

NOW = 1_760_000_000


@pytest.fixture
def said() -> list[Any]:
    """All calls, in order."""
    return []


@pytest.fixture
def commits(said: list[Any]) -> Commits:
    admission = SimpleNamespace(
        committed=lambda request, at, **more: said.append(("ok", request, at, more)),
        failed=lambda request, error: said.append(("error", request, error.code, error.detail)),
    )
    tail = SimpleNamespace(committed=lambda *batch: said.append(("feed", *batch)))
    return Commits(
        cast(Any, admission),
        cast(Any, tail),
        Metrics(),
        on_flush=lambda: said.append("flush"),
        faults=FaultLog(),
        slices=Slices(),
    )


def row(number: int) -> NewPacket:
    return NewPacket(bytes([number]) * 32, "did:strata:a", "TEXT", NOW, None, b"{}")


@pytest.mark.req("R-176", "R-189")
def test_answers_come_before_the_feed_and_both_before_the_write(commits, said):
    appended = Appended(
        6,
        [
            Disposition(AppendOutcome.STORED, 7, NOW),
            Disposition(AppendOutcome.DUPLICATE, 3, NOW - 9, b"first"),
        ],
    )
    commits.committed(appended, [(row(1), "new"), (row(2), "old")], 0.001)
    new, old, (feed, previous, entries), flush = said
    assert new == ("ok", "new", NOW, {"duplicate": False})
    assert old == ("ok", "old", NOW - 9, {"duplicate": True, "duplicate_of": b"first"})
    assert (feed, previous, [entry.sequence for entry in entries]) == ("feed", 6, [7])
    assert flush == "flush"


@pytest.mark.req("R-370")
def test_a_packet_of_a_peer_counts_from_when_the_first_relay_received_it(commits, said):
    packet = NewPacket(bytes(32), "did:strata:a", "TEXT", NOW, None, b"{}", witnessed_at=NOW - 50)
    commits.committed(Appended(6, [Disposition(AppendOutcome.STORED, 7, NOW)]), [(packet, "old")], 0.001)
    assert said[0] == ("ok", "old", NOW - 50, {"duplicate": False})


def test_a_row_that_the_database_refuses_is_answered_and_does_not_reach_the_feed(commits, said):
    with structlog.testing.capture_logs() as lines:
        commits.committed(Appended(6, [Disposition(AppendOutcome.INVALID, 0, 0)]), [(row(1), "bad")], 0.001)
    assert said == [
        ("error", "bad", ErrorCode.INTERNAL_ERROR, "not_storable"),
        ("feed", 6, []),
        "flush",
    ]
    assert [line["event"] for line in lines] == ["row_refused"]


@pytest.mark.req("R-113")
def test_a_packet_that_states_what_was_erased_is_refused(commits, said):
    erased = Disposition(AppendOutcome.ERASED, 3, NOW - 9)
    commits.committed(Appended(6, [erased]), [(row(1), "again")], 0.001)
    assert said[:2] == [
        ("error", "again", ErrorCode.POLICY_REJECTED, "duplicate_of"),
        ("feed", 6, []),
    ]


@pytest.mark.req("R-200")
async def test_a_packet_that_was_not_stored_in_time_is_answered_and_written(commits, said):
    commits.not_stored(cast(Any, "late"))
    assert said == [("error", "late", ErrorCode.INTERNAL_ERROR, "store_unavailable"), "flush"]


@pytest.mark.req("R-192", "R-200")
async def test_many_packets_that_were_not_stored_in_time_are_answered_a_few_at_a_time(said, commits):
    commits._late._slices.seconds = 0.0  # a turn of the loop has time for one of them
    for number in range(50):
        commits.not_stored(number)
    for turn in range(1, 200):
        answered = [number for _, number, *_ in (each for each in said if each != "flush")]
        assert len(answered) <= 2 * turn
        await asyncio.sleep(0)
    assert answered == list(range(50)) and said[-1] == "flush"


@pytest.mark.parametrize(
    ("place", "rung"),
    [
        (Disposition(AppendOutcome.STORED, 7, NOW), [("ring", 7)]),
        (Disposition(AppendOutcome.DUPLICATE, 3, NOW), []),
    ],
)
def test_what_the_feed_cannot_take_it_reads_from_the_log(said, place, rung):
    def broken(*_: object) -> None:
        raise ValueError("no")

    admission = SimpleNamespace(committed=lambda *_, **__: None, failed=None)
    tail = SimpleNamespace(committed=broken, ring=lambda sequence: said.append(("ring", sequence)))
    commits = Commits(
        cast(Any, admission),
        cast(Any, tail),
        Metrics(),
        on_flush=lambda: said.append("flush"),
        faults=FaultLog(),
        slices=Slices(),
    )
    commits.committed(Appended(6, [place]), [(row(1), cast(Any, "new"))], 0.001)
    assert said == [*rung, "flush"]
