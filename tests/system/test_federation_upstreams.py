"""One real relay that reads from arbitrarily misbehaving upstreams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import strata
from msgspec import Raw
from msgspec.structs import replace
from strata.protocol import wire
from strata.protocol.documents import method_id
from strata.protocol.ids import Identity
from strata.protocol.keys import rotate_content
from strata.protocol.negentropy import ItemSet, Reconciler
from strata.protocol.packets import Packet, build

from tests.support.federations import eventually, holds, ids_at, noted, peer_comes_to, peer_of, peers_command
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess
from tests.support.relays import ALL_EXTENSIONS, START, FakeRelay, NaiveRelay, Session

pytestmark = pytest.mark.timeout(400)
READER = Identity.from_seed(b"R" * 32)
DAY = 86_400


class Upstream(NaiveRelay):
    """A naive relay that lets its downstream replicate, and reports for each packet what a test wants."""

    def __init__(self) -> None:
        super().__init__(ALL_EXTENSIONS)
        self.relay_id = new_identity().did
        self.server_id = self.relay_id
        self.lifetime = int(time.time()) - START + 3600
        self.grants = frozenset({"subscribe", "replicate"})
        self.witnesses: dict[bytes, int] = {}
        self.disguise = self._dated

    def _dated(self, event: wire.Event) -> wire.Event:
        packet = json.loads(bytes(event.packet))
        at = self.witnesses.get(bytes(event.packet), packet.get("timestamp", 0))
        return replace(event, received_at=at)

    def put(self, packet: Packet, *, said: int | None = None) -> None:
        """Serve a packet, with this `received_at`."""
        if said is not None:
            self.witnesses[packet.canonical] = said
        self.append(packet)


class Withholding(Upstream):
    """It compares sets, and names packets that it does not serve."""

    def __init__(self) -> None:
        super().__init__()
        self.extensions |= {"reconcile"}
        self.named: list[Packet] = []
        self._reconciler = Reconciler(ItemSet([]))

    def receive(self, session: Session, data: bytes) -> None:
        message = wire.decode_client_message(data)
        if not isinstance(message, wire.Reconcile):
            super().receive(session, data)
            return
        if message.until is not None:
            types = message.types or ("POST",)
            items = [
                (each.timestamp, each.digest) for each in self.named if self._is_named(each, tuple(types))
            ]
            self._reconciler = Reconciler(ItemSet(items))
        answer = self._reconciler.respond(bytes.fromhex(message.message))
        session.send(wire.Reconciled(message=answer.hex(), client_msg_id=message.client_msg_id))

    def _is_named(self, packet: Packet, types: tuple[str, ...]) -> bool:
        return packet.content["type"] in types


class Unasked(Withholding):
    """It sends all that it has, whatever it is asked for, except what it names in comparisons alone."""

    def __init__(self) -> None:
        super().__init__()
        self.only_by_id: list[Packet] = []

    def _matches(self, subscribe: wire.Subscribe, packet: Packet, received_at: int, *, live: bool) -> bool:
        wanted = None if subscribe.filters is None else subscribe.filters.packet_ids
        return packet.packet_id in wanted if wanted else packet not in self.only_by_id

    def _is_named(self, packet: Packet, types: tuple[str, ...]) -> bool:
        return "POST" in types  # not among the keys


class Reading:
    """The real relay, and the state of its one peer."""

    def __init__(self, process: RelayProcess) -> None:
        self.process = process

    async def holds(self, author: Identity, count: int) -> dict[str, int]:
        """The receipt time of each packet of this author, once the relay holds `count`."""
        events = await holds(self.process, [author.did], lambda found: len(found) >= count)
        assert len(events) == count
        return {event["packet"]["packet_id"]: event["received_at"] for event in events}


@contextlib.asynccontextmanager
async def reading(
    folder: Path, upstream: Upstream, selection: str = "", **settings: Any
) -> AsyncIterator[tuple[Reading, FakeRelay]]:
    """A relay that reads from this upstream, all or a selection: lines of `peers.toml`."""
    async with FakeRelay(upstream) as fake:
        peers = folder / "peers.toml"
        peers.write_text(f'[[peer]]\nurl = "{fake.url}"\nrelay_id = "{upstream.relay_id}"\n{selection}\n')
        process = RelayProcess(
            folder / "relay", peers_file=peers, identity_seed=(b"R" * 32).hex(), **settings
        )
        await asyncio.to_thread(process.start)
        try:
            yield Reading(process), fake
        finally:
            await asyncio.to_thread(process.kill)


def subscribes(upstream: Upstream) -> list[wire.Subscribe]:
    return [m for session in upstream.sessions for m in session.received if isinstance(m, wire.Subscribe)]


@pytest.mark.req("R-349", "R-350", "R-355", "R-365", "R-369", "R-370", "R-391")
async def test_what_a_peer_sends_is_judged_and_dated(tmp_path):
    upstream, author, now = Upstream(), new_identity(), int(time.time())
    fresh, old = make(author), make(author, age=3 * DAY)
    too_old, dated_wrong = make(author, age=8 * DAY), make(author, age=60)
    ahead = make(author, age=30)
    forged = make(author).canonical.replace(b"hello", b"hallo")
    note = {"id": "5c" * 32, "pubkey": "7e" * 32, "created_at": now, "kind": 1, "tags": [], "content": "hi"}
    foreign = json.dumps(note | {"sig": "a1" * 64}).encode()  # the bridge maps it first
    bridged = make(author)
    upstream.put(fresh, said=now - 5)
    upstream.put(old, said=now - 3 * DAY)
    upstream.put(too_old, said=now - 8 * DAY)
    upstream.put(dated_wrong, said=0)
    upstream.put(ahead, said=now + 9999)
    upstream.put(bridged)
    honest = upstream.disguise

    def with_a_forgery(event: wire.Event) -> wire.Event:
        event = honest(event)
        other = {too_old.canonical: forged, bridged.canonical: foreign}.get(bytes(event.packet))
        return event if other is None else replace(event, packet=Raw(other))

    upstream.disguise = with_a_forgery
    async with reading(tmp_path, upstream) as (relay, _):
        held = await relay.holds(author, 4)
        assert held[fresh.packet_id] == now - 5
        assert held[old.packet_id] == now - 3 * DAY
        for packet in (dated_wrong, ahead):
            assert abs(held[packet.packet_id] - time.time()) < 120, "local time counts"
        # One for the forged packet, one for the foreign note, which nobody maps here.
        await peer_comes_to(relay.process, lambda peer: peer["offences"] == 2)
        # And two impossible times: they cost score, and bar nobody.
        await eventually(lambda: noted(relay.process, upstream.relay_id, "clock") == (0, 2))
        assert (await peer_of(relay.process))["state"] == "connected"
        (session,) = upstream.sessions
        auth = next(m for m in session.received if isinstance(m, wire.Auth))
        assert (auth.author_id, auth.capabilities) == (READER.did, ["subscribe", "replicate"])
        first = subscribes(upstream)[0]
        assert first.filters is not None
        assert (first.filters.since, first.replication_profile) == (0, "FULL_ARCHIVE")
        assert (first.filters.authors, first.filters.types) == (None, None)


@pytest.mark.req("R-168", "R-367")
async def test_a_client_that_asks_for_what_came_since_gets_what_a_peer_brought_late(tmp_path):
    upstream, author, began = Upstream(), new_identity(), int(time.time())
    late = make(author, age=3 * DAY)
    upstream.put(late, said=began - 3 * DAY)
    async with reading(tmp_path, upstream) as (relay, _):
        await relay.holds(author, 1)
        async with (
            strata.connect(relay.process.ws) as client,
            client.fetch(authors=author.did, received_since=began) as found,
        ):
            delivered = [(each.packet, each.received_at) async for each in found]
    assert delivered == [(late, began - 3 * DAY)]


@pytest.mark.req("R-381")
async def test_a_peer_that_forges_is_barred_until_it_is_forgiven(tmp_path):
    upstream, author = Upstream(), new_identity()
    packets = [make(author) for _ in range(4)]
    for packet in packets:
        upstream.put(packet)
    honest = upstream.disguise
    upstream.disguise = lambda event: replace(
        honest(event), packet=Raw(bytes(event.packet).replace(b"hello", b"hallo"))
    )
    async with reading(tmp_path, upstream) as (relay, fake):
        peer = await peer_comes_to(
            relay.process, lambda peer: peer["state"] == "barred" and peer["barred_until"] is not None
        )
        assert (peer["standing"], peer["score"] < 0.3) == ("blacklisted", True)
        await fake.abandoned.wait()
        assert await ids_at(relay.process, [author.did]) == []
        upstream.disguise = honest
        later = make(author)
        upstream.put(later)
        for action in ("forgive", "reset-cursor"):
            done = await asyncio.to_thread(peers_command, relay.process, action, upstream.relay_id)
            assert done.returncode == 0, done.stderr
        held = await relay.holds(author, 5)
        assert set(held) == set(ids_of([{"packet": json.loads(p.canonical)} for p in (*packets, later)]))


@pytest.mark.req("R-366", "R-364")
async def test_a_peer_that_knows_the_cursor_no_more_is_read_from_a_time(tmp_path):
    upstream, author, now = Upstream(), new_identity(), int(time.time())
    for n in range(3):
        upstream.put(make(author), said=now - 10 + n)
    async with reading(tmp_path, upstream) as (relay, fake):
        await relay.holds(author, 3)
        await peer_comes_to(relay.process, lambda peer: peer["last_witness"] == now - 8)
        upstream.generation += 1
        fake.cut()
        upstream.put(make(author))
        await relay.holds(author, 4)
        asked = [m.filters for m in subscribes(upstream) if m.filters is not None]
        assert any(f.cursor is None and f.since == now - 8 - 86_700 for f in asked)


@pytest.mark.req("R-364", "R-373")
async def test_a_peer_whose_cursor_never_moves_is_read_again_and_each_packet_stored_once(tmp_path):
    upstream, author = Upstream(), new_identity()
    for _ in range(4):
        upstream.put(make(author))
    honest = upstream.disguise
    upstream.disguise = lambda event: replace(honest(event), cursor=f"{upstream.generation}:0")
    async with reading(tmp_path, upstream) as (relay, fake):
        await relay.holds(author, 4)
        upstream.put(make(author))
        fake.cut()
        await relay.holds(author, 5)
        peer = await peer_of(relay.process)
        assert (peer["offences"], peer["skipped"]) == (0, 0)


@pytest.mark.req("R-378")
async def test_a_peer_that_says_later_is_asked_later(tmp_path):
    upstream, author = Upstream(), new_identity()
    upstream.put(make(author))
    asked: list[float] = []

    def later(message: wire.Subscribe) -> wire.Error | None:
        asked.append(time.monotonic())
        if len(asked) > 1:
            return None
        return wire.Error(
            code="rate_limited", reason="busy", retry_after=2, subscription_id=message.subscription_id
        )

    upstream.answer_subscribe = later
    async with reading(tmp_path, upstream) as (relay, _):
        await relay.holds(author, 1)
        assert asked[1] - asked[0] >= 2


@pytest.mark.req("R-353", "R-356")
async def test_a_peer_that_grants_no_replication_and_one_with_another_name_are_not_read(tmp_path):
    upstream, author = Upstream(), new_identity()
    upstream.grants = frozenset({"subscribe"})
    upstream.put(make(author))
    async with reading(tmp_path, upstream) as (relay, _):
        await peer_comes_to(relay.process, lambda peer: "replication_peers" in str(peer["problem"]))
        assert subscribes(upstream) == []
        upstream.grants = frozenset({"subscribe", "replicate"})
        upstream.server_id = new_identity().did
        await peer_comes_to(relay.process, lambda peer: "expected" in str(peer["problem"]))
        assert await ids_at(relay.process, [author.did]) == []


@pytest.mark.req("R-349", "R-370")
@pytest.mark.parametrize("in_order", [True, False])
async def test_a_backlog_of_an_author_who_has_changed_keys(tmp_path, in_order):
    """Each packet is judged by the keys of its own time. A peer that sends keys late is asked for them."""
    upstream, first, now = Upstream(), new_identity(), int(time.time())
    second = new_identity().speaking_for(first.did)
    rotated_at = now - 3 * DAY
    rotation = rotate_content(
        method_id(first.did, "keys-2"),
        second.public_key,
        replaces=method_id(first.did, "keys-1"),
        valid_from=rotated_at,
    )
    history = [
        build(first, {"type": "POST", "text": "before"}, timestamp=rotated_at - DAY),
        build(first, rotation, timestamp=rotated_at),
        build(second, {"type": "POST", "text": "after"}, timestamp=rotated_at + DAY),
        build(first, {"type": "POST", "text": "by the old key"}, timestamp=rotated_at + DAY),
    ]
    for packet in history if in_order else (history[2], history[0], history[1], history[3]):
        upstream.put(packet)
    async with reading(tmp_path, upstream) as (relay, _):
        held = await relay.holds(first, 3)
        assert set(held) == {packet.packet_id for packet in history[:3]}
        peer = await peer_comes_to(relay.process, lambda peer: peer["skipped"] == 1)
        assert peer["offences"] == 0, "an author's own mistake"


def _has_offences(count: int, peer: dict[str, Any]) -> bool:
    return bool(peer["offences"] == count)


@pytest.mark.req("R-381")
async def test_a_peer_that_names_packets_and_sends_none_is_barred(tmp_path):
    """Not at once: only packets that it names in two comparisons, and sends in neither, are an offence."""
    upstream, author = Withholding(), new_identity()
    served = make(author, age=600)
    upstream.put(served)
    upstream.named = [served, *(make(author, age=600) for _ in range(3))]
    async with reading(tmp_path, upstream, reconcile_interval=0) as (relay, _):
        await relay.holds(author, 1)
        for n in range(4):
            await peer_comes_to(relay.process, lambda peer: peer["state"] == "connected")
            done = await asyncio.to_thread(
                peers_command, relay.process, "reconcile", upstream.relay_id, "--json"
            )
            found = json.loads(done.stdout)
            assert (found["need"], found["withheld"], found["brought"]) == (3, 3, 0), found
            if n < 3:
                await peer_comes_to(relay.process, partial(_has_offences, n))
        peer = await peer_comes_to(
            relay.process, lambda peer: peer["state"] == "barred" and peer["barred_until"] is not None
        )
        assert peer["barred_until"] > time.time() + 3000
        assert len(await ids_at(relay.process, [author.did])) == 1


def _refused(relay: RelayProcess, relay_id: str) -> dict[str, int]:
    found: dict[str, int] = json.loads(peers_command(relay, "show", relay_id, "--json").stdout)["refused"]
    return found


@pytest.mark.req("R-360", "R-379")
async def test_what_nobody_asked_a_peer_for_is_not_stored(tmp_path):
    """Neither of its log, nor by id in a comparison; it is recorded, and no offence."""
    upstream, author, other = Unasked(), new_identity(), new_identity()
    asked = [make(author, n=n) for n in range(2)]
    unasked = [*(make(author, type="NOTE") for _ in range(3)), *(make(other) for _ in range(4))]
    named = [make(author, age=600), make(other, age=600), make(author, type="NOTE", age=600)]
    for packet in (*asked, *unasked, *named):
        upstream.put(packet)
    upstream.only_by_id = named
    upstream.named = named
    selection = f'authors = ["{author.did}"]\ntypes = ["POST"]'
    async with reading(tmp_path, upstream, selection, reconcile_interval=0) as (relay, _):
        await relay.holds(author, 2)
        await eventually(lambda: sum(_refused(relay.process, upstream.relay_id).values()) == 7)
        done = await asyncio.to_thread(peers_command, relay.process, "reconcile", upstream.relay_id, "--json")
        found = json.loads(done.stdout)
        assert (found["brought"], found["refused"], found["withheld"]) == (1, 2, 0), found
        await relay.holds(author, 3)
        assert await ids_at(relay.process, [other.did]) == []
        await eventually(
            lambda: _refused(relay.process, upstream.relay_id) == {"policy_rejected/not_asked_for": 9}
        )
        peer = await peer_of(relay.process)
        assert (peer["state"], peer["offences"]) == ("connected", 0)


@pytest.mark.req("R-364")
async def test_a_packet_dated_ahead_does_not_stop_the_reading_of_what_follows(tmp_path):
    """Where the upstream's clock is ahead, any stranger can publish one there."""
    upstream, author = Upstream(), new_identity()
    packets = [make(author, age=-3480), *(make(author, n=n) for n in range(9500))]
    upstream.log += [(packet, packet.timestamp) for packet in packets]
    async with reading(tmp_path, upstream, metrics_listen="127.0.0.1:0", reconcile_interval=0) as (relay, _):

        def stored() -> float:
            try:
                return relay.process.metric("relayd_peer_packets_total", outcome="stored")
            except KeyError:  # it has not begun to read
                return 0

        await eventually(lambda: stored() == 9500)
        await eventually(lambda: _refused(relay.process, upstream.relay_id) == {"timestamp_in_future": 1})
        peer = await peer_of(relay.process)
        assert (peer["state"], peer["offences"]) == ("connected", 0)
