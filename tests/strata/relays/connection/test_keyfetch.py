"""Authors' keys over real sockets: requested before a packet is judged, many authors at once (R-075)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
import strata
from strata.channels.connecting import connect
from strata.protocol import packets, wire
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.keys import IDENTITY_TYPES, revoke_content
from strata.relays.connection import Anchors, Options
from strata.relays.connection.keyfetch import KeyFetcher
from strata.relays.connection.keyring import Event, KeyRing

from tests.support.relays import take
from tests.support.rotated_keys import NEW, OLD, START, rotation

FAST = Options(
    backoff_base=0.001,
    backoff_cap=0.01,
    idle_timeout=0.05,
    manifest_timeout=2,
    connect_timeout=5,
    close_timeout=1,
)


def post(author, n=0):
    return packets.build(author, {"type": "POST", "text": f"{n}"}, timestamp=START + n)


def revocation(at):
    return packets.build(OLD, revoke_content(f"{OLD.did}#keys-1", revoked_at=at), timestamp=at)


def asks_for_keys(message):
    return set(message.filters.types or ()) == IDENTITY_TYPES


@pytest.mark.req("R-075", "R-336")
async def test_a_rotated_key_is_learnt_before_what_it_signed_is_judged(fake):
    await fake.append(rotation(), post(NEW, 1))
    async with connect(fake.url, options=FAST) as relay:
        assert await take(relay.subscribe(types=["POST"]), 1) == [post(NEW, 1)]
        assert relay.statistics.events_tampered == relay.statistics.events_invalid == 0
        assert relay.statistics.key_fetches == 1


@pytest.mark.req("R-075")
async def test_a_key_made_while_the_stream_runs_is_found_out(fake):
    await fake.append(post(OLD, 0))
    async with connect(fake.url, options=FAST) as relay:
        subscription = relay.subscribe(types=["POST"])
        await take(subscription, 1)
        await fake.append(rotation(), post(NEW, 1))
        assert await take(subscription, 1) == [post(NEW, 1)]
        assert relay.statistics.key_fetches == 2


@pytest.mark.req("R-075")
async def test_identity_packets_on_the_stream_spare_the_question(extended):
    await extended.append(post(OLD, 0))
    async with connect(extended.url, options=FAST) as relay:
        subscription = relay.subscribe()
        await take(subscription, 1)
        await extended.append(rotation(), post(NEW, 1))
        assert await take(subscription, 2) == [rotation(), post(NEW, 1)]
        assert relay.statistics.key_fetches == 1


@pytest.mark.req("R-337")
async def test_what_a_revoked_key_signed_later_is_dropped_and_what_it_signed_before_is_not(fake):
    await fake.append(post(OLD, 0), rotation(), revocation(START + 2), post(OLD, 3), post(NEW, 4))
    async with connect(fake.url, options=FAST) as relay:
        assert await take(relay.subscribe(types=["POST"]), 2) == [post(OLD, 0), post(NEW, 4)]
        assert relay.statistics.events_invalid == 1


async def test_without_resolving_only_the_key_in_the_did_counts(extended):
    await extended.append(rotation(), revocation(START + 1), post(NEW, 2), post(OLD, 3))
    async with connect(extended.url, options=replace(FAST, resolve_keys=False)) as relay:
        assert await take(relay.subscribe(types=["POST"]), 1) == [post(OLD, 3)]
        assert relay.statistics.key_fetches == 0
        assert (relay.statistics.events_tampered, relay.statistics.events_forged) == (1, 0), (
            "the relay is right"
        )


@pytest.mark.req("R-336")
async def test_a_forgery_is_dropped_after_one_question(extended):
    forged = post(Identity.generate().speaking_for(OLD.did), 1)
    await extended.append(post(OLD, 0))
    async with connect(extended.url, options=FAST) as relay:
        subscription = relay.subscribe()
        await take(subscription, 1)
        await extended.append(forged, post(OLD, 2))
        assert await take(subscription, 1) == [post(OLD, 2)]
        assert relay.statistics.events_tampered == 1 and relay.statistics.key_fetches == 2
        assert relay.statistics.events_forged == 0, "the relay may have had a key that has expired since"


@pytest.mark.req("R-336", "R-342")
async def test_silence_about_keys_makes_nobody_a_forger(naive_relay, fake_relay):
    async with fake_relay(naive_relay(("packet_ids",))) as plain:
        forged = post(Identity.generate().speaking_for(OLD.did), 1)
        await plain.append(forged, post(OLD, 2))
        async with connect(plain.url, options=replace(FAST, idle_timeout=0.2)) as relay:
            assert await take(relay.subscribe(), 1) == [post(OLD, 2)]
            assert (relay.statistics.events_tampered, relay.statistics.events_forged) == (1, 0)


async def test_all_authors_who_wait_are_asked_for_at_once(extended):
    authors = [Identity.generate() for _ in range(60)]
    await extended.append(*(post(author, n) for n, author in enumerate(authors)))
    async with connect(extended.url, options=FAST) as relay:
        await take(relay.subscribe(), 60)
        fetches = relay.statistics.key_fetches
    assert fetches <= 3, "the first may be taken before the others have come"
    asked = [m for m in extended.received_so_far() if isinstance(m, wire.Subscribe) and asks_for_keys(m)]
    authors_asked_for = [m.filters.authors for m in asked if m.filters]
    assert sum(len(some) for some in authors_asked_for if some) == 60


async def test_authors_whose_packets_fit_no_key_are_asked_for_at_once(extended):
    """Else strangers' packets could use up what a reader may ask of a relay, and hold up all others."""
    authors = [Identity.generate() for _ in range(20)]
    failing = [packets.build(NEW.speaking_for(a.did), {"type": "POST"}, timestamp=START) for a in authors]
    await extended.append(*(post(author) for author in authors), *failing, post(OLD, 1))
    async with connect(extended.url, options=FAST) as relay:
        subscription = relay.subscribe()
        assert (await take(subscription, 21))[-1] == post(OLD, 1)
        fetches = relay.statistics.key_fetches
        later = [
            packets.build(NEW.speaking_for(a.did), {"type": "POST"}, timestamp=START + 1) for a in authors
        ]
        await extended.append(*later, post(OLD, 2))
        assert await take(subscription, 1) == [post(OLD, 2)]
        assert relay.statistics.events_tampered == 40
        assert relay.statistics.key_fetches - fetches <= 3, "the first may be taken before the others come"


async def test_authors_whose_keys_take_too_long_together_are_asked_for_apart():
    """Else strangers with long chains could shut a reader out of an honest relay's log for good."""
    asked: list[int] = []
    nothing: list[Event] = []

    async def read(authors: tuple[str, ...]) -> AsyncGenerator[Event, None]:
        asked.append(len(authors))
        if len(authors) > 10:
            await asyncio.Event().wait()  # their chains are too much for one request
        for event in nothing:
            yield event

    ring = KeyRing(Anchors(), max_authors=1000, refresh_interval=300)
    fetcher = KeyFetcher(ring, read, timeout=0.01, name="keys")
    others = [f"other {n}" for n in range(400)]
    for _ in range(2):
        with pytest.raises(strata.RequestTimeout):
            await fetcher.fetch("author", others, since=asyncio.get_running_loop().time())
    await fetcher.fetch("author", others, since=asyncio.get_running_loop().time())
    assert "author" in ring
    assert asked[:4] == [401, 50, 6, 12], "and soon for more at once again"
    await fetcher.close()


async def test_an_author_whose_keys_alone_take_too_long_holds_up_nobody():
    """Else a stranger with a long chain could shut out every reader whose connection is slow."""
    content = revoke_content(f"{OLD.did}#keys-1", revoked_at=START, reason="x" * 40_000)
    long = packets.build(OLD, content, timestamp=START)
    arrived = [long]

    async def read(authors: tuple[str, ...]) -> AsyncGenerator[Event, None]:
        for packet in arrived:
            yield packet, START
        await asyncio.Event().wait()

    ring = KeyRing(Anchors(), max_authors=8, refresh_interval=300)
    fetcher = KeyFetcher(ring, read, timeout=0.01, name="keys")
    with pytest.raises(strata.RequestTimeout):  # so little may be the relay's fault
        await fetcher.fetch(OLD.did, [], since=math.inf)
    arrived.append(long)
    await fetcher.fetch(OLD.did, [], since=math.inf)
    with pytest.raises(InvalidPacket) as refused:  # and the next packet has no request of its own
        ring.verify(post(OLD), START, asyncio.get_running_loop().time())
    assert refused.value.detail == "too_many_key_events"
    await fetcher.close()


async def test_who_gives_up_waiting_for_keys_is_forgotten_before_the_relay_answers():
    async def read(authors: tuple[str, ...]) -> AsyncGenerator[Event, None]:
        await asyncio.Event().wait()
        yield post(OLD), START

    fetcher = KeyFetcher(
        KeyRing(Anchors(), max_authors=8, refresh_interval=300), read, timeout=60, name="keys"
    )
    given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = [
        asyncio.create_task(fetcher.fetch(OLD.did, [], since=0, given_up=each)) for each in (None, given_up)
    ]
    await asyncio.sleep(0)
    waiting[0].cancel()
    given_up.set_result(None)
    await asyncio.wait(waiting)
    await asyncio.sleep(0)
    assert [list(each.everyone) for each in fetcher._questions._under_way] == [[]]
    await fetcher.close()


async def test_a_relay_that_takes_fewer_authors_at_once_is_asked_for_fewer():
    asked: list[int] = []
    nothing: list[Event] = []

    async def read(authors: tuple[str, ...]) -> AsyncGenerator[Event, None]:
        asked.append(len(authors))
        await asyncio.sleep(0)
        if len(authors) > most:
            raise strata.RequestRefused("policy_rejected", "too many values", detail="too_many_values")
        for event in nothing:
            yield event

    ring, most = KeyRing(Anchors(), max_authors=1000, refresh_interval=300), 10
    fetcher = KeyFetcher(ring, read, timeout=10, name="keys")
    others = [f"other {n}" for n in range(400)]
    first = asyncio.create_task(fetcher.fetch("author", others, since=0))
    async with asyncio.timeout(10):
        while not asked:  # noqa: ASYNC110 - until the first request is under way
            await asyncio.sleep(0)
    await asyncio.gather(first, fetcher.fetch("author", [], since=math.inf))
    assert "author" in ring and asked[:3] == [401, 50, 6]
    most = 0
    with pytest.raises(strata.RequestRefused):
        await fetcher.fetch("author", [], since=math.inf)
    await fetcher.close()


async def test_a_relay_that_sends_very_much_is_asked_about_fewer_authors_at_once():
    """Else it could fill the memory of a reader with chains that are each just short enough."""
    asked: list[int] = []
    taken: list[int] = []
    content = revoke_content("did:strata:x#keys-1", revoked_at=START, reason="x" * 200_000)
    long = {
        author.did: packets.build(author, content, timestamp=START)
        for author in (Identity.from_seed(bytes([n]) * 32) for n in range(50))
    }
    closed: list[bool] = []

    async def read(authors: tuple[str, ...]) -> AsyncGenerator[Event, None]:
        asked.append(len(authors))
        taken.append(0)
        try:
            for author in authors:
                for _ in range(8):
                    taken[-1] += long[author].size_bytes
                    yield long[author], START
        finally:
            closed.append(True)

    ring = KeyRing(Anchors(), max_authors=1000, refresh_interval=300)
    fetcher = KeyFetcher(ring, read, timeout=20, name="keys")
    last = list(long)[-1]
    await fetcher.fetch(last, list(long)[:-1], since=0)
    assert last in ring
    assert asked[:2] == [50, 6] and len(closed) == len(asked)
    assert max(taken) <= 33 * 2**20
    await fetcher.close()


async def test_two_subscriptions_share_what_is_known(extended):
    await extended.append(rotation(), post(NEW, 1))
    async with connect(extended.url, options=FAST) as relay:
        one, two = relay.subscribe(types=["POST"]), relay.subscribe(types=["POST"])
        assert list(await asyncio.gather(take(one, 1), take(two, 1))) == [[post(NEW, 1)]] * 2
        assert await take(relay.subscribe(types=["POST"]), 1) == [post(NEW, 1)]
        assert relay.statistics.key_fetches == 1


async def test_a_refused_question_is_raised_and_loses_nothing(extended):
    def refuse(message):
        if asks_for_keys(message) and refusals:
            return wire.Error(code=refusals.pop(), reason="no", client_msg_id=message.client_msg_id)
        return None

    refusals = ["policy_rejected"]
    extended.model.answer_subscribe = refuse
    await extended.append(post(OLD, 0))
    async with connect(extended.url, options=FAST) as relay:
        subscription = relay.subscribe()
        with pytest.raises(strata.RequestRefused) as caught:
            await anext(subscription)
        assert caught.value.code == "policy_rejected"
        assert await take(subscription, 1) == [post(OLD, 0)]


async def test_a_relay_that_does_not_tell_is_given_up_on_and_nothing_is_lost(extended):
    extended.model.answer_subscribe = lambda m: (
        wire.Ok(packet_id="-", status="-") if asks_for_keys(m) else None
    )
    await extended.append(post(OLD, 0))
    async with connect(extended.url, options=replace(FAST, key_timeout=0.05)) as relay:
        subscription = relay.subscribe()
        with pytest.raises(strata.RequestTimeout, match="keys"):
            await anext(subscription)
        extended.model.answer_subscribe = None
        assert await take(subscription, 1) == [post(OLD, 0)]


async def test_cancelling_while_keys_are_fetched_loses_nothing(extended):
    silent = True
    extended.model.answer_subscribe = lambda m: (
        wire.Ok(packet_id="-", status="-") if silent and asks_for_keys(m) else None
    )
    await extended.append(post(OLD, 0), post(OLD, 1))
    async with connect(extended.url, options=replace(FAST, key_timeout=0.5)) as relay:
        subscription = relay.subscribe()
        waiting = asyncio.create_task(anext(subscription))
        while not asks_for_keys(await extended.next(wire.Subscribe)):
            pass
        waiting.cancel()
        await asyncio.wait([waiting])
        silent = False
        extended.cut()  # the request is repeated on the next connection
        assert await take(subscription, 2) == [post(OLD, 0), post(OLD, 1)]


async def test_closing_while_keys_are_fetched_ends_it(extended):
    extended.model.answer_subscribe = lambda m: (
        wire.Ok(packet_id="-", status="-") if asks_for_keys(m) else None
    )
    await extended.append(post(OLD, 0))
    async with connect(extended.url, options=FAST) as relay:
        waiting = asyncio.create_task(anext(relay.subscribe()))
        while not asks_for_keys(await extended.next(wire.Subscribe)):
            pass
        await relay.close()
        with pytest.raises(strata.Closed):
            await waiting
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("strata-relay")]


async def test_closing_before_the_question_has_begun_ends_it_too(extended):
    await extended.append(post(OLD, 0))
    async with connect(extended.url, options=FAST) as relay:
        subscription = relay.subscribe()
        await subscription._feed.arrived.wait()
        waiting = asyncio.create_task(anext(subscription))
        await asyncio.sleep(0)  # it needs the keys, and the task that fetches them has not run yet
        await relay.close()
        async with asyncio.timeout(5):
            with pytest.raises(strata.Closed):
                await waiting


async def test_a_full_queue_does_not_keep_its_own_keys_out(plain):
    """Without cursors, a full queue stops the whole connection to a plain relay, but not for its own keys."""
    options = replace(FAST, queue_events=4, page_events=4)
    await plain.append(rotation())
    async with connect(plain.url, options=options) as relay:
        subscription = relay.subscribe(types=["POST"])
        first = asyncio.create_task(anext(subscription))
        await plain.next(wire.Subscribe)
        sent = [post(NEW, n) for n in range(1, 13)]
        await plain.append(*sent)
        received = [(await first).packet, *await take(subscription, 11)]
    assert received == sent


@pytest.mark.req("R-055")
async def test_anchors_resolve_what_carries_no_key(extended):
    named = Identity.generate().speaking_for("did:strata:relay_1")
    await extended.append(post(named, 0), post(OLD, 1))
    async with connect(extended.url, options=FAST) as relay:
        assert await take(relay.subscribe(), 1) == [post(OLD, 1)]
        assert relay.statistics.events_invalid == 1
    anchors = Anchors(keys={named.did: named.public_key})
    async with connect(extended.url, options=FAST, anchors=anchors) as relay:
        assert await take(relay.subscribe(), 2) == [post(named, 0), post(OLD, 1)]


async def test_keys_are_refreshed_in_the_background(extended):
    await extended.append(*(post(OLD, n) for n in range(3)))
    async with connect(extended.url, options=replace(FAST, key_refresh_interval=1e-9)) as relay:
        subscription = relay.subscribe()
        await take(subscription, 3)
        for n in range(3, 6):
            await extended.append(post(OLD, n))
            await take(subscription, 1)
        while not asks_for_keys(await extended.next(wire.Subscribe)):
            pass
        while not asks_for_keys(await extended.next(wire.Subscribe)):
            pass


async def test_ending_a_subscription_that_waits_for_keys_ends_the_iteration_at_once(extended):
    extended.model.answer_subscribe = lambda m: (
        wire.Ok(packet_id="-", status="-") if asks_for_keys(m) else None
    )
    await extended.append(post(OLD, 0))
    async with connect(extended.url, options=FAST) as relay:
        subscription = relay.subscribe()
        waiting = asyncio.create_task(anext(subscription, None))
        while not asks_for_keys(await extended.next(wire.Subscribe)):
            pass
        await subscription.aclose()
        async with asyncio.timeout(1):
            assert await waiting is None


@pytest.mark.parametrize("turns", range(1, 5))
async def test_a_closing_that_is_cancelled_leaves_nobody_waiting_for_keys(extended, turns):
    await extended.append(post(OLD, 0))
    async with connect(extended.url, options=FAST) as relay:
        subscription = relay.subscribe()
        await subscription._feed.arrived.wait()
        waiting = asyncio.create_task(anext(subscription))
        await asyncio.sleep(0)  # it needs the keys, and the task that fetches them has not run yet
        closing = asyncio.create_task(relay.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])  # and it continues by itself
        async with asyncio.timeout(1):
            with pytest.raises(strata.Closed):
                await waiting
