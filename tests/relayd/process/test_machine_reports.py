"""Which processes report for which machine, and what becomes of reports that cannot be understood."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from relayd.access.limits import Limits, Quotas
from relayd.access.machines import Machines
from relayd.config import Settings
from relayd.faults import FaultLog
from relayd.process import machine_reports
from relayd.process.machine_reports import MachineReports, machines_of
from relayd.process.neighbours import Neighbourhood
from tests.support.waiting import until

ON = Settings(bus_url="nats://127.0.0.1:4222")
LIMITS = Limits(publishes=10, window_seconds=3600)


def left(one: Machines, other: Machines) -> bool:
    """Whether `other` has any budget left after `one` has spent it."""
    here, there = (Quotas(LIMITS, book=book, name="identity").hold("did:a").publish for book in (one, other))
    assert here is not None and there is not None
    here.spend(10, 1.0)
    for report in one.report(1_790_000_000.0):
        other.hear(report, 1_790_000_000.0, 1.0)
    return there.has_unit(1.0)


def test_without_a_bus_or_by_setting_each_machine_counts_for_itself():
    assert machines_of(Settings(), None) is None
    assert machines_of(replace(ON, bus_limits=False), None) is None


def test_workers_of_a_machine_are_left_to_their_ledgers(tmp_path: Path):
    def worker(folder: str, number: int) -> Machines:
        found = machines_of(ON, Neighbourhood(tmp_path / folder, number, 2))
        assert found is not None
        return found

    alone, another = machines_of(ON, None), machines_of(ON, None)
    assert alone is not None and another is not None
    assert left(worker("a", 0), worker("a", 1))
    assert not left(worker("a", 0), worker("b", 1))
    assert not left(alone, another)


async def test_what_is_taken_is_told_and_nonsense_is_not_taken_in(monkeypatch):
    monkeypatch.setattr(machine_reports, "_INTERVAL", 0.01)
    caught, told = list[str](), list[bytes]()
    machines = machines_of(ON, None)
    assert machines is not None
    reports = MachineReports(machines, told.append, FaultLog(caught.append))
    task = asyncio.create_task(reports.run())
    machines.took("identity", "did:a", "publish", 1.0)
    await until(lambda: told)
    assert reports.hear(told[0])
    assert not reports.hear(b"nonsense")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not caught
