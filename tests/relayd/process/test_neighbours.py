"""Workers report to each other what their peers take, over real sockets, through each other's deaths."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from relayd.access.ledger import Ledger
from relayd.access.limits import Limits, Quotas
from relayd.faults import FaultLog
from relayd.process.neighbours import Neighbourhood, Neighbours
from tests.support.waiting import until

LIMITS = Limits(publishes=10, window_seconds=3600)


class Worker:
    def __init__(self, folder: Path, number: int) -> None:
        self.ledger = Ledger(number)
        self.quotas = Quotas(LIMITS, book=self.ledger, name="identity")
        self.faults: list[str] = []
        neighbours = Neighbours(Neighbourhood(folder, number, 2), self.ledger, FaultLog(self.faults.append))
        self.task = asyncio.create_task(neighbours.run())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_workers_hear_of_each_other_and_of_one_that_is_started_again(tmp_path: Path):
    one, two = Worker(tmp_path, 0), Worker(tmp_path, 1)
    here, there = one.quotas.hold("did:a"), two.quotas.hold("did:a")
    assert here.publish is not None and there.publish is not None
    await until(lambda: one.quotas.everywhere(here) == two.quotas.everywhere(there) == 2)
    now = asyncio.get_running_loop().time()
    assert [there.publish.take(now) for _ in range(10)] == [True] * 10
    await until(lambda: not here.publish.has_unit(now))  # type: ignore[union-attr]
    await two.end()
    again = Worker(tmp_path, 1)
    await until(lambda: one.quotas.everywhere(here) == 1)
    anew = again.quotas.hold("did:a")
    await until(lambda: one.quotas.everywhere(here) == again.quotas.everywhere(anew) == 2)
    await one.end()
    await again.end()
    assert not one.faults and not again.faults


async def test_without_such_sockets_each_counts_for_itself(tmp_path: Path):
    with structlog.testing.capture_logs() as lines:
        worker = Worker(tmp_path / "no such folder", 0)
        await until(lambda: lines)
        for number in range(3):  # and reports for nobody do not pile up
            worker.quotas.hold(f"did:{number}").publish.take(0.0)  # type: ignore[union-attr]
        await until(lambda: not worker.ledger._spent and not worker.ledger._held)
        await worker.end()
    assert [line["event"] for line in lines] == ["limits_not_shared"]
