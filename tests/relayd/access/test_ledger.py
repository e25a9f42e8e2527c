"""Several processes and one account: over a longer time at most the limit passes, whichever is used."""

from __future__ import annotations

import msgspec
import pytest

from relayd.access.accounts import AddressAccounts
from relayd.access.ledger import Ledger
from relayd.access.limits import Limits, Quotas
from relayd.addresses import parse_address

MINUTE = Limits(publishes=60, subscribes=10, backfill_bytes=1000, window_seconds=60)


class Machine:
    """Workers with the same accounts, and the time."""

    def __init__(self, workers: int = 2) -> None:
        self.now = 100.0
        self.ledgers = [Ledger(number) for number in range(workers)]
        self.quotas = [Quotas(MINUTE, book=ledger, name="identity") for ledger in self.ledgers]
        self.addresses = [AddressAccounts(MINUTE, book=ledger, name="address") for ledger in self.ledgers]

    def talk(self, *, lost: bool = False) -> None:
        """Each sends its reports, and the others receive them, unless they are lost."""
        for teller in self.ledgers:
            for message in teller.report():
                for hearer in self.ledgers:
                    if hearer is not teller and not lost:
                        hearer.hear(message, self.now)

    def taken(self, worker: int, key: str = "did:a") -> int:
        """The number of publishes that a client gets at this worker, at once."""
        budget = self.quotas[worker].hold(key).publish
        assert budget is not None
        count = 0
        while budget.take(self.now):
            count += 1
        return count


@pytest.mark.req("R-316")
def test_what_was_taken_at_one_is_not_there_at_another():
    machine = Machine()
    assert machine.taken(0) == 60
    machine.talk()
    assert machine.taken(1) == 0
    machine.now += 10
    assert machine.taken(1) == 10
    machine.talk()
    assert machine.taken(0) == 0 and machine.taken(0, "did:b") == 60


@pytest.mark.req("R-316")
def test_what_was_taken_at_the_same_moment_is_paid_back():
    machine = Machine(3)
    assert [machine.taken(worker) for worker in range(3)] == [60, 60, 60]
    machine.talk()
    passed = 180
    for _ in range(60):
        machine.now += 10
        passed += sum(machine.taken(worker) for worker in range(3))
        machine.talk()
    assert 600 <= passed <= 600 + 60 + 3 * 20, (
        "a window's worth, ten minutes', and what three take between reports"
    )


def test_bytes_of_history_count_together():
    machine = Machine()
    backfill = [quotas.hold("did:a").backfill for quotas in machine.quotas]
    assert backfill[0] is not None and backfill[1] is not None
    backfill[0].spend(2500, machine.now)
    machine.talk()
    assert backfill[1].debt_seconds(machine.now) == pytest.approx(90)


@pytest.mark.req("R-321")
def test_connections_of_an_address_count_at_all_of_them():
    machine = Machine()
    address = parse_address("192.0.2.1")
    assert address is not None
    here, there = machine.addresses
    quota = here.hold(address)
    held = [there.hold(address) for _ in range(3)]
    assert not here.crowded(quota, 3)
    machine.talk()
    assert here.crowded(quota, 3) and not here.crowded(quota, 4)
    there.release(held[0], machine.now)
    machine.talk()
    assert not here.crowded(quota, 3)


def test_a_report_that_is_lost_is_made_up_for():
    machine = Machine()
    address = parse_address("192.0.2.1")
    assert address is not None
    here, there = machine.addresses
    quota, held = here.hold(address), there.hold(address)
    machine.talk(lost=True)
    machine.talk()
    assert here.crowded(quota, 1)
    there.release(held, machine.now)
    machine.talk(lost=True)
    for _ in range(3):
        machine.talk()
    assert not here.crowded(quota, 1)


def test_who_begins_anew_or_is_gone_holds_nothing():
    machine = Machine()
    address = parse_address("192.0.2.1")
    assert address is not None
    here, there = machine.addresses
    quota, _ = here.hold(address), there.hold(address)
    machine.talk()
    machine.ledgers[0].hear(Ledger(1).begin(), machine.now)
    assert not here.crowded(quota, 1)
    machine.talk()
    machine.talk()
    machine.ledgers[0].look(machine.now + 4, 5)
    assert here.crowded(quota, 1)
    machine.ledgers[0].look(machine.now + 6, 5)
    assert not here.crowded(quota, 1)


def test_a_crowd_is_said_in_parts_and_all_of_it_comes():
    machine = Machine()
    for number in range(1000):
        machine.quotas[0].hold(f"did:{number}")
    machine.ledgers[0].report()  # new reports, which nobody receives
    for _ in range(12):
        (report,) = machine.ledgers[0].report()
        assert len(report) < 65_536
        machine.ledgers[1].hear(report, machine.now)
    assert all(machine.ledgers[1].elsewhere("identity", f"did:{number}") == 1 for number in range(1000))


def test_accounts_that_nobody_has_here_are_kept_within_bounds():
    ledger = Ledger(0)
    quotas = Quotas(MINUTE, max_idle=10, book=ledger, name="identity")
    other = Ledger(1)
    for number in range(100):
        other.took("identity", f"did:{number}", "publish", 1.0)
    other.took("identity", "x" * 1000, "publish", 1.0)
    other.took("unknown", "did:a", "publish", 1.0)
    other.took("identity", "did:99", "no such kind", 1.0)
    for message in other.report():
        ledger.hear(message, 5.0)
    assert len(quotas) == 10


def test_what_no_process_says_changes_nothing():
    with pytest.raises(msgspec.MsgspecError):
        Ledger(0).hear(b"\x93\x01\x02\x03", 1.0)
