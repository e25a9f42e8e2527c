"""The simulator itself: it is reproducible, it notices faults, and it cannot pass by doing nothing."""

from __future__ import annotations

import asyncio

import pytest
from strata.channels.persistence.interface import PersistenceClosed, Put, StorageFull
from strata.channels.reliable.events import ReliableMessageDelivered
from strata_testkit.sim import (
    Deadlock,
    Faults,
    Process,
    SimulationFailed,
    run_chaos,
    run_virtually,
    simulate,
)
from strata_testkit.sim.disk import Disk, SimStore
from strata_testkit.sim.faults import FaultCounts
from strata_testkit.sim.loop import VirtualLoop, virtual_time
from strata_testkit.sim.worlds import run_world


async def chat(run):
    for number in range(4):
        await run.participants[number % len(run.participants)].send(b"word %d" % number)
        await asyncio.sleep(5)


def test_a_quiet_run_converges():
    report = simulate(chat, seed=1)
    assert report.checks.messages == 4
    assert report.checks.deliveries == 8
    assert report.checks.delivery_errors == 0
    assert not any(report.faults.values())


def test_a_seed_repeats_a_run():
    runs = [run_chaos(17) for _ in range(2)]
    assert runs[0] == runs[1]
    assert run_chaos(18) != runs[0]


def test_an_empty_run_does_not_pass():
    async def nothing(run):
        await asyncio.sleep(1)

    with pytest.raises(SimulationFailed, match="proves nothing") as failure:
        simulate(nothing, seed=3)
    assert failure.value.seed == 3


def test_a_message_that_never_arrives_is_noticed():
    async def forgetful(run):
        await chat(run)
        run.evidence.sent("p0", "never sent", b"x")

    with pytest.raises(SimulationFailed, match="was never given never sent"):
        simulate(forgetful, seed=1)


def test_a_message_given_twice_is_noticed():
    async def doubled(run):
        await chat(run)
        run.evidence.took("p2", run.participants[2].received[0])

    with pytest.raises(SimulationFailed, match="twice"):
        simulate(doubled, seed=1)


def test_a_log_that_differs_is_noticed():
    async def forked(run):
        await chat(run)
        log = run.participants[1].channel.log
        run.participants[1].channel.log = lambda: list(reversed(log()))

    with pytest.raises(SimulationFailed, match="differs"):
        simulate(forked, seed=1)


def test_a_message_on_a_disk_that_is_lost_was_delivered():
    """The only device that had it was lost while its program was still busy with earlier messages."""
    report = run_world(91_031, "devices")
    assert report.checks.delivered_events > 0 and report.faults["devices_lost"] > 0


@pytest.mark.parametrize("receives", [True, False])
def test_a_delivery_to_a_device_that_is_lost_needs_the_message_on_its_disk(receives):
    async def last_words(run):
        await chat(run)
        other = run.participants[1]
        if not receives:
            run.network.part(other.name)
        request_id = await run.participants[0].send(b"last words")
        await asyncio.sleep(60)
        run.evidence._taken[other.name].pop(request_id, None)  # as if its program had been busy
        run.lose(other)
        if not receives:
            event = ReliableMessageDelivered(request_id=request_id, message_id="")
            run.evidence._told_delivered("p0", event)

    if receives:
        simulate(last_words, seed=1, participants=2)
    else:
        with pytest.raises(SimulationFailed, match="nobody has it"):
            simulate(last_words, seed=1, participants=2)


def test_a_scenario_that_raises_names_its_seed():
    async def broken(run):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error:
        simulate(broken, seed=99)
    assert "seed 99" in error.value.__notes__[0]


def test_a_late_joiner_gets_everything():
    async def late(run):
        await chat(run)
        joined = await run.join("late")
        await asyncio.sleep(60)
        assert [message.payload for message in joined.received] == [b"word %d" % n for n in range(4)]

    simulate(late, seed=5, faults=Faults(loss=0.1))


def test_a_killed_program_does_nothing_more():
    async def run():
        log = []

        async def work():
            try:
                while True:
                    log.append(process.name)
                    await asyncio.sleep(1)
            finally:
                asyncio.get_running_loop().create_task(asyncio.sleep(1)).add_done_callback(
                    lambda task: log.append("cancelled" if task.cancelled() else "went on")
                )

        process = Process("worker")
        task = process.start(work())
        await asyncio.sleep(2.5)
        process.kill()
        await asyncio.wait([task])
        await asyncio.sleep(5)
        return log

    assert run_virtually(run) == ["worker"] * 3 + ["cancelled"]


def test_waiting_for_nothing_is_a_deadlock():
    async def wait_for_ever():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run_virtually(wait_for_ever)


def test_an_error_that_nobody_looked_at_fails_the_run():
    async def careless():
        async def fail():
            raise ValueError("unseen")

        asyncio.get_running_loop().create_task(fail())
        await asyncio.sleep(1)
        import gc

        gc.collect()

    with pytest.raises(AssertionError, match="unseen errors"):
        run_virtually(careless)


def test_hours_pass_in_no_time():
    async def wait():
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    assert run_virtually(wait) == 86_400


def test_a_disk_outlives_the_process_and_takes_nothing_from_a_dead_one():
    import random

    from strata.channels.persistence.interface import ParticipantKey

    async def run():
        disk, key, counts = Disk(), ParticipantKey("room", "me"), FaultCounts()
        first = SimStore(disk, Faults(), random.Random(1), counts)
        await first.apply(key, [Put("k", "a", b"1")])
        first.unplugged = True
        with pytest.raises(PersistenceClosed):
            await first.apply(key, [Put("k", "a", b"2")])
        second = SimStore(disk, Faults(disk_failure=0.9), random.Random(1), counts)
        assert (await second.load(key)).records == {"k": {"a": b"1"}}
        with pytest.raises(StorageFull):
            for _ in range(50):
                await second.apply(key, [Put("k", "a", b"3")])
        assert counts["disk_failures"] >= 1
        await asyncio.sleep(5)
        began_at = disk.trying_since
        second.faults = Faults()
        await second.apply(key, [Put("k", "a", b"4")])
        assert began_at is not None and disk.written_from == began_at and disk.trying_since is None

    run_virtually(run)


@pytest.mark.parametrize("wrong", [{"loss": 1.0}, {"loss": -0.1}, {"crashes": -1}, {"latency": (2.0, 1.0)}])
def test_faults_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Faults(**wrong)


def test_a_process_that_sleeps_does_nothing_and_its_clock_stands_still():
    async def run():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        ticks: list[tuple[object, float]] = []
        woken = asyncio.Event()

        async def work():
            asyncio.get_running_loop().create_task(listen())
            while True:
                await asyncio.sleep(10)
                ticks.append((loop.time(), virtual_time()))

        async def listen():
            await woken.wait()
            ticks.append(("heard", virtual_time()))

        process = Process("laptop")
        process.start(work())
        await asyncio.sleep(15)
        process.fall_asleep()
        woken.set()
        await asyncio.sleep(3_600)
        assert ticks == [(10, 10)]
        process.wake_up()
        await asyncio.sleep(12)
        process.kill()
        return ticks

    assert run_virtually(run) == [(10, 10), ("heard", 3_615), (20, 3_620)]


def test_a_process_can_be_killed_in_its_sleep():
    async def run():
        process = Process("laptop")
        task = process.start(asyncio.sleep(10))
        await asyncio.sleep(1)
        process.fall_asleep()
        process.kill()
        await asyncio.wait([task])
        return task.cancelled()

    assert run_virtually(run)
