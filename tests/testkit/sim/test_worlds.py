"""The worlds: each is reproducible, each has something to fulfil, and a judge that is fooled is noticed."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from strata.channels.reliable import HistoryGap, ReliableMessageDeliveryError
from strata_testkit.sim import KINDS, Bounds, Simulation, SimulationFailed, WorldSize, kind_of, run_virtually
from strata_testkit.sim.bounds import Idle
from strata_testkit.sim.checking import Evidence
from strata_testkit.sim.curve import by_gap, by_people, gaps_up_to, people_up_to
from strata_testkit.sim.planted import FAULTS, _sometimes, find
from strata_testkit.sim.simulation import simulate
from strata_testkit.sim.weighing import weigh
from strata_testkit.sim.worlds import WILD, run_world
from strata_testkit.sim.worlds.absence import Away
from strata_testkit.sim.worlds.crowd import crowd_bounds

TINY = WorldSize(gap=30, people=6)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.open_because])
def test_a_world_repeats_and_holds(kind):
    reports = [run_world(4, kind, size=TINY) for _ in range(2)]
    assert reports[0] == reports[1]
    assert reports[0].worlds == {kind: 1}
    assert run_world(5, kind, size=TINY) != reports[0]


def test_the_mix_has_every_kind_that_holds_and_no_other():
    kinds = {kind_of(seed) for seed in range(2_000)}
    assert kinds == {name for name, kind in KINDS.items() if not kind.open_because} | {WILD}
    assert sum(kind_of(seed) == WILD for seed in range(500)) > 250
    assert all(len(kind.open_because) > 20 for kind in KINDS.values() if kind.open_because)


def test_an_open_kind_is_judged_too():
    """It may fail, but it must run to its end and be judged."""
    for name in (name for name, kind in KINDS.items() if kind.open_because):
        try:
            report = run_world(0, name, size=TINY)
        except SimulationFailed as failure:
            assert failure.world == name
            assert str(failure).startswith(f"seed 0 of {name}: ")
        else:
            assert report.checks.messages > 20


@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_has_a_place(name):
    with FAULTS[name].planted():
        pass


@pytest.mark.parametrize(
    "name",
    [
        "hands over twice",
        "order of arrival",
        "keeps everything",
        "loses one in four",
        "no catch-up",
        "gives up in silence",
    ],
)
def test_a_planted_fault_is_found(name):
    found = find(name)
    assert found.seed is not None
    assert found.problem


def test_a_fault_that_fails_by_itself_is_not_found(monkeypatch):
    """Otherwise a fault broken by a changed signature would make a judge that found nothing look good."""
    fault = replace(FAULTS["tells nothing"], broken=_sometimes(lambda self: True))
    monkeypatch.setitem(FAULTS, "tells nothing", fault)
    with pytest.raises(RuntimeError, match="failed by itself"):
        find("tells nothing")


def test_what_is_planted_is_gone_afterwards():
    fault = FAULTS["order of arrival"]
    with fault.planted(), pytest.raises(SimulationFailed):
        run_world(0, WILD)
    assert run_world(0, WILD).runs == 1


# The judge.


def judged(scenario, bounds, **options):
    with pytest.raises(SimulationFailed) as failure:
        simulate(scenario, seed=1, bounds=bounds, **options)
    return "\n".join(failure.value.problems)


async def chat(run):
    for number in range(4):
        await run.participants[number % len(run.participants)].send(b"word %d" % number)
        await asyncio.sleep(5)


def test_bounds_are_held():
    nothing = Bounds(
        idle_minutes=1, idle_syncs_per_minute=0, syncs_per_message=0, sends_per_message=0, entries=0,
        entries_per_message=0,
    )  # fmt: skip
    problems = judged(chat, nothing, participants=8)
    for what in ("idle minutes of 8", "syncs for 4 messages", "items for 4 messages"):
        assert what in problems
    assert simulate(chat, seed=1, bounds=Bounds(idle_minutes=1, entries=1_500)).checks.weighed > 0


def test_a_channel_that_says_it_is_synced_too_early_is_noticed():
    async def claims(run):
        # Its relays have what it does not hear of, and nothing refers to that before the judge asks.
        run.participants[1]._node.hears = lambda topic: False
        await run.participants[0].send(b"word")
        await asyncio.sleep(8)

    assert "p1 said it is synced, and" in judged(claims, Bounds(says_synced_after=5.0), participants=2)


def test_silence_about_a_gap_is_noticed_and_a_word_is_enough(monkeypatch):
    async def away(run):
        await Away(20, 0.5, 0)(run)
        for each in run.participants:
            run.evidence._given_up[each.name].clear()
            run.evidence._gaps[each.name].clear()
        if told:
            lost = [entry for entry in run.evidence._lamport_of if entry not in run._stored()]
            for each in run.participants:
                run.evidence._given_up[each.name].update(lost)

    told, bounds = False, Bounds(gaps_are_told=True)
    # A channel that does not report its gap.
    monkeypatch.setattr(Evidence, "_told_gap", lambda evidence, name, gap: None)
    assert "was never told that it has missed" in judged(away, bounds, participants=1)
    told = True
    try:
        simulate(away, seed=1, bounds=bounds, participants=1)
    except SimulationFailed as failure:
        assert "was never told" not in str(failure)


def test_a_gap_that_a_relay_can_fill_is_noticed():
    async def cries(run):
        await chat(run)
        served = next(iter(run._stored()))
        gap = HistoryGap(
            channel_id="room",
            from_time=None,
            to_time=0,
            from_id=None,
            to_id="first",
            message_ids=(served, "unknown"),
            at_least=2,
        )
        run.evidence._told_gap("p1", gap)

    problems = judged(cries, Bounds(), participants=2)
    assert "p1 was told that" in problems and "is gone, which a relay gives it" in problems
    assert "unknown" not in problems


def test_logs_may_differ_in_what_was_told_and_in_nothing_else():
    evidence = Evidence(gaps_are_told=True)
    logs = ("p0", ["a", "b", "c"], "p1", ["b", "c"])
    assert not evidence.agree(*logs)
    evidence._given_up["p1"].add("a")
    assert evidence.agree(*logs)
    assert not evidence.agree("p0", ["a", "c", "b"], "p1", ["b", "c"]), "in another order"
    assert not evidence.agree("p0", ["b", "c"], "p1", ["a", "b", "c"]), "p0 was told nothing"
    evidence.gaps_are_told = False
    assert not evidence.agree(*logs)


@pytest.mark.parametrize(("first_tried", "blamed"), [(9.9, 0), (10.5, 1)])
def test_a_delivery_error_is_judged_by_when_its_writing_began_however_often_the_disk_failed(
    first_tried: float, blamed: int
) -> None:
    async def run():
        evidence = Evidence(write_seconds=0.02)
        evidence._chunks["r"] = {"m"}
        evidence._acknowledged["p0"]["m"] = 10.0
        await asyncio.sleep(11)
        error = ReliableMessageDeliveryError(request_id="r", message_id="m", error="nobody", code="none")
        evidence._told_undelivered("p0", error, first_tried)
        assert len(evidence.problems) == blamed

    run_virtually(run)


def test_idle_traffic_is_counted_by_the_minute():
    bounds = Bounds(idle_syncs_per_minute=6)
    idle = Idle(people=10, minutes=5, syncs=36, repeats=0, reads=0, bytes_handed_on=0)
    assert not list(bounds.of_idle(idle))
    (problem,) = bounds.of_idle(Idle(people=10, minutes=5, syncs=37, repeats=0, reads=0, bytes_handed_on=0))
    assert "37 syncs in 5 idle minutes of 10" in problem


@pytest.mark.parametrize(("people", "besides"), [(2, 15), (36, 15), (1_000, 70)])
def test_a_crowd_may_sync_more_at_first_the_larger_it_is(people: int, besides: int) -> None:
    bounds = crowd_bounds(people)
    assert not list(bounds.of_talk(8, 8, 4 * 8 + besides))
    (problem,) = bounds.of_talk(8, 8, 4 * 8 + besides + 1)
    assert "syncs for 8 messages" in problem


def test_a_weight_follows_what_is_kept_and_nothing_else():
    kept: dict[str, list[bytes]] = {"a": [b"x" * 100, b"y" * 100]}
    weight = weigh(kept)
    assert weight.entries == 3
    assert weight.size_bytes > 200
    assert weigh(random, kept, None) == weight  # modules are not followed


def test_the_recorded_conversation_is_shared_and_as_long_as_asked_for():
    async def run():
        first, second = (Simulation(seed, participants=0, relays=2) for seed in (1, 2))
        assert first.play(30) == second.play(30) < first.play(40)
        one, other = first.network.relays[0].stored, second.network.relays[1].stored
        assert [*one][:30] == [*other]
        assert all(one[each] is other[each] for each in other)
        # Some speak without having heard the last message, so some messages are never named.
        named = {name for follows in first.evidence._follows.values() for name in follows}
        assert len(first.evidence._follows) - len(named) > 1

    run_virtually(run)


def test_relays_forget_after_their_time():
    async def run():
        simulation = Simulation(1, participants=0, relays=1)
        ended_at = simulation.play(30)
        (relay,) = simulation.network.relays
        relay.retention = 5.0
        kept = [each for each in relay.stored if relay.serves(each, ended_at)]
        assert 0 < len(kept) < 30
        assert kept == [*relay.stored][-len(kept) :]

    run_virtually(run)


# Curves, and the command.


def test_curves_are_measured():
    two, five = by_people(2), by_people(5)
    assert two.sends_per_message >= 1
    assert 0 < two.idle_syncs_per_minute
    assert two.bytes_per_delivery > 100
    assert five.people == 5
    gap = by_gap(40)
    assert gap.received == 40 <= gap.read
    assert people_up_to(30) == [2, 5, 10, 30]
    assert gaps_up_to(1_000) == [100, 300, 1_000]


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "strata", "simulate", *arguments, "--jobs", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_runs_kinds_and_tells_which():
    code, told, _ = command("--worlds", "4", "--kind", "clocks", "--kind", "devices", "--json")
    report = json.loads(told)
    assert code == 0
    assert report["worlds"] == {"clocks": 2, "devices": 2}
    assert report["problems"] == []
    assert report["traffic"]["content"] > 4


@pytest.mark.parametrize(
    "wrong", [["--kind", "clocks"], ["--worlds", "0"], ["--gap", "1"], ["--people", "5000"]]
)
def test_the_command_refuses_what_makes_no_sense(wrong):
    code, _, told = command(*wrong)
    assert code == 2
    assert wrong[0] in told
