"""Standing comparisons in virtual time: timer, doubts, requests of operators, and peers that withhold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from strata.relays.conduct import Aspect
from strata_testkit.sim.loop import run_virtually, virtual_time

from relayd.faults import FaultLog
from relayd.federation import antientropy
from relayd.federation.antientropy import AntiEntropy
from relayd.federation.comparing import RECENT_SECONDS, Fetched
from relayd.federation.comparison_turns import TURN_SECONDS
from relayd.federation.link_parts import LinkEnded
from relayd.federation.peers_file import Upstream
from relayd.metrics import Metrics
from relayd.store.peers import PeerComparison
from relayd.store.types import StoreUnavailable
from tests.support.made_sets import MadeLog, MadePeer, made
from tests.support.virtual_time import without_threads

NOW = 1_790_000_000
BACKFILL = 604_800
PEERS = {n: Upstream(f"wss://{n}", f"did:strata:z{n}") for n in (1, 2)}


class MadeTable:
    """The table of comparisons: one row for each peer."""

    def __init__(self) -> None:
        self.rows: dict[int, PeerComparison] = {}
        self.is_away = False

    def ask(self, peer_id: int, since: int | None = None) -> None:
        row = self.rows.get(peer_id) or PeerComparison(peer_id, 0, 0, None, False, None, None)
        self.rows[peer_id] = row._replace(asked=row.asked + 1, asked_since=since)

    async def compared(
        self, peer_id: int, found: dict[str, object], *, done: int | None, equal_at: int | None
    ) -> None:
        if self.is_away:
            raise StoreUnavailable("away")
        row = self.rows.get(peer_id) or PeerComparison(peer_id, 0, 0, None, False, None, None)
        self.rows[peer_id] = row._replace(
            found=found,
            is_running=done is None,
            done=max(row.done, done or 0),
            equal_at=row.equal_at if equal_at is None else equal_at,
        )


class MadeWorld:
    """A relay with two peers, checked once a second as `Federation` does."""

    def __init__(self, interval: float = 300.0) -> None:
        self.log, self.table = MadeLog(), MadeTable()
        self.peers = {n: MadePeer([], self.log) for n in PEERS}
        self.links = {
            n: SimpleNamespace(is_connected=True, has_read_all=True, fetch=peer.fetch)
            for n, peer in self.peers.items()
        }
        self.withheld: list[int] = []
        self.noted: list[tuple[Aspect, bool]] = []
        self.caught: list[Exception] = []
        faults = SimpleNamespace(caught=lambda where, error: self.caught.append(error))
        self.metrics = Metrics()
        self.compares = AntiEntropy(
            connect=lambda peer: self.peers[int(peer.relay_id[-1])].connect(),
            store=cast(Any, self.log),
            table=self.table,
            metrics=self.metrics,
            faults=cast(FaultLog, faults),
            clock=lambda: NOW,
            interval=interval,
            max_items=1000,
            max_backfill_seconds=BACKFILL,
            noted=self._note,
        )

    def _note(self, peer: Upstream, number: int, kind: Aspect, is_good: bool) -> None:
        self.noted.append((kind, is_good))
        if kind is Aspect.PRESENCE and not is_good:
            self.withheld.append(number)

    async def run(self, seconds: float, of: Sequence[int] = (1,), step: float = 1.0) -> None:
        end = virtual_time() + seconds
        while virtual_time() < end:
            for number in of:
                link = cast(Any, self.links[number])
                self.compares.look_after(PEERS[number], number, link, self.table.rows.get(number))
            await asyncio.sleep(step)

    def counted(self, number: int, outcome: str) -> float:
        return float(self.metrics.peer_comparisons.labels(PEERS[number].relay_id, outcome)._value.get())


@pytest.fixture(autouse=True)
def made_time(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)
    monkeypatch.setattr(antientropy, "time", SimpleNamespace(monotonic=virtual_time))
    random.seed(5)


def test_the_last_day_is_compared_each_interval_and_everything_each_day():
    async def work() -> None:
        world = MadeWorld()
        await world.run(2 * 86_400, step=15)
        await world.compares.stop_all()
        spans = [span.since for span in world.peers[1].asked if not span.types]
        assert set(spans) == {NOW - RECENT_SECONDS, NOW - BACKFILL + 3600}
        assert 2 <= spans.count(NOW - BACKFILL + 3600) <= 4
        assert 2 * 86_400 / 390 - 2 <= len(spans) <= 2 * 86_400 / 225 + 2
        assert world.counted(1, "equal") == len(spans)
        row = world.table.rows[1]
        assert (row.is_running, row.equal_at) == (False, NOW)

    run_virtually(work)


def test_a_doubt_has_everything_compared_before_the_interval_is_over():
    async def work() -> None:
        world = MadeWorld(interval=3600.0)
        world.compares.doubt(1)  # before the peer was ever compared
        await world.run(3)
        assert [span.since for span in world.peers[1].asked if not span.types] == [NOW - BACKFILL + 3600]
        for _ in range(200):  # a log that keeps restarting gets no more comparisons
            world.compares.doubt(1)
            await world.run(3)
        assert world.peers[1].connections == 1
        await world.run(4500)
        assert world.peers[1].connections == 2

    run_virtually(work)


def test_a_second_full_of_packets_makes_no_comparison_rarer():
    """A stranger can date any number of packets alike, and what a peer withholds would go unnoticed."""

    async def work() -> None:
        world = MadeWorld()
        crowd = [made(n, NOW - 500) for n in range(21)]
        world.log.put(*crowd)
        world.peers[1].claims = {each.packet_id: each for each in crowd}
        world.peers[1].most_items = 20
        await world.run(4 * 3600, step=15)
        await world.compares.stop_all()
        assert world.counted(1, "problem") >= 30

    run_virtually(work)


def test_an_interval_of_0_compares_on_request_alone():
    async def work() -> None:
        world = MadeWorld(interval=0)
        world.compares.doubt(1)
        await world.run(86_400, step=60)
        assert world.peers[1].connections == 0
        world.table.ask(1, since=NOW - 500)
        await world.run(10)
        assert [span.since for span in world.peers[1].asked] == [0, NOW - 500]
        world.table.ask(1, since=5)  # older than what may be accepted
        await world.run(10)
        assert world.peers[1].asked[-1].since == NOW - BACKFILL + 3600
        world.table.ask(1)
        await world.run(10)
        assert (world.peers[1].connections, world.table.rows[1].done) == (3, 3)

    run_virtually(work)


@pytest.mark.parametrize("error", [LinkEnded("cut"), StoreUnavailable("away"), RuntimeError("a fault")])
def test_a_request_that_fails_has_its_answer_and_is_not_tried_each_second(error: Exception):
    async def work() -> None:
        world = MadeWorld(interval=0)
        world.peers[1].claims = {made(1, NOW - 500).packet_id: made(1, NOW - 500)}

        async def failing(ids: Sequence[bytes]) -> Fetched:
            raise error

        world.links[1].fetch = failing
        world.table.ask(1)
        await world.run(100)
        row = world.table.rows[1]
        assert (world.peers[1].connections, row.done, row.is_running) == (1, 1, False)
        assert row.found is not None
        assert row.found["problem"]
        assert world.caught == ([error] if isinstance(error, RuntimeError) else [])

    run_virtually(work)


def test_nothing_is_compared_over_a_link_that_is_down():
    async def work() -> None:
        world = MadeWorld()
        world.links[1].is_connected = False
        world.table.ask(1)
        await world.run(7200, step=10)
        assert world.peers[1].connections == 0
        world.links[1].is_connected = True
        await world.run(5)
        assert world.table.rows[1].done == 1

    run_virtually(work)


def test_a_request_for_less_does_not_stand_for_what_is_due():
    async def work() -> None:
        world = MadeWorld()
        await world.run(10)
        world.links[1].is_connected = False
        world.compares.doubt(1)  # its log has begun anew: everything may be missing
        world.table.ask(1, since=NOW - 500)
        await world.run(600)
        world.links[1].is_connected = True
        await world.run(10)
        assert world.table.rows[1].done == 1
        assert world.peers[1].asked[-1].since == NOW - BACKFILL + 3600
        # A comparison before it is due does not replace it.
        world.compares.doubt(1)
        world.table.ask(1, since=NOW - 500)
        await world.run(10)
        assert world.peers[1].asked[-1].since == NOW - 500
        await world.run(900)
        assert NOW - BACKFILL + 3600 in {span.since for span in world.peers[1].asked[4:]}
        await world.compares.stop_all()

    run_virtually(work)


def test_a_silent_peer_holds_up_no_other_and_is_asked_ever_less():
    async def work() -> None:
        world = MadeWorld()
        world.peers[1].delay = 1e12
        await world.run(86_400, of=(1, 2), step=15)
        await world.compares.stop_all()
        silent, other = world.peers[1].connections, world.peers[2].connections
        assert silent <= 9
        assert other >= (86_400 - silent * TURN_SECONDS) / 390 - silent
        assert world.counted(1, "problem") in (silent, silent - 1)
        assert world.peers[1].open == world.peers[2].open == 0

    run_virtually(work)


def test_a_peer_that_is_slow_while_nobody_waits_has_its_hour():
    async def work() -> None:
        world = MadeWorld(interval=0)
        world.peers[1].delay = 1000.0
        world.table.ask(1)
        await world.run(2100, of=(1,), step=15)
        row = world.table.rows[1]
        assert (row.done, row.equal_at) == (1, NOW)

    run_virtually(work)


@pytest.mark.parametrize("way", ["slow", "many parts", "busy", "fetching"])
def test_a_peer_that_lies_about_anything_has_another_one_wait_for_minutes_at_most(monkeypatch, way):
    async def work() -> None:
        world = MadeWorld(interval=0)
        liar = world.peers[1]
        if way == "slow":
            liar.delay = TURN_SECONDS - 1
        elif way == "many parts":
            liar.delay, liar.most_items = TURN_SECONDS - 1, -1
        elif way == "busy":
            liar.busy, liar.retry_after = 10**9, 300
        else:
            liar.claims = {each.packet_id: each for each in (made(n, NOW - 500) for n in range(9))}
            world.links[1].fetch = lambda ids: asyncio.sleep(1e12, Fetched(set(), True))
        waits = []
        for _ in range(20):
            if world.table.rows.get(1) is None or not world.table.rows[1].is_running:
                world.table.ask(1)
            await world.run(7, of=(1,))
            world.table.ask(2)
            asked_at = virtual_time()
            while world.table.rows[2].done < world.table.rows[2].asked and virtual_time() < asked_at + 9000:
                await world.run(1, of=(1, 2))
            waits.append(virtual_time() - asked_at)
        await world.compares.stop_all()
        assert max(waits) <= 2 * TURN_SECONDS + 5, "a turn of the other one before each of its two parts"

    run_virtually(work)


def test_a_process_that_is_killed_amid_a_comparison_leaves_the_request_to_the_next():
    async def work() -> None:
        world = MadeWorld(interval=0)
        world.peers[1].delay = 50.0
        world.table.ask(1)
        await world.run(20)
        assert world.peers[1].open == 1
        await world.compares.stop(1)
        assert (world.peers[1].open, world.table.rows[1].done) == (0, 0)
        after = MadeWorld(interval=0)
        after.table = world.table
        after.compares._table = world.table
        await after.run(10)
        assert (after.table.rows[1].done, after.table.rows[1].is_running) == (1, False)

    run_virtually(work)


def test_a_result_that_cannot_be_written_is_lost_and_no_fault():
    async def work() -> None:
        world = MadeWorld()
        world.table.is_away = True
        await world.run(1000)
        assert world.caught == []
        assert world.counted(1, "problem") >= 1
        world.table.is_away = False
        await world.run(4000)
        assert world.counted(1, "equal") >= 1

    run_virtually(work)


def test_what_a_comparison_says_of_a_peer_is_noted_once_however_many_packets():
    async def work() -> None:
        world = MadeWorld(interval=0)
        world.peers[1].claims = {each.packet_id: each for each in (made(n, NOW - 500) for n in range(9))}
        for noted in (
            [(Aspect.PRESENCE, True), (Aspect.CONSISTENCY, False)],  # reading had passed what it sent
            [(Aspect.CONSISTENCY, True)],
        ):
            world.table.ask(1)
            await world.run(10)
            assert world.noted == noted
            world.noted.clear()

    run_virtually(work)


@pytest.mark.parametrize("reason", ["it is in a group", "reading has not come so far"])
def test_a_peer_that_brings_what_reading_could_not_has_not_held_it_back(monkeypatch, reason):
    """Another member of its group may have held it back, or a stranger's packets have been in the way."""

    async def work() -> None:
        world = MadeWorld(interval=0)
        world.peers[1].claims = {each.packet_id: each for each in (made(n, NOW - 500) for n in range(9))}
        if reason == "it is in a group":
            monkeypatch.setitem(PEERS, 1, Upstream("wss://1", "did:strata:z1", group="mesh"))
        else:
            world.links[1].has_read_all = False
        world.table.ask(1)
        await world.run(10)
        assert world.noted == [(Aspect.PRESENCE, True)]

    run_virtually(work)


def test_a_member_that_names_the_same_packets_twice_and_sends_none_is_told_of():
    async def work() -> None:
        world = MadeWorld(interval=0)
        peer = world.peers[1]
        peer.claims = {each.packet_id: each for each in (made(n, NOW - 500) for n in range(3))}
        peer.serves = lambda packet_id: packet_id == made(0, 0).packet_id
        for told in ([], [1], [1, 1]):
            world.table.ask(1)
            await world.run(10)
            assert world.withheld == told
        # Other packets that it withholds for the first time, or could not send, are no contradiction.
        peer.claims = {each.packet_id: each for each in (made(n, NOW - 500) for n in range(7, 9))}
        world.table.ask(1)
        await world.run(10)
        peer.answers_whole = False
        world.table.ask(1)
        await world.run(10)
        assert world.withheld == [1, 1]
        assert world.metrics.peer_differences.labels(PEERS[1].relay_id, "withheld")._value.get() == 10

    run_virtually(work)
