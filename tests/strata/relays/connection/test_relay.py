"""The asyncio shell over real sockets, against the naive relay."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
import threading
from dataclasses import replace

import msgspec
import pytest
import strata
import strata.protocol.packets
import trustme
from msgspec import Raw
from strata.channels.connecting import connect
from strata.protocol import wire
from strata.protocol.documents import implicit_genesis
from strata.protocol.keys import document_content
from strata.protocol.packets import Packet
from strata.relays.connection import Options

from tests.support.relays import START, take

FAST = Options(
    backoff_base=0.001,
    backoff_cap=0.01,
    idle_timeout=0.05,
    manifest_timeout=2,
    connect_timeout=5,
    close_timeout=1,
)


# Publishing.


@pytest.mark.req("R-188", "R-192")
async def test_publish_returns_the_relays_word(fake, make):
    async with connect(fake.url, options=FAST) as relay:
        published = await relay.publish(make(1))
        again = await relay.publish(make(1))
    assert published.packet_id == make(1).packet_id and not published.duplicate
    assert again.duplicate and published.received_at is not None


@pytest.mark.req("R-133", "R-134")
async def test_publishes_are_pipelined_on_one_socket_in_the_order_made(fake, make):
    async with connect(fake.url, options=FAST) as relay:
        await asyncio.gather(*(relay.publish(make(n)) for n in range(300)))
    assert [packet.packet_id for packet, _ in fake.model.log] == [make(n).packet_id for n in range(300)]
    assert fake.connections == 1


async def test_publishes_in_progress_are_bounded(extended, make):
    extended.model.answer = lambda message: "silence"
    options = Options(max_in_flight=2)
    async with connect(extended.url, options=options) as relay:
        tasks = [asyncio.create_task(relay.publish(make(n))) for n in range(3)]
        for _ in range(2):
            await extended.next(wire.Publish)
        assert len(relay._driver._publishes) == 2
        extended.model.answer = None
        tasks[0].cancel()  # its place goes to the third
        assert (await extended.next(wire.Publish)).client_msg_id == "p3"
        assert (await tasks[2]).packet_id == make(2).packet_id
        tasks[1].cancel()
        await asyncio.wait(tasks)


@pytest.mark.req("R-194")
async def test_a_publish_cut_before_its_ok_is_sent_again_byte_for_byte(fake, make):
    fake.model.answer = lambda message: "silence"
    async with connect(fake.url, options=FAST) as relay:
        task = asyncio.create_task(relay.publish(make(1)))
        first = await fake.next(wire.Publish)
        fake.model.append(make(1))  # stored, but the OK is lost
        fake.model.answer = None
        fake.cut()
        second = await fake.next(wire.Publish)
        published = await task
    assert wire.encode(first) == wire.encode(second)
    assert published.duplicate


@pytest.mark.req("R-193")
async def test_silence_is_never_success(fake, make):
    fake.model.answer = lambda message: "silence"
    async with connect(fake.url, options=FAST) as relay:
        with pytest.raises(strata.RequestTimeout):
            await relay.publish(make(1), timeout=0.05)
        assert relay.statistics.publishes_timed_out == 1


@pytest.mark.req("R-193")
async def test_an_ok_for_another_packet_is_no_answer(fake, make):
    fake.model.answer = lambda message: wire.Ok(
        packet_id=make(2).packet_id, status="ACCEPTED", client_msg_id=message.client_msg_id
    )
    async with connect(fake.url, options=FAST) as relay:
        with pytest.raises(strata.RequestTimeout):
            await relay.publish(make(1), timeout=0.05)


def metric(author, observed_at, score=0.0):
    content = {"type": "CONSENSUS_METRIC", "target_packet": "0x" + "ab" * 32, "score": score}
    return strata.protocol.packets.build(author, content | {"observed_at": observed_at}, timestamp=START)


def says_repeated(relay, of):
    """Have the relay answer that it has another packet in place of each that it gets."""
    relay.model.answer = lambda message: wire.Ok(
        packet_id=Packet.parse(message.packet).packet_id,
        status="ACCEPTED",
        client_msg_id=message.client_msg_id,
        duplicate=True,
        duplicate_of=of,
    )


@pytest.mark.req("R-113")
@pytest.mark.parametrize("kind", ["plain", "extended"])
async def test_a_packet_that_repeats_another_is_confirmed_once_the_other_is_shown(
    kind, fake, extended, identities
):
    relay = fake if kind == "plain" else extended
    first, again = metric(identities[0], 1), metric(identities[0], 1, score=0.5)
    await relay.append(first)
    says_repeated(relay, first.packet_id)
    async with connect(relay.url, options=FAST) as client:
        assert (await client.publish(again)).duplicate_of == first.packet_id


@pytest.mark.req("R-113", "R-193")
@pytest.mark.parametrize("what", ["missing", "of another time", "another author's", "no id", "no such type"])
async def test_the_word_of_a_relay_that_it_has_another_packet_instead_is_not_enough(
    extended, identities, make, what
):
    others = {
        "missing": metric(identities[0], 7),
        "of another time": metric(identities[0], 2),
        "another author's": metric(identities[1], 1),
    }
    other = others.get(what, metric(identities[0], 1))
    if what != "missing":
        await extended.append(other)
    says_repeated(extended, "lies" if what == "no id" else other.packet_id)
    packet = make(1) if what == "no such type" else metric(identities[0], 1, score=0.5)
    async with connect(extended.url, options=FAST) as relay:
        with pytest.raises(strata.RequestRefused, match="publish at another relay") as caught:
            await relay.publish(packet)
    assert caught.value.detail == "duplicate_of"


@pytest.mark.req("R-113", "R-193")
@pytest.mark.parametrize("resolves", [True, False])
@pytest.mark.parametrize("is_its_own", [True, False])
async def test_a_document_is_stored_only_if_a_packet_of_its_author_has_it(
    extended, identities, is_its_own, resolves
):
    """A document in another DID's packet introduces no keys, and a relay can sign such a packet itself."""
    document = implicit_genesis(identities[0].did)
    assert document is not None
    content = document_content(document)
    packet = strata.protocol.packets.build(identities[0], content, timestamp=START)
    signer = identities[0] if is_its_own else identities[1]
    other = strata.protocol.packets.build(signer, content, timestamp=START + 1)
    await extended.append(other)
    says_repeated(extended, other.packet_id)
    async with connect(extended.url, options=replace(FAST, resolve_keys=resolves)) as relay:
        if is_its_own:
            assert (await relay.publish(packet)).duplicate_of == other.packet_id
        else:
            with pytest.raises(strata.RequestRefused) as caught:
                await relay.publish(packet)
            assert caught.value.detail == "duplicate_of"


@pytest.mark.req("R-193")
async def test_a_relay_that_never_shows_the_other_packet_has_confirmed_nothing(extended, identities):
    says_repeated(extended, metric(identities[0], 1).packet_id)
    extended.model.answer_subscribe = lambda message: wire.EndOfHistory(
        subscription_id="another", complete=True
    )
    async with connect(extended.url, options=FAST) as relay:
        with pytest.raises(strata.RequestTimeout):
            await relay.publish(metric(identities[0], 1, score=0.5), timeout=0.3)


async def test_whoever_may_not_ask_for_the_other_packet_is_refused(extended, identities):
    says_repeated(extended, metric(identities[0], 1).packet_id)
    extended.model.needs_auth = {"subscribe"}
    async with connect(extended.url, options=FAST) as relay:
        with pytest.raises(strata.RequestRefused) as caught:
            await relay.publish(metric(identities[0], 1, score=0.5))
    assert caught.value.detail == "duplicate_of"


async def test_a_refusal_is_raised_with_what_the_relay_said(fake, make):
    fake.model.answer = lambda message: wire.Error(
        code="blocked_author", reason="no", client_msg_id=message.client_msg_id, detail="why"
    )
    async with connect(fake.url, options=FAST) as relay:
        with pytest.raises(strata.RequestRefused) as caught:
            await relay.publish(make(1))
    assert (caught.value.code, caught.value.detail) == ("blocked_author", "why")


async def test_a_passing_fault_is_tried_again(fake, make):
    answers = ["internal_error", "internal_error"]

    def answer(message):
        if answers:
            return wire.Error(code=answers.pop(), reason="oops", client_msg_id=message.client_msg_id)
        return None

    fake.model.answer = answer
    async with connect(fake.url, options=FAST) as relay:
        assert not (await relay.publish(make(1))).duplicate
        assert relay.statistics.publishes_repeated == 2


@pytest.mark.req("R-124")
async def test_a_packet_larger_than_announced_is_refused_before_sending(extended, make):
    extended.manifest_body = b'{"extensions":[],"limits":{"max_packet_bytes":100}}'
    async with connect(extended.url, options=FAST) as relay:
        with pytest.raises(strata.InvalidPacket) as caught:
            await relay.publish(make(1))
    assert caught.value.max_bytes == 100
    assert extended.received.empty()


@pytest.mark.req("R-191")
async def test_post_signs_with_the_identity_and_publish_takes_anyones_packet(fake, identities, make):
    me, _ = identities
    async with connect(fake.url, identity=identities[1], options=FAST) as relay:
        posted = await relay.post({"type": "POST", "text": "hi"})
        await relay.publish(make(1))
    (mine, _), (gateways, _) = fake.model.log
    assert mine.packet_id == posted.packet_id and mine.author_id == identities[1].did
    assert gateways.author_id == me.did
    async with connect(fake.url, options=FAST) as relay:
        with pytest.raises(ValueError, match="identity"):
            await relay.post({"type": "POST"})


# Reading.


async def test_history_and_live_are_one_stream(fake, make):
    await fake.append(*map(make, range(5)))
    async with connect(fake.url, options=FAST) as relay:
        subscription = relay.subscribe()
        assert await take(subscription, 5) == [make(n) for n in range(5)]
        await fake.append(make(5))
        assert await take(subscription, 1) == [make(5)]


async def test_from_the_head_comes_what_the_relay_gets_from_now_on_and_nothing_from_before(extended, make):
    for n in range(50):
        extended.model.append(make(n))
    async with connect(extended.url, options=FAST) as relay:
        head = await relay.head()
        assert head is not None and relay.statistics.events_received == 0
        extended.model.append(make(50))
        async with relay.subscribe(cursor=head) as subscription:
            extended.model.append(make(51))
            assert await take(subscription, 2) == [make(50), make(51)]
        assert relay.statistics.events_received == 2


async def test_a_relay_that_cannot_say_where_it_ends_is_not_asked(plain, make):
    plain.model.append(make(1))
    async with connect(plain.url, options=FAST) as relay:
        assert await relay.head() is None
        assert plain.received.empty() and relay.statistics.events_received == 0


@pytest.mark.req("R-339")
async def test_a_subscription_goes_on_across_cuts(fake, make):
    got = []
    async with connect(fake.url, options=FAST) as relay:
        subscription = relay.subscribe()
        for n in range(0, 50, 5):
            await fake.append(*map(make, range(n, n + 3)))
            got += await take(subscription, 3)
            fake.cut()
            await fake.append(*map(make, range(n + 3, n + 5)))
            got += await take(subscription, 2)
        assert relay.statistics.connections > 1
    assert got == [make(n) for n in range(50)]


@pytest.mark.req("R-336", "R-342")
@pytest.mark.parametrize(
    ("tamper", "counted"),
    [
        (lambda packet, other: packet.canonical.replace(b"packet 1", b"packet 7"), (1, 0)),
        (
            lambda packet, other: packet.canonical.replace(
                packet.signature.encode(), other.signature.encode()
            ),
            (1, 0),
        ),
        (lambda packet, other: b'{"packet_id":1}', (0, 1)),
        (lambda packet, other: b"[]", (0, 1)),
    ],
    ids=["content", "signature", "schema", "shape"],
)
async def test_a_tampered_packet_is_dropped_and_counted(extended, make, tamper, counted):
    bad = tamper(make(1), make(3))

    def disguise(event):
        index = int(event.cursor.partition(":")[2])
        return msgspec.structs.replace(event, packet=Raw(bad)) if index == 1 else event

    extended.model.disguise = disguise
    await extended.append(*map(make, range(3)))
    async with connect(extended.url, options=FAST) as relay:
        assert await take(relay.subscribe(), 2) == [make(0), make(2)]
        statistics = relay.statistics
        assert (statistics.events_tampered, statistics.events_invalid) == counted


@pytest.mark.req("R-337")
async def test_a_packet_received_after_it_expired_is_dropped(fake, make):
    await fake.append(make(-9, expires_at=1_760_000_000 - 1), make(1, expires_at=1_760_000_001), make(2))
    async with connect(fake.url, options=FAST) as relay:
        assert await take(relay.subscribe(), 2) == [make(1, expires_at=1_760_000_001), make(2)]
        assert relay.statistics.events_expired == 1


@pytest.mark.req("R-166")
async def test_what_was_not_asked_for_is_dropped(plain, make):
    """A plain relay ignores `packet_ids` and sends everything."""
    await plain.append(*map(make, range(9)))
    async with connect(plain.url, options=FAST) as relay:
        found = [delivery.packet async for delivery in relay.fetch(packet_ids=[make(3).packet_id])]
        sent = await plain.next(wire.Subscribe)
        assert found == [make(3)] and sent.filters.packet_ids is None
        assert relay.statistics.events_unasked == 8


async def test_get_finds_one_packet_or_none(fake, make):
    await fake.append(*map(make, range(9)))
    async with connect(fake.url, options=FAST) as relay:
        found = await relay.get(make(4).packet_id)
        assert found is not None and found.packet == make(4)
        assert await relay.get(make(50).packet_id) is None


@pytest.mark.slow
async def test_fetch_pages_in_either_order(fake, make):
    await fake.append(*map(make, range(25)))
    # For a plain relay, silence means the end of history, and a slow machine is silent for a while too.
    options = Options(page_events=4, queue_events=10, idle_timeout=0.4)
    async with connect(fake.url, options=options) as relay:
        up = [delivery.packet async for delivery in relay.fetch()]
        down = [delivery.packet async for delivery in relay.fetch(order="desc", limit=10)]
    assert up == [make(n) for n in range(25)]
    assert down == [make(n) for n in range(24, 14, -1)]


async def test_leaving_the_loop_ends_the_subscription(extended, make):
    async def gone():
        """Wait until the live stream is left; it is the last of its subscription."""
        while not (subscribed := await extended.next(wire.Subscribe)).gapless:
            pass
        while (await extended.next(wire.Unsubscribe)).subscription_id != subscribed.subscription_id:
            pass
        return True

    await extended.append(make(0))
    async with connect(extended.url, options=FAST) as relay:
        async for _ in relay.subscribe():
            break
        gc.collect()  # where reference counting alone does not decide
        assert await gone()
        async with relay.subscribe() as subscription:
            await anext(subscription)
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)
        await relay.publish(make(1))
        assert not extended.model.sessions[0].subscriptions


async def test_end_leaves_what_has_arrived(extended, make):
    await extended.append(*map(make, range(3)))
    async with connect(extended.url, options=FAST) as relay:
        subscription = relay.subscribe(types=["POST"])
        assert await take(subscription, 1) == [make(0)]
        await relay.publish(make(9, "OTHER"))  # its OK comes after the events
        subscription.end()
        assert [delivery.packet async for delivery in subscription] == [make(1), make(2)]


async def test_a_refused_subscription_raises(fake):
    fake.model.answer_subscribe = lambda message: wire.Error(
        code="unsupported_profile", reason="no", client_msg_id=message.client_msg_id
    )
    async with connect(fake.url, options=FAST) as relay:
        with pytest.raises(strata.RequestRefused, match="unsupported_profile"):
            await anext(relay.subscribe())


@pytest.mark.req("R-167", "R-139")
async def test_additions_are_asked_for_only_where_announced(fake, make):
    async with connect(fake.url, options=FAST) as relay:
        subscription = relay.subscribe(received_since=1)
        sent = await fake.next(wire.Subscribe)
        if fake.model.extensions:
            assert sent.history_marker and sent.filters.limit == FAST.page_events
            sent = await fake.next(wire.Subscribe)  # history has been read
        subscription.end()
    if fake.model.extensions:
        assert sent.gapless and sent.history_marker and sent.filters.received_since == 1
        assert sent.filters.limit is None and sent.filters.order is None
    else:
        assert sent.gapless is sent.history_marker is sent.filters.received_since is None


@pytest.mark.req("R-174")
async def test_strange_messages_do_no_harm(extended, make):
    async with connect(extended.url, options=FAST) as relay:
        task = asyncio.create_task(relay.publish(make(0)))
        await task
        (session,) = extended.model.sessions
        session.send(wire.Event(packet=Raw(make(1).canonical), received_at=1))
        session.outbox += [b"{", b"[1]", b'{"type":"NEW"}', b'{"type":"OK","packet_id":"x","status":"?"}']
        await extended.flush()
        await relay.publish(make(2))
        assert relay.statistics.events_unclaimed == 1
        assert relay.statistics.messages_invalid == 4


async def test_a_slow_consumer_stalls_nobody_else(extended, make):
    options = Options(queue_events=8, page_events=4)
    async with connect(extended.url, options=options) as relay:
        slow = relay.subscribe()
        while not (await extended.next(wire.Subscribe)).gapless:
            pass
        await extended.append(*map(make, range(60)))
        await extended.next(wire.Unsubscribe)  # it left the live stream
        quick = relay.subscribe(types=["OTHER"])
        await relay.publish(make(100, "OTHER"))
        assert await take(quick, 1) == [make(100, "OTHER")]
        assert await take(slow, 60) == [make(n) for n in range(60)]


# Opening.


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "ws://", "nonsense", "ws://h:port/"])
async def test_a_bad_url_fails_at_once(url):
    with pytest.raises(strata.ConnectionFailed, match="not a relay URL"):
        await connect(url).open()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_final_refusal_is_not_tried_again(plain, status):
    plain.refuse_with = status
    with pytest.raises(strata.ConnectionFailed, match=str(status)):
        await connect(plain.url, options=FAST).open()


async def test_nothing_there_is_tried_until_the_timeout_and_then_explained(unused_tcp_port):
    options = Options(connect_timeout=0.1, backoff_base=0.001, backoff_cap=0.01)
    with pytest.raises(strata.ConnectionFailed, match="is the relay running"):
        await connect(f"ws://127.0.0.1:{unused_tcp_port}/strata", options=options).open()


async def test_the_password_in_a_url_is_not_shown(plain):
    plain.refuse_with = 403
    url = plain.url.replace("ws://", "ws://user:secret@")
    with pytest.raises(strata.ConnectionFailed) as caught:
        await connect(url, options=FAST).open()
    assert "secret" not in str(caught.value)


async def test_a_relay_that_throws_us_out_for_good_ends_everything(extended, make):
    extended.model.answer = lambda message: "silence"
    async with connect(extended.url, options=FAST) as relay:
        publishing = asyncio.create_task(relay.publish(make(0)))
        subscription = relay.subscribe()
        await extended.next(wire.Publish)
        await extended.shut(1008)
        for wait in (publishing, anext(subscription)):
            with pytest.raises(strata.ConnectionFailed, match="1008"):
                await wait
        with pytest.raises(strata.ConnectionFailed):
            await relay.publish(make(1))


async def test_going_away_is_survived(extended, make):
    async with connect(extended.url, options=FAST) as relay:
        await relay.publish(make(0))
        await extended.shut(1001)
        await relay.publish(make(1))
        assert relay.statistics.connections == 2


@pytest.mark.req("R-130")
async def test_a_relay_that_answers_no_ping_is_left(extended, make):
    extended.deaf = True
    options = replace(FAST, ping_interval=0.02, ping_timeout=0.02, close_timeout=0.02)
    async with connect(extended.url, options=options) as relay:
        extended.deaf = False  # from the second connection on
        assert (await relay.publish(make(0))).packet_id == make(0).packet_id
        assert relay.statistics.connections_lost >= 1


async def test_a_relay_that_takes_nothing_is_left(extended, make):
    """Its buffers fill up; then even the library's ping and close would wait for ever."""
    extended.deaf = True
    options = replace(FAST, write_timeout=0.05, close_timeout=0.02, ping_interval=None)
    big = [strata.protocol.packets.build(identity, {"type": "X", "text": "x" * 200_000}, timestamp=n)
           for n, identity in enumerate([strata.Identity.from_seed(bytes(32))] * 60)]  # fmt: skip
    async with connect(extended.url, options=options) as relay:
        extended.deaf = False
        await asyncio.gather(*(relay.publish(packet) for packet in big))
        assert relay.statistics.connections_lost >= 1
    assert [packet.packet_id for packet, _ in extended.model.log] == [packet.packet_id for packet in big]


@pytest.mark.req("R-127")
async def test_wss_needs_a_trusted_certificate(naive_relay, fake_relay, make):
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    async with fake_relay(naive_relay(["gapless", "history_marker"]), ssl=server) as fake:
        async with connect(fake.url, ssl=client, options=FAST) as relay:
            assert relay.announced is not None
            assert relay.announced.extensions == {"gapless", "history_marker"}, "the manifest came by TLS too"
            await relay.publish(make(0))
        with pytest.raises(strata.ConnectionFailed, match="not trusted"):
            await connect(fake.url, options=FAST).open()


# Closing.


async def test_close_leaves_nothing_behind(fake, make):
    async def life():
        async with connect(fake.url, options=FAST) as relay:
            subscription = relay.subscribe()
            await relay.publish(make(0))
            await anext(subscription)
            fake.cut()
            await relay.publish(make(1))
        await relay.close()
        return relay, subscription

    await life()  # from here on, one-time initialisation is done
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    relay, subscription = await life()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("strata")]
    assert relay._driver._timer is None
    with pytest.raises(strata.Closed):
        await relay.publish(make(2))
    with pytest.raises((strata.Closed, StopAsyncIteration)):
        while True:
            await anext(subscription)
    await fake.abandoned.wait()  # the server's half of the sockets
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


async def test_close_wakes_everyone_who_waits(fake, make):
    fake.model.answer = lambda message: "silence"
    relay = await connect(fake.url, options=FAST).open()
    subscription = relay.subscribe()
    tasks = [asyncio.create_task(relay.publish(make(0))), asyncio.create_task(subscription.__anext__())]
    await fake.next(wire.Publish)
    await asyncio.gather(relay.close(), relay.close())
    for task in tasks:
        with pytest.raises(strata.Closed):
            await task


@pytest.mark.parametrize("turns", [1, 2, 3, 9])
async def test_close_ends_an_opening_that_has_just_begun(fake, turns):
    relay = connect(fake.url, options=FAST)
    opening = asyncio.create_task(relay.open())
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(2):
        await relay.close()
        with pytest.raises(strata.Closed):
            await opening


async def steps_of(make_coroutine):
    """Run a coroutine repeatedly, cancelled after 1, 2, 3… turns of the loop, until it completes."""
    for turns in range(2000):
        task = asyncio.create_task(make_coroutine())
        for _ in range(turns):
            await asyncio.sleep(0)
            if task.done():
                break
        finished = task.done()
        task.cancel()
        yield task, finished
        if finished:
            return
    raise AssertionError("never finished")


async def test_cancelling_a_receive_anywhere_loses_nothing(fake, make):
    await fake.append(*map(make, range(200)))
    got: list[Packet] = []
    options = Options(queue_events=16, page_events=8, idle_timeout=0.05, backoff_base=0.001)
    async with connect(fake.url, options=options) as relay:
        subscription = relay.subscribe()
        turns = 0
        while len(got) < 200:
            task = asyncio.create_task(subscription.__anext__())
            for _ in range(turns % 7):
                await asyncio.sleep(0)
            turns += 1
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                got.append(task.result().packet)
    assert got == [make(n) for n in range(200)]


async def test_cancelling_a_publish_anywhere_leaves_no_trace(fake, make):
    async with connect(fake.url, options=Options(max_in_flight=1)) as relay:
        async for task, _ in steps_of(lambda: relay.publish(make(1))):
            await asyncio.wait([task])
            assert (
                not relay._driver._publishes
                and not relay._slots.locked()
                and not len(relay._driver._core._publishing)
            )
        assert (await relay.publish(make(2))).packet_id == make(2).packet_id


async def test_cancelling_open_anywhere_leaves_nothing(fake):
    async def life():
        async with connect(fake.url, options=FAST):
            pass

    async for task, _ in steps_of(life):
        await asyncio.wait([task])
        # When `close` is cancelled, the closing itself must continue and end.
        if ours := [task for task in asyncio.all_tasks() if task.get_name().startswith("strata")]:
            await asyncio.wait(ours)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("strata")]
    await fake.abandoned.wait()


async def test_a_publish_that_nobody_could_answer_says_why(extended, make):
    async with connect(extended.url, options=FAST) as relay:
        extended.refuse_with = 503
        extended.cut()
        await extended.abandoned.wait()
        with pytest.raises(strata.RequestTimeout) as late:
            await relay.publish(make(1), timeout=0.5)
    assert str(late.value.__cause__).startswith(f"no connection to {extended.url}: ")


# Event loops.


@pytest.mark.slow
@pytest.mark.parametrize("open_one", [connect, lambda url: strata.connect_pool([url])])
async def test_another_threads_calls_are_refused_and_change_nothing(fake, make, open_one):
    async with open_one(fake.url) as relay:
        subscription = relay.subscribe(types=["POST"])

        def elsewhere(call):
            async def run():
                return await call()

            with pytest.raises(RuntimeError, match="belongs to the event loop"):
                asyncio.run(run())

        def without_a_loop():
            with pytest.raises(RuntimeError, match="belongs to the event loop"):
                relay.subscribe()

        for call in (lambda: relay.publish(make(1)), lambda: anext(subscription), relay.close):
            await asyncio.to_thread(elsewhere, call)
        await asyncio.to_thread(without_a_loop)
        await relay.publish(make(2))
        assert await take(subscription, 1) == [make(2)]


@pytest.mark.parametrize("open_one", [connect, lambda url: strata.connect_pool([url])])
async def test_what_outlives_its_loop_says_so_and_closes(fake, make, open_one):
    async def opened():
        return await open_one(fake.url).open()

    async def refused(relay):
        with pytest.raises(strata.ConnectionFailed, match=r"as asyncio.run does"):
            await relay.publish(make(1))
        await relay.close()

    relay = await asyncio.to_thread(asyncio.run, opened())
    await refused(relay)


async def test_text_that_is_no_url_can_be_asked_about():
    with pytest.raises(strata.ConnectionFailed, match="not a relay URL"):
        await connect("ws://[::1").open()
