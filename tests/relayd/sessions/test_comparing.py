"""What a session that compares sets may cost, in virtual time: one bounded set, and none once silent."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from strata.protocol.negentropy import ItemSet, Reconciler
from strata.protocol.wire import Reconcile
from strata_testkit.sim.loop import run_virtually

from relayd.sessions.comparing import Comparer
from relayd.sessions.connection import Connection
from relayd.sessions.open_comparisons import Comparisons
from relayd.store.items import ItemRange
from relayd.store.types import StoreUnavailable
from tests.support.made_sets import MadeLog, made
from tests.support.virtual_time import without_threads

NOW = 1_790_000_000
FIRST = Reconciler(ItemSet([])).initiate().hex()

without_threads = pytest.fixture(autouse=True)(without_threads)


class MadeRelay:
    """The part of a relay that comparing needs."""

    def __init__(self, count: int = 20, most_items: int = 1000) -> None:
        self.store = MadeLog()
        self.store.put(*(made(n, NOW - 10_000 + n) for n in range(count)))
        self.settings = SimpleNamespace(reconcile_max_items=most_items)
        self.comparisons = Comparisons()
        self.limits = SimpleNamespace(peers={})
        self.metrics = SimpleNamespace(rate_limited={"reconcile": SimpleNamespace(inc=lambda: None)})
        self.caught: list[Exception] = []
        self.faults = SimpleNamespace(caught=lambda where, error: self.caught.append(error))
        self.clock = lambda: NOW


class MadeSession:
    """One connection that compares; it records its answers."""

    def __init__(self, relay: MadeRelay, identity: str = "did:a") -> None:
        self.relay = relay
        self.answers: list[dict[str, Any]] = []
        self.closed: list[int] = []
        self.spent = 0
        self.worked: list[float] = []
        self.writes = asyncio.Event()
        self.writes.set()
        self.session = SimpleNamespace(identity=identity, may_reconcile=True)
        outbox = SimpleNamespace(queue=self._sent, flush=lambda: None)
        socket = SimpleNamespace(outbox=outbox, close=self._closed, abort=lambda: None)
        connection = SimpleNamespace(
            id=1,
            _relay=relay,
            socket=socket,
            payer=None,
            answer=lambda payload, code: self.answers.append(json.loads(payload)),
            writable=self.writes.wait,
            backfilled=self._spend,
            checked_for=self.worked.append,
        )
        connection.failed = partial(Connection.failed, cast(Any, connection))
        self.comparer = Comparer(
            cast(Any, relay), cast(Any, connection), cast(Any, socket), cast(Any, self.session)
        )

    def stops_reading_after(self, looks: int) -> None:
        """Let the outbox be full once it was looked at so many times."""
        left = iter(range(looks))

        async def writable() -> None:
            if next(left, None) is None:
                await asyncio.Event().wait()

        self.comparer._connection.writable = writable  # type: ignore[method-assign]

    def _sent(self, frame: bytes) -> None:
        self.answers.append(json.loads(frame[frame.index(b"{") :]))

    def _closed(self, code: int, reason: str) -> None:
        self.closed.append(code)

    def _spend(self, sent_bytes: int) -> None:
        self.spent += sent_bytes

    async def ask(self, message: str = FIRST, until: int | None = NOW, **more: Any) -> dict[str, Any]:
        """Send one and wait for its answer."""
        before = len(self.answers)
        self.comparer.receive(Reconcile(message=message, until=until, client_msg_id="r", **more))
        while len(self.answers) == before:  # noqa: ASYNC110 -- made time
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        return self.answers[-1]


def test_a_set_is_kept_between_messages_and_let_go_after_a_silent_minute():
    async def work() -> None:
        relay = MadeRelay()
        peer = MadeSession(relay)
        assert (await peer.ask())["type"] == "RECONCILED"
        assert (len(relay.comparisons), peer.comparer.held_bytes) == (1, 150 * 20)
        pages = relay.store.pages
        for _ in range(5):  # each message gives it another minute
            await asyncio.sleep(59)
            assert (await peer.ask(until=None))["type"] == "RECONCILED"
        assert relay.store.pages == pages, "the log was read once"
        await asyncio.sleep(60.1)
        assert (len(relay.comparisons), peer.comparer.held_bytes) == (0, 0)
        answer = await peer.ask(until=None)
        assert (answer["code"], "no comparison is open" in answer["reason"]) == ("invalid_schema", True)

    run_virtually(work)


def test_three_at_a_time_and_others_are_told_when_to_come_back():
    async def work() -> None:
        relay = MadeRelay()
        peers = [MadeSession(relay, f"did:{n}") for n in range(4)]
        for peer in peers[:3]:
            assert (await peer.ask())["type"] == "RECONCILED"
        busy = await peers[3].ask()
        assert (busy["code"], busy["detail"], busy["retry_after"]) == ("rate_limited", "reconcile_busy", 15)
        peers[0].comparer.close()
        assert (await peers[3].ask())["type"] == "RECONCILED"

    run_virtually(work)


@pytest.mark.parametrize("pages", [0, 1, 3])
@pytest.mark.parametrize("is_its_own", [True, False])
def test_a_peer_that_reads_nothing_keeps_no_set_once_another_has_its_place(pages: int, is_its_own: bool):
    """Else one peer could have a relay hold a set for each of its sessions."""

    async def work() -> None:
        relay = MadeRelay()
        silent = [MadeSession(relay, f"did:{n}") for n in range(3)]
        for peer in silent:
            peer.stops_reading_after(pages)
            peer.comparer.receive(Reconcile(message=FIRST, until=NOW, client_msg_id="r"))
        await asyncio.sleep(100)
        assert all(peer.comparer._task is not None for peer in silent)
        assert (await MadeSession(relay, "did:0" if is_its_own else "did:3").ask())["type"] == "RECONCILED"
        assert [peer.comparer._task is None for peer in silent] == [True, False, False]
        assert silent[0].answers[-1]["detail"] == "reconcile_busy"
        for peer in silent:
            peer.comparer.close()

    run_virtually(work)


def test_who_compares_part_after_part_keeps_its_place_for_a_while():
    async def work() -> None:
        relay = MadeRelay()
        peers = [MadeSession(relay, f"did:{n}") for n in range(4)]
        for peer in peers[:3]:
            assert (await peer.ask())["type"] == "RECONCILED"
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 80:
            assert (await peers[3].ask())["type"] == "ERROR"
            for peer in peers[:3]:
                assert (await peer.ask())["type"] == "RECONCILED"
            await asyncio.sleep(10)
        await asyncio.sleep(15)
        assert (await peers[0].ask())["detail"] == "reconcile_busy"
        assert (await peers[3].ask())["type"] == "RECONCILED"
        assert len(relay.comparisons) == 3

    run_virtually(work)


@pytest.mark.parametrize("way", ["goes on", "begins again", "comes anew"])
def test_three_that_never_come_to_an_end_keep_nobody_from_comparing(way: str):
    """Whoever waits comes before them, and they make way for it."""

    async def work() -> None:
        relay = MadeRelay()
        slow = [MadeSession(relay, f"did:{n}") for n in range(3)]

        async def hold(number: int) -> None:
            answer = await slow[number].ask()
            while True:
                if way == "comes anew":
                    slow[number].comparer.close()
                    slow[number] = MadeSession(relay, f"did:{number}")
                is_open = way == "goes on" and answer["type"] == "RECONCILED"
                answer = await slow[number].ask(until=None if is_open else NOW)
                if answer["type"] != "RECONCILED":
                    assert answer["detail"] == "reconcile_busy", "it may begin again, later"
                await asyncio.sleep(5)

        holding = [asyncio.create_task(hold(n)) for n in range(3)]
        await asyncio.sleep(1)
        for honest in (MadeSession(relay, "did:honest"), MadeSession(relay, "did:another")):
            for _ in range(8):  # then a relay gives up
                if (answer := await honest.ask())["type"] == "RECONCILED":
                    break
                await asyncio.sleep(answer["retry_after"])
            assert (await honest.ask(until=None))["type"] == "RECONCILED"
        for each in holding:
            each.cancel()
        await asyncio.wait(holding)

    run_virtually(work)


def test_a_refused_request_holds_no_place():
    """For every kind of refusal: places are few."""

    async def work() -> None:
        relay = MadeRelay(most_items=1000)
        cases: list[tuple[str, dict[str, Any]]] = [
            ("zz", {}),
            ("61ff", {}),
            (FIRST, {"types": [str(n) for n in range(70)]}),
            (FIRST, {"until": 2**40, "since": 0, "types": ["T"] * 70 + [str(n) for n in range(65)]}),
        ]
        for n, (message, more) in enumerate(cases):
            peer = MadeSession(relay, f"did:{n}")
            assert (await peer.ask(message, **more))["code"] == "invalid_schema"
            assert (len(relay.comparisons), peer.comparer.held_bytes) == (0, 0)
        relay.settings.reconcile_max_items = 5
        peer = MadeSession(relay)
        large = await peer.ask()
        assert (large["detail"], large["limit"], len(relay.comparisons)) == ("reconcile_too_large", 5, 0)
        assert relay.caught == []

    run_virtually(work)


def test_a_newer_session_of_an_identity_takes_the_set_of_the_older_one_at_once():
    async def work() -> None:
        relay = MadeRelay()
        sessions = [MadeSession(relay) for _ in range(50)]
        for session in sessions:
            assert (await session.ask())["type"] == "RECONCILED"
        assert sum(each.comparer.held_bytes for each in sessions) == 150 * 20
        assert len(relay.comparisons) == 1
        assert (await sessions[0].ask(until=None))["code"] == "invalid_schema"
        assert (await sessions[-1].ask(until=None))["type"] == "RECONCILED"

    run_virtually(work)


def test_a_log_that_is_being_read_for_an_older_session_is_read_no_further():
    async def work() -> None:
        relay = MadeRelay(count=100)
        older, newer = MadeSession(relay), MadeSession(relay)
        older.writes.clear()
        asking = asyncio.create_task(older.ask())
        await asyncio.sleep(1)
        assert (await newer.ask())["type"] == "RECONCILED"
        pages = relay.store.pages
        older.writes.set()
        answer = await asking
        assert (answer["detail"], older.comparer.held_bytes) == ("reconcile_busy", 0)
        assert relay.store.pages <= pages + 1
        assert (await newer.ask(until=None))["type"] == "RECONCILED"

    run_virtually(work)


def test_one_request_at_a_time_and_each_has_one_answer():
    async def work() -> None:
        peer = MadeSession(MadeRelay())
        peer.writes.clear()
        for n in range(3):
            peer.comparer.receive(Reconcile(message=FIRST, until=NOW, client_msg_id=f"r{n}"))
        await asyncio.sleep(1)
        assert [answer["client_msg_id"] for answer in peer.answers] == ["r1", "r2"]
        assert {answer["detail"] for answer in peer.answers} == {"reconcile_busy"}
        peer.writes.set()
        await asyncio.sleep(1)
        assert [answer["client_msg_id"] for answer in peer.answers] == ["r1", "r2", "r0"]
        assert peer.answers[-1]["type"] == "RECONCILED"

    run_virtually(work)


def test_a_session_that_loses_the_capability_meanwhile_is_told():
    async def work() -> None:
        relay = MadeRelay()
        peer = MadeSession(relay)
        peer.session.may_reconcile = False
        answer = await peer.ask()
        assert (answer["code"], answer["detail"]) == ("unauthenticated", "missing_capability")
        assert len(relay.comparisons) == 0

    run_virtually(work)


def test_a_database_that_is_away_and_a_fault_of_ours_end_the_comparison():
    async def work() -> None:
        relay = MadeRelay()
        peer = MadeSession(relay)
        original = relay.store.items

        async def away(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("away")

        cast(Any, relay.store).items = away
        answer = await peer.ask()
        assert (answer["code"], len(relay.comparisons), peer.closed) == ("internal_error", 0, [])
        cast(Any, relay.store).items = original
        assert (await peer.ask())["type"] == "RECONCILED"

        async def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("a fault")

        cast(Any, relay.store).items = broken
        assert (await peer.ask())["code"] == "internal_error"
        assert (len(relay.comparisons), peer.closed, len(relay.caught)) == (0, [1011], 1)

    run_virtually(work)


@pytest.mark.slow
def test_answers_fit_the_frame_and_the_account_pays_for_what_is_read():
    async def work() -> None:
        relay = MadeRelay(count=7000, most_items=10_000)
        peer = MadeSession(relay)
        everything = Reconciler(ItemSet([]), max_frame_bytes=30_000)
        answer = await peer.ask(everything.initiate().hex())
        assert len(answer["message"]) // 2 <= 200_000
        assert peer.spent >= 40 * 7000 + len(answer["message"])
        assert len(peer.worked) == 2, "to sort the set, and to answer"
        # A frame has at most this size, and the rest comes with the next one.
        needed, message = set[bytes](), everything.receive(bytes.fromhex(answer["message"]))
        while True:
            needed.update(message.need)
            if message.message is None:
                break
            answer = await peer.ask(message.message.hex(), until=None)
            message = everything.receive(bytes.fromhex(answer["message"]))
        assert len(needed) == 7000

    run_virtually(work)


def test_what_was_refused_of_the_asking_peer_is_not_named():
    """The peer may have lost it since, and would accuse this relay of naming what it does not send."""

    async def work() -> None:
        relay = MadeRelay(count=0)
        refused = made(5, NOW - 100)
        relay.store.refused[refused.packet_id] = refused
        relay.limits.peers["did:a"] = 7
        for types in (None, ["POST"]):
            asking = Reconciler(ItemSet([]))
            answer = await MadeSession(relay).ask(asking.initiate().hex(), types=types)
            assert asking.receive(bytes.fromhex(answer["message"])) == (None, [], [])

    run_virtually(work)


def test_the_borders_of_ranges_are_others_each_time():
    """Ids chosen so that their sums agree hide nothing for long."""

    async def work() -> None:
        relay = MadeRelay(count=640)
        differs = "6100" + "0001" + "00" * 16  # one range of everything, with the fingerprint of an empty set
        answers = {(await MadeSession(relay).ask(differs))["message"] for _ in range(10)}
        assert len(answers) > 3

    run_virtually(work)


def test_a_request_under_way_ends_with_its_session_and_nothing_is_answered_after_it():
    async def work() -> None:
        relay = MadeRelay()
        peer = MadeSession(relay)
        peer.writes.clear()
        peer.comparer.receive(Reconcile(message=FIRST, until=NOW, client_msg_id="r"))
        await asyncio.sleep(1)
        assert [task.get_name() for task in asyncio.all_tasks()].count("reconcile-1") == 1
        peer.comparer.close()
        peer.writes.set()
        await asyncio.sleep(61)
        assert "reconcile-1" not in [task.get_name() for task in asyncio.all_tasks()]
        assert (peer.answers, peer.closed, relay.caught, len(relay.comparisons)) == ([], [], [], 0)

    run_virtually(work)


def test_each_answer_waits_for_the_socket_and_is_paid_for():
    async def work() -> None:
        relay = MadeRelay()
        peer = MadeSession(relay)
        await peer.ask()
        first = peer.spent
        assert first > 40 * 20, "the ids that were read, and the answer"
        peer.writes.clear()
        peer.comparer.receive(Reconcile(message=FIRST, until=None, client_msg_id="r"))
        await asyncio.sleep(30)
        assert (len(peer.answers), peer.spent) == (1, first)
        peer.writes.set()
        await asyncio.sleep(1)
        assert len(peer.answers) == 2
        assert peer.spent == first + (first - 40 * 20), "the same answer, and no ids"

    run_virtually(work)


def test_a_range_is_what_was_asked_for_and_what_has_expired_here_is_in_none():
    async def work() -> None:
        relay = MadeRelay()
        peer, spans = MadeSession(relay), set[ItemRange]()
        original = relay.store.items

        async def seen(span: ItemRange, *more: Any, **options: Any) -> Any:
            spans.add(span)
            return await original(span, *more, **options)

        cast(Any, relay.store).items = seen
        await peer.ask(until=NOW - 5, since=NOW - 9990, unexpired_at=NOW + 300, types=["POST"], authors=["a"])
        assert spans == {ItemRange(NOW - 9990, NOW - 5, NOW + 300, ("POST",), ("a",))}
        spans.clear()
        await peer.ask(until=NOW, unexpired_at=NOW - 300)
        assert spans == {ItemRange(0, NOW, NOW, (), ())}
        spans.clear()
        many = await peer.ask(types=[str(n) for n in range(40)], authors=[str(n) for n in range(25)])
        assert (many["code"], spans, len(relay.comparisons)) == ("invalid_schema", set(), 0)
        assert (await peer.ask("not hex", until=None))["code"] == "invalid_schema"

    run_virtually(work)
