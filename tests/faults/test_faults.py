"""A short run under every fault; and the judge, which must find the faults of bad runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.ledger import Ledger, Reading
from tests.faults.load import Load
from tests.faults.run import Report, run
from tests.faults.schedule import KINDS, draw

SEED = 20261122
SECONDS = 30.0


@pytest.mark.timeout(900)  # a start of the relay takes a minute on a busy machine
@pytest.mark.req("R-097", "R-108", "R-155", "R-159", "R-161", "R-167", "R-176", "R-189")
async def test_under_every_fault_every_promise_is_kept(tmp_path: Path) -> None:
    report = await run(SEED, SECONDS, folder=tmp_path, progress=print)
    assert not report.broken
    assert not report.idle
    assert report.disk_hits


def test_a_seed_draws_the_same_faults_again_and_every_kind() -> None:
    assert draw(7, 60.0) == draw(7, 60.0) != draw(8, 60.0)
    for seconds in (0.0, 60.0):
        drawn = {fault.kind for track in draw(7, seconds).values() for fault in track}
        assert drawn == set(KINDS)
    assert sum(map(len, draw(7, 600.0).values())) > 2 * sum(map(len, draw(7, 60.0).values()))


def good_run() -> tuple[Ledger, Reading, list[str]]:
    ledger = Ledger()
    reading = ledger.reading("reader")
    log = [f"packet {number}" for number in range(5)]
    for number, packet_id in enumerate(log):
        ledger.ok(packet_id, number)
        ledger.event(reading, packet_id, number, f"cursor {number}")
    return ledger, reading, log


def test_a_good_run_breaks_no_promise() -> None:
    ledger, _, log = good_run()
    ledger.page_walk(log, log[::-1])
    ledger.by_id(log[0], 200)
    ledger.by_id(log[0], 503)
    ledger.ok(log[0], 0)  # the answer to a repeat
    ledger.close(log)
    assert ledger.broken == []
    assert ledger.checked == {"publish": 6, "event": 5, "page walk": 2, "get by id": 2, "reader": 1}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda ledger, reading, log: ledger.event(reading, log[2], 2, "again"), "delivered twice"),
        (lambda ledger, reading, log: ledger.event(reading, "new", 7, "c") or ledger.ok("new", 8), "changed"),
        (lambda ledger, reading, log: ledger.ok(log[1], 7), "received_at of a packet changed"),
        (lambda ledger, reading, log: ledger.event(ledger.reading("late"), log[1], 7, "c"), "received_at"),
        (lambda ledger, reading, log: ledger.page_walk(log, log[1:]), "left out an acknowledged packet"),
        (lambda ledger, reading, log: ledger.page_walk(log, [*log, log[0]]), "repeated a packet"),
        (lambda ledger, reading, log: ledger.by_id(log[0], 404), "was not found"),
        (lambda ledger, reading, log: ledger.close(log[:-1]), "left out an acknowledged packet"),
        (lambda ledger, reading, log: ledger.close([*log, "one more"]), "not the log"),
        (lambda ledger, reading, log: ledger.close([log[1], log[0], *log[2:]]), "not the log"),
    ],
)
def test_the_judge_finds_each_broken_promise(
    what: Callable[[Ledger, Reading, list[str]], object], said: str
) -> None:
    ledger, reading, log = good_run()
    what(ledger, reading, log)
    ledger.close(log)
    assert any(said in sentence for sentence in ledger.broken), ledger.broken


def test_a_restored_backup_takes_the_end_of_the_log_and_nothing_else() -> None:
    ledger, reading, log = good_run()
    ledger.restore(set(log[:3]))
    assert ledger.lost == 2
    ledger.log_reset(reading, "cursor 2")
    for number, packet_id in enumerate([log[4], "new"], 10):  # one of the lost packets comes again
        ledger.ok(packet_id, number)
        ledger.event(reading, packet_id, number, f"cursor {number}")
    ledger.close([*log[:3], log[4], "new"])
    assert ledger.broken == []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda ledger, reading, log: ledger.close(log[:2]), "left out an acknowledged packet"),
        (lambda ledger, reading, log: ledger.close(log[:3]), "a reader's log is not the log"),
        (
            lambda ledger, reading, log: (
                ledger.log_reset(reading, "cursor 1") or ledger.event(reading, log[2], 2, "again")
            ),
            "delivered twice",
        ),
        (
            lambda ledger, reading, log: (
                ledger.log_reset(reading, "cursor 2") or ledger.log_reset(reading, "cursor 2")
            ),
            "told of a loss that never was",
        ),
    ],
)
def test_the_judge_finds_what_goes_wrong_with_a_restored_backup(
    what: Callable[[Ledger, Reading, list[str]], object], said: str
) -> None:
    ledger, reading, log = good_run()
    ledger.restore(set(log[:3]))
    what(ledger, reading, log)
    assert any(said in sentence for sentence in ledger.broken), ledger.broken


def test_a_run_in_which_a_fault_or_a_check_is_missing_is_not_good() -> None:
    operations = ("publish", "event", "page walk", "get by id", "auth", "reader")
    good = Report(1, 1.0, ("reset",), fired={"reset": 1}, checked=dict.fromkeys(operations, 1))
    assert good.is_good
    without_fault = replace(good, fired={})
    assert without_fault.idle == ["reset"]
    assert not without_fault.is_good
    without_check = replace(good, checked={**good.checked, "auth": 0})
    assert without_check.idle == ["auth"]
    assert not without_check.is_good
    assert not replace(good, broken=["a promise"]).is_good


async def test_a_relay_that_does_nothing_more_is_given_up_and_a_long_log_is_not() -> None:
    ledger = Ledger()
    load = Load("ws://nowhere", "http://nowhere", ledger, seed=1)

    async def stands_still() -> None:
        await asyncio.Event().wait()

    async def reads_on() -> None:
        for number in range(30):
            ledger.ok(f"packet {number}", number)
            await asyncio.sleep(0.02)

    still, reading = asyncio.create_task(stands_still()), asyncio.create_task(reads_on())
    assert await load._ends(reading, 0.4)
    assert not await load._ends(still, 0.1)
    still.cancel()
