"""Several machines and one identity: over a longer time at most the limit passes, wherever it publishes."""

from __future__ import annotations

import msgspec
import pytest

from relayd.access.accounts import AddressAccounts
from relayd.access.ledger import Books, Ledger
from relayd.access.limits import Limits, Quotas
from relayd.access.machines import Machines
from relayd.addresses import parse_address

MINUTE = Limits(publishes=60, subscribes=10, backfill_bytes=1000, window_seconds=60)
START = 1_790_000_000.0


class Process:
    """One of the workers of one of the machines."""

    def __init__(self, machine: int, number: int) -> None:
        self.machine = machine
        self.ledger = Ledger(number)
        self.machines = Machines(b"machine %d" % machine, b"process %d %d" % (machine, number))
        book = Books(self.ledger, self.machines)
        self.identities = Quotas(MINUTE, book=book, name="identity")
        self.addresses = AddressAccounts(MINUTE, book=book, name="address")

    def taken(self, now: float, key: str = "did:a") -> int:
        """The number of publishes that a client gets here, at once."""
        budget = self.identities.hold(key).publish
        assert budget is not None
        count = 0
        while budget.take(now):
            count += 1
        return count


class Site:
    """Machines with two workers each, the bus between them, and the time."""

    def __init__(self, machines: int = 2) -> None:
        self.now = 100.0
        self.processes = [Process(machine, number) for machine in range(machines) for number in range(2)]
        self.said: list[bytes] = []

    @property
    def wall(self) -> float:
        return START + self.now

    def talk(self) -> None:
        """The workers of each machine hear each other through their ledgers, and everybody hears the bus."""
        self.said = []
        for teller in self.processes:
            near, far = teller.ledger.report(), teller.machines.report(self.wall)
            self.said += far
            for hearer in self.processes:
                if hearer is teller:
                    continue
                for report in near if hearer.machine == teller.machine else []:
                    hearer.ledger.hear(report, self.now)
                for report in far:
                    assert hearer.machines.hear(report, self.wall, self.now)


@pytest.mark.req("R-316")
def test_what_was_taken_on_one_machine_is_not_there_on_another_and_counts_once():
    site = Site()
    assert site.processes[0].taken(site.now) == 60
    site.talk()
    assert [process.taken(site.now) for process in site.processes] == [0] * 4
    assert site.processes[2].taken(site.now, "did:b") == 60
    site.now += 10
    assert site.processes[3].taken(site.now) == 10


@pytest.mark.req("R-316")
def test_what_was_taken_everywhere_at_the_same_moment_is_paid_back():
    site = Site(3)
    passed = sum(process.taken(site.now) for process in site.processes)
    assert passed == 6 * 60
    for _ in range(600):
        site.talk()
        site.now += 1
        passed += sum(process.taken(site.now) for process in site.processes)
    assert 600 <= passed <= 60 + 600 + 6 * 10, (
        "a window's worth, ten minutes', what they take between reports"
    )


def test_addresses_are_each_machine_s_own():
    site = Site()
    address = parse_address("192.0.2.1")
    assert address is not None
    here, brother, _, there = (process.addresses.hold(address).publish for process in site.processes)
    assert here is not None and there is not None and brother is not None
    here.spend(60, site.now)
    site.talk()
    assert not brother.has_unit(site.now) and there.has_unit(site.now)
    assert site.said == []


def test_a_report_counts_once_and_while_it_is_young():
    site = Site()
    one, other = site.processes[0], site.processes[2]
    budget = other.identities.hold("did:a").publish
    assert budget is not None
    one.taken(site.now)
    (report,) = one.machines.report(site.wall)
    assert other.machines.hear(report, site.wall, site.now)
    assert not other.machines.hear(report, site.wall + 1, site.now + 1), "sent again"
    assert budget.debt_seconds(site.now) <= 0
    # A process that started later, or has forgotten the sender, does not count it twice either.
    late = Process(3, 0)
    assert not late.machines.hear(report, site.wall + 61, site.now + 61)
    other.machines.report(site.wall + 1000)
    assert not other.machines.hear(report, site.wall + 1000, site.now + 1000)
    # A clock that is far off makes a report useless.
    assert not late.machines.hear(report, site.wall - 61, site.now)


def test_a_clock_that_is_set_back_silences_nobody_for_long():
    site = Site()
    one, other = site.processes[0], site.processes[2]
    for wall in (site.wall, site.wall, site.wall - 1, site.wall - 30):
        one.machines.took("identity", "did:a", "publish", 1.0)
        (report,) = one.machines.report(wall)
        assert other.machines.hear(report, site.wall, site.now)
    back = site.wall - 3600
    one.machines.took("identity", "did:a", "publish", 1.0)
    other.machines.report(back)
    (report,) = one.machines.report(back)
    assert other.machines.hear(report, back, site.now)


def test_what_is_too_much_for_one_report_comes_with_the_next_one():
    machines, heard = Machines(b"a", b"a"), Machines(b"b", b"b")
    quotas = Quotas(MINUTE, book=heard, name="identity")
    machines.share("identity", quotas)
    for number in range(3000):
        machines.took("identity", f"did:{number}", "publish", 1.0)
    machines.took("identity", "did:" + "x" * 300, "publish", 1.0)
    reports = [machines.report(START), machines.report(START + 1), machines.report(START + 2)]
    assert [len(each) for each in reports] == [10, 5, 0]
    for report in [*reports[0], *reports[1]]:
        assert len(report) < 2**16
        assert heard.hear(report, START, 0.0)
    assert len(quotas) == 3000


def test_what_no_process_has_said_is_refused():
    machines = Machines(b"a", b"a")
    for garbage in (
        b"",
        b"\x00",
        msgspec.msgpack.encode([1, 2, 3]),
        msgspec.msgpack.encode([b"b", b"b", 1.0]),
    ):
        with pytest.raises(msgspec.MsgspecError):
            machines.hear(garbage, START, 0.0)
    unknown = msgspec.msgpack.encode([b"b", b"b", START, [("shoe", "did:a", "publish", 1.0)]])
    assert machines.hear(unknown, START, 0.0)
