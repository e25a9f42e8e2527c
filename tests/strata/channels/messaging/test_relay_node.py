"""The messaging node over relays: what it sends, reports and reads, on a virtual clock."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from strata.channels.messaging import (
    ConnectionStatus,
    ConnectionStatusChange,
    ContentTopicHealthChange,
    InvalidContentTopic,
    MessageEnvelope,
    MessagingNode,
    NodeError,
    NodeMessageError,
    NodeMessagePropagated,
    NodeMessageReceived,
    NodeMessageSent,
    RelayNode,
    TopicHealth,
    heard,
    relay_node,
    stored,
)
from strata.channels.messaging.binding import PROFILE, build_packet
from strata.channels.messaging.reading import Place, write_position
from strata.protocol import packets
from strata.protocol.errors import (
    Closed,
    ConnectionFailed,
    ErrorCode,
    InvalidPacket,
    RequestRefused,
    RequestTimeout,
)
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.relays.connection.values import RESUME_MARGIN_SECONDS
from strata.relays.pool import Position

from tests.support.made_relays import (
    ALICE,
    BOB,
    TOPIC,
    Delivered,
    Log,
    MadeRelays,
    MarkedRelays,
    Told,
    until,
)
from tests.support.virtual_time import START, virtually, wall

OTHER = "/chat/1/other/proto"
HEALTH = {"topic_health": ContentTopicHealthChange.name, "connection_status": ConnectionStatusChange.name}


def node_over(
    relays: MadeRelays, identity: Identity = ALICE, *, off_by: list[float] | None = None
) -> RelayNode:
    """`off_by` holds the error of its clock, in seconds."""
    return RelayNode(relays, identity=identity, wall=lambda: wall() + (off_by[0] if off_by else 0.0))


def envelope(payload: bytes = b"hello", topic: str = TOPIC, **members) -> MessageEnvelope:
    return MessageEnvelope(content_topic=topic, payload=payload, **members)


def packed(payload: bytes, signer: Identity = BOB, topic: str = TOPIC, now: int = START) -> Packet:
    return build_packet(signer, envelope(payload, topic), now=now, nonce=f"0x{secrets.token_hex(16)}")


def payloads(told: Told) -> list[bytes]:
    return [event.message.payload for event in told.of(NodeMessageReceived)]


# Sending.


@pytest.mark.req("C-261", "C-283")
@virtually
async def test_a_message_is_propagated_and_sent_and_both_name_it_and_its_packet():
    relays = MadeRelays(Log())
    async with node_over(relays) as node:
        told = Told(node)
        request_id = await node.send(envelope(), request_id="mine")
        assert request_id == "mine"
        await until(lambda: told.of(NodeMessageSent))
        (packet,) = relays.published
        assert told.of(NodeMessagePropagated) == [NodeMessagePropagated("mine", packet.digest)]
        assert told.of(NodeMessageSent) == [NodeMessageSent("mine", packet.digest)]
        assert not told.of(NodeMessageError)
        names = [event.name for event in told.events if event.name.startswith("message_")]
        assert names.index("message_propagated") < names.index("message_sent")


@pytest.mark.req("C-262")
@virtually
async def test_it_is_propagated_with_the_first_ok_and_sent_once_enough_relays_have_said_so():
    relays = MadeRelays(Log(), connected=2, wanted=2)
    relays.answers = [5.0]  # from the first OK to the last that is needed
    async with node_over(relays) as node:
        told = Told(node)
        await node.send(envelope())
        first = await until(lambda: told.of(NodeMessagePropagated))
        assert not told.of(NodeMessageSent)
        assert await until(lambda: told.of(NodeMessageSent)) - first == pytest.approx(5, abs=0.1)
        assert len(told.of(NodeMessagePropagated)) == 1


@pytest.mark.req("C-261")
@virtually
async def test_a_message_that_fails_after_its_first_ok_is_told_to_be_propagated_and_then_to_have_failed():
    class OneOfTwo(MadeRelays):
        async def publish(self, packet, *, timeout=None, on_stored=None):
            on_stored()
            on_stored()
            raise RequestTimeout("PUBLISH", 30)

    async with node_over(OneOfTwo(Log())) as node:
        told = Told(node)
        await node.send(envelope(), request_id="r")
        await until(lambda: told.of(NodeMessageError))
        kinds = [type(event) for event in told.events if event.name.startswith("message_")]
        assert kinds == [NodeMessagePropagated, NodeMessageError]


@pytest.mark.req("C-282")
@virtually
async def test_the_same_bytes_sent_twice_are_two_packets():
    relays = MadeRelays(Log())
    async with node_over(relays) as node:
        for _ in range(2):
            await node.send(envelope(b"the same"))
        await until(lambda: len(relays.log.packets) == 2)
    first, second = relays.published
    assert first.content == second.content and first.timestamp == second.timestamp
    assert first.packet_id != second.packet_id
    nonces = {str(packet.value["nonce"]) for packet in relays.published}
    assert len(nonces) == 2 and all(len(bytes.fromhex(nonce[2:])) == 16 for nonce in nonces)


@pytest.mark.req("C-264")
@virtually
async def test_a_first_send_subscribes_its_topic_so_the_answer_is_heard():
    log = Log()
    async with node_over(MadeRelays(log)) as alice, node_over(MadeRelays(log), BOB) as bob:
        heard = Told(alice)
        await alice.send(envelope(b"anybody there?"))
        assert alice.topics == (TOPIC,)
        await bob.send(envelope(b"yes"))
        await until(lambda: b"yes" in payloads(heard))


@pytest.mark.req("C-265", "C-281")
@virtually
async def test_what_can_never_be_sent_or_heard_is_refused_at_once():
    relays = MadeRelays(Log())
    relays.max_packet_bytes = 2_000
    async with node_over(relays) as node:
        told = Told(node)
        for topic in ("chat", "/a\nb", "/\ud800"):
            with pytest.raises(InvalidContentTopic):
                await node.send(envelope(topic=topic))
            with pytest.raises(InvalidContentTopic):
                await node.subscribe([TOPIC, topic])
            assert node.topics == (), "all or none"
        with pytest.raises(NodeError):
            await node.send(envelope(bytes(1_500)))
        with pytest.raises(NodeError):
            await node.unsubscribe([TOPIC])
        await node.subscribe([TOPIC])
        await node.unsubscribe([TOPIC])
        with pytest.raises(NodeError):
            await node.unsubscribe([TOPIC])
        await asyncio.sleep(1)
        assert relays.published == [] and not [e for e in told.events if e.name.startswith("message_")]


@pytest.mark.req("C-265")
@virtually
async def test_a_relay_that_is_away_is_no_error_and_gets_the_message_when_it_is_back():
    relays = MadeRelays(Log(), connected=0)
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe([TOPIC])
        await node.send(envelope())
        await until(lambda: ContentTopicHealthChange(TOPIC, TopicHealth.UNHEALTHY) in told.events)
        assert not told.of(NodeMessageError)
        relays.connect(1)
        await until(lambda: told.of(NodeMessageSent))
        await until(lambda: payloads(told) == [b"hello"])


REFUSED = RequestRefused
OUTCOMES = [
    (REFUSED("rate_limited", "slow down", retry_after=7), True, 7_000),
    (REFUSED("rate_limited", "slow down"), True, 1_000),
    (REFUSED("internal_error", "oh"), True, None),
    (REFUSED("internal_error", "not now", retry_after=3), True, 3_000),
    (RequestTimeout("PUBLISH", 30), True, None),
    (ConnectionFailed("gone"), True, None),
    (OSError("no route"), True, None),
    (RuntimeError("a fault of the client"), True, None),
    (REFUSED("invalid_signature", "no"), False, None),
    (REFUSED("packet_too_large", "no", max_bytes=10), False, None),
    (REFUSED("blocked_author", "no"), False, None),
    (REFUSED("unauthenticated", "no"), False, None),
    (REFUSED(ErrorCode.TIMESTAMP_IN_FUTURE, "no"), True, 10_000),
    (REFUSED(ErrorCode.TIMESTAMP_TOO_OLD, "no"), True, 10_000),
    (REFUSED("a_code_of_tomorrow", "no"), False, None),
    (InvalidPacket(ErrorCode.INVALID_SCHEMA, "no"), False, None),
]


@pytest.mark.req("C-261", "C-292")
@pytest.mark.parametrize(("error", "recoverable", "wait"), OUTCOMES, ids=lambda value: repr(value)[:40])
@virtually
async def test_each_refusal_tells_whether_and_when_to_try_again(error, recoverable, wait):
    relays = MadeRelays(Log())
    relays.answers = [error]
    async with node_over(relays) as node:
        told = Told(node)
        await node.send(envelope(), request_id="r")
        await until(lambda: told.of(NodeMessageError))
        (event,) = told.of(NodeMessageError)
        assert event.request_id == "r" and event.message_hash == relays.published[0].digest
        assert event.error == str(error)
        assert (event.recoverable, event.retry_after_ms) == (recoverable, wait)
        if isinstance(error, RequestRefused):
            assert event.code == error.code
        assert not told.of(NodeMessageSent) and not told.of(NodeMessagePropagated)


@virtually
async def test_what_is_being_sent_is_bounded_and_the_next_send_waits_for_its_turn():
    relays = MadeRelays(Log())
    relays.answers = [1.0] * 1024
    async with node_over(relays) as node:
        for _ in range(1024):
            await node.send(envelope())
        began_at = asyncio.get_running_loop().time()
        await node.send(envelope())
        assert asyncio.get_running_loop().time() - began_at > 0.9


# Repairs.


@pytest.mark.req("C-294")
@virtually
async def test_a_stored_packet_is_sent_again_whole_inside_a_new_one():
    log = Log()
    relays = MadeRelays(log)
    original = packed(b"said by bob")
    log.store(original)
    async with node_over(relays) as node:
        told = Told(node)
        await asyncio.sleep(2 * 86_400)
        await node.send_again(original.digest, topic=TOPIC, request_id="r")
        await until(lambda: told.of(NodeMessageSent))
        (repair,) = relays.published
        assert repair.author_id == ALICE.did and repair.timestamp == int(wall())
        assert repair.content["original"] == original.value and "payload" not in repair.content
        assert told.of(NodeMessageSent) == [NodeMessageSent("r", repair.digest)]


@virtually
async def test_a_repair_whose_original_nobody_has_fails_for_good():
    async with node_over(MadeRelays(Log())) as node:
        told = Told(node)
        await node.send_again(bytes(32), topic=TOPIC, request_id="r")
        await until(lambda: told.of(NodeMessageError))
        (event,) = told.of(NodeMessageError)
        assert event.request_id == "r" and event.message_hash is None and not event.recoverable


# Receiving.


@pytest.mark.req("C-261", "C-284")
@virtually
async def test_a_topic_is_subscribed_by_its_packets_type_and_a_message_is_told_with_its_hash():
    log = Log()
    relays = MadeRelays(log)
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe([TOPIC])
        packet = packed(b"hello")
        log.store(packet)
        await until(lambda: told.of(NodeMessageReceived))
        (event,) = told.of(NodeMessageReceived)
        assert event.message_hash == packet.digest
        assert event.message.payload == b"hello" and event.message.content_topic == TOPIC
        assert event.message.author == BOB.did
        assert [query["types"] for query in relays.queries] == [TOPIC]


@pytest.mark.req("C-263", "C-284")
@virtually
async def test_a_relay_that_sends_everything_makes_no_foreign_message_be_heard():
    log = Log()
    relays = MadeRelays(log)
    relays.unfiltered = True
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe([TOPIC])
        log.store(packed(b"foreign", topic=OTHER))
        plain = {"type": TOPIC, "text": "of another profile"}
        log.store(packets.build(BOB, plain, timestamp=START))
        broken = {"type": TOPIC, "profile": PROFILE, "payload": "*"}
        log.store(packets.build(BOB, broken, timestamp=START))
        log.store(packed(b"ours"))
        await until(lambda: payloads(told) == [b"ours"])
        assert node.dropped == 3
        pages = [page async for page in node.history(TOPIC, since_ms=0)]
        assert [each.message.payload for page in pages for each in page] == [b"ours"]
        hashes = [packet.digest for packet, _ in log.packets]
        assert [each.message.payload async for each in node.fetch(TOPIC, hashes)] == [b"ours"]


@pytest.mark.req("C-263")
@virtually
async def test_an_unsubscribed_topic_is_heard_no_more():
    log = Log()
    async with node_over(MadeRelays(log)) as node:
        told = Told(node)
        await node.subscribe([TOPIC, OTHER])
        await node.unsubscribe([TOPIC])
        log.store(packed(b"too late"))
        log.store(packed(b"in time", topic=OTHER))
        await until(lambda: payloads(told) == [b"in time"])
        assert node.topics == (OTHER,)


@pytest.mark.req("C-288")
@virtually
async def test_known_authors_narrow_the_subscription():
    log = Log()
    relays = MadeRelays(log)
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe([TOPIC], authors=[BOB.did])
        log.store(packed(b"of a stranger", signer=Identity.from_seed(bytes([9]) * 32)))
        log.store(packed(b"of a member"))
        await until(lambda: payloads(told) == [b"of a member"])
        assert [query["authors"] for query in relays.queries] == [(BOB.did,)]
        assert [page async for page in node.history(TOPIC, since_ms=0)]
        assert relays.queries[-1]["authors"] == (BOB.did,), "and history just so"


@pytest.mark.req("C-288")
@virtually
async def test_a_topic_is_not_subscribed_for_other_authors_than_those_it_is_heard_of():
    log = Log()
    relays = MadeRelays(log)
    async with node_over(relays) as node:
        told = Told(node)
        await node.send(MessageEnvelope(content_topic=TOPIC, payload=b"to whom it may concern"))
        with pytest.raises(NodeError, match="everybody"):
            await node.subscribe([OTHER, TOPIC], authors=[BOB.did])
        assert node.topics == (TOPIC,)
        await node.unsubscribe([TOPIC])
        await node.subscribe([TOPIC], authors=[BOB.did, ALICE.did])
        await node.subscribe_live([TOPIC], authors=[ALICE.did, BOB.did])
        for authors in ([], [BOB.did]):
            with pytest.raises(NodeError, match="others"):
                await node.subscribe_live([TOPIC], authors=authors)
        log.store(packed(b"of a stranger", signer=Identity.from_seed(bytes([9]) * 32)))
        log.store(packed(b"of a member"))
        await until(lambda: b"of a member" in payloads(told))
        assert b"of a stranger" not in payloads(told)


@virtually
async def test_subscribing_twice_reads_once():
    log = Log()
    relays = MadeRelays(log)
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe([TOPIC])
        await node.subscribe([TOPIC])
        log.store(packed(b"once"))
        await asyncio.sleep(5)
        assert payloads(told) == [b"once"] and relays.reading == 1


@virtually
async def test_a_subscription_reaches_back_far_enough_for_relays_whose_clocks_are_behind():
    relays = MadeRelays(Log())
    async with node_over(relays) as node:
        await node.subscribe([TOPIC])
        await until(lambda: relays.queries)
    (query,) = relays.queries
    assert query["received_since"] == START - 600
    assert "since" not in query, "another relay may bring what was written days ago"


@pytest.mark.req("C-265", "C-266")
@pytest.mark.parametrize("failure", [RequestTimeout("SUBSCRIBE", 30), RuntimeError("a fault of the client")])
@virtually
async def test_a_subscription_that_fails_is_made_again_later_and_later_and_says_so(failure):
    log = Log()
    relays = MadeRelays(log)
    relays.failure = failure
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe([TOPIC])
        await until(lambda: ContentTopicHealthChange(TOPIC, TopicHealth.UNHEALTHY) in told.events)
        log.store(packed(b"meanwhile"))
        await asyncio.sleep(600)
        assert 9 < len(relays.queries) < 120
        relays.failure = None
        await until(lambda: payloads(told) == [b"meanwhile"])
        await until(lambda: told.of(ContentTopicHealthChange)[-1].health is TopicHealth.SUFFICIENTLY_HEALTHY)


@virtually
async def test_a_subscription_that_works_again_and_hears_nothing_is_healthy_all_the_same():
    relays = MadeRelays(Log())
    relays.failure = RequestTimeout("SUBSCRIBE", 30)
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe([TOPIC])
        await until(lambda: ContentTopicHealthChange(TOPIC, TopicHealth.UNHEALTHY) in told.events)
        relays.failure = None
        await asyncio.sleep(600)
        assert relays.reading == 1
        assert node.topic_health(TOPIC) is TopicHealth.SUFFICIENTLY_HEALTHY


@virtually
async def test_a_closed_relay_object_ends_the_reading_without_a_noise():
    relays = MadeRelays(Log())
    relays.failure = Closed("closed")
    async with node_over(relays) as node:
        await node.subscribe([TOPIC])
        await asyncio.sleep(600)
        assert len(relays.queries) == 1


@virtually
async def test_a_slow_handler_slows_its_subscription_and_loses_nothing():
    log = Log()
    async with node_over(MadeRelays(log)) as node:
        taken: list[bytes] = []

        async def slow(event: NodeMessageReceived) -> None:
            await asyncio.sleep(10)
            taken.append(event.message.payload)

        node.message_events.on("message_received", slow)
        await node.subscribe([TOPIC])
        for number in range(5):
            log.store(packed(b"%d" % number))
        assert await until(lambda: len(taken) == 5) >= 50
        assert taken == [b"0", b"1", b"2", b"3", b"4"]


@virtually
async def test_a_handler_may_unsubscribe_the_topic_it_hears():
    log = Log()
    relays = MadeRelays(log)
    async with node_over(relays) as node:
        told = Told(node)
        node.message_events.on("message_received", lambda _: node.unsubscribe([TOPIC]))
        await node.subscribe([TOPIC])
        log.store(packed(b"first"))
        log.store(packed(b"second"))
        await asyncio.sleep(5)
        assert payloads(told) == [b"first"] and node.topics == () and relays.reading == 0


@pytest.mark.parametrize("event", ["message_received", "topic_health", "connection_status"])
@virtually
async def test_a_handler_may_close_its_node_by_a_task_that_it_waits_for(event: str):
    log = Log()
    relays = MadeRelays(log)
    node = node_over(relays)
    done: list[str] = []

    async def close(_: object) -> None:
        await asyncio.create_task(node.close())  # as `asyncio.wait_for` does in Python 3.11
        done.append(event)

    if event == "message_received":
        node.message_events.on(event, close)
    else:
        node.health_events.on(HEALTH[event], close)
    await node.subscribe([TOPIC])
    log.store(packed(b"first"))
    log.store(packed(b"second"))
    await asyncio.sleep(10)
    assert done == [event] and relays.reading == 0 and len(asyncio.all_tasks()) == 1


@virtually
async def test_a_handler_may_close_its_node():
    log = Log()
    relays = MadeRelays(log)
    node = node_over(relays)
    told = Told(node)
    done: list[ConnectionStatus] = []

    async def close(_: NodeMessageReceived) -> None:
        await node.close()
        done.append(node.connection_status)

    node.message_events.on("message_received", close)
    await node.subscribe([TOPIC])
    log.store(packed(b"first"))
    log.store(packed(b"second"))
    await asyncio.sleep(5)
    assert payloads(told) == [b"first"] and len(done) == 1
    assert relays.reading == 0 and len(asyncio.all_tasks()) == 1


@virtually
async def test_a_handler_that_hears_of_a_sent_message_may_close_its_node():
    relays = MadeRelays(Log())
    node = node_over(relays)
    done: list[ConnectionStatus] = []

    async def close(_: NodeMessagePropagated) -> None:
        await asyncio.sleep(1)  # meanwhile the message gets its outcome
        await node.close()
        done.append(node._status)

    node.message_events.on("message_propagated", close)
    await node.send(MessageEnvelope(content_topic=TOPIC, payload=b"x"))
    await asyncio.sleep(5)
    assert done == [ConnectionStatus.DISCONNECTED]
    assert relays.reading == 0 and len(asyncio.all_tasks()) == 1


@virtually
async def test_closing_ends_the_handler_of_a_message_that_is_stored_and_still_under_way():
    relays = MadeRelays(Log())
    relays.answers = [10.0]  # one relay has it, and others take their time
    node = node_over(relays)
    told: list[str] = []

    async def slow(_: NodeMessagePropagated) -> None:
        told.append("begun")
        await asyncio.sleep(5)
        told.append("ended")

    node.message_events.on("message_propagated", slow)
    await node.send(MessageEnvelope(content_topic=TOPIC, payload=b"x"))
    await until(lambda: told)
    await node.close()
    assert len(asyncio.all_tasks()) == 1
    await asyncio.sleep(20)
    assert told == ["begun"]


# From now on.


async def read_on(node: RelayNode, found: list[bytes]) -> None:
    async with aclosing(node.read(TOPIC, order="asc", since_ms=0)) as pages:
        async for page in pages:
            found += [each.message.payload for each in page.messages]


@virtually
async def test_who_subscribes_live_hears_what_comes_from_now_on_whatever_came_just_before() -> None:
    log = Log()
    relays = MarkedRelays(log)
    for number in range(100):
        log.store(packed(b"%d" % number))
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe_live([TOPIC])
        await until(lambda: relays.reading)
        log.store(packed(b"now"))
        await until(lambda: payloads(told))
        await asyncio.sleep(60)
        assert payloads(told) == [b"now"]
        (event,) = told.of(NodeMessageReceived)
        assert event.live and not event.stored


@virtually
async def test_between_a_reading_and_what_is_heard_lies_nothing_however_long_the_relay_takes() -> None:
    log = Log()
    relays = MarkedRelays(log)
    relays.head_delay = 5.0
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe_live([TOPIC])
        read: list[bytes] = []
        reading = asyncio.create_task(read_on(node, read))
        for number in range(100):
            log.store(packed(b"%d" % number))
            await asyncio.sleep(0.1)
        await reading
        await asyncio.sleep(1)
        said = {b"%d" % number for number in range(100)}
        assert said == {*read, *payloads(told)}
        assert 40 < len(payloads(told)) < 60, "the relay said after half of them where it ends"


@virtually
async def test_a_reading_does_not_wait_for_a_topic_that_is_given_up() -> None:
    log = Log()
    log.store(packed(b"stored"))
    relays = MarkedRelays(log)
    relays.head_delay = 3_600.0
    async with node_over(relays) as node:
        await node.subscribe_live([TOPIC])
        read: list[bytes] = []
        reading = asyncio.create_task(read_on(node, read))
        await asyncio.sleep(1)
        assert read == []
        await node.unsubscribe([TOPIC])
        await reading
        assert read == [b"stored"]


@pytest.mark.parametrize("off_by", [86_400.0, -86_400.0])
@virtually
async def test_no_clock_has_a_part_in_hearing_a_relay_that_says_where_it_ends(off_by: float) -> None:
    log = Log()
    relays = MarkedRelays(log)
    wrong = [off_by]
    async with node_over(relays, off_by=wrong) as node:
        told = Told(node)
        await node.subscribe_live([TOPIC])
        await until(lambda: relays.reading)
        log.store(packed(b"heard"))
        await until(lambda: payloads(told) == [b"heard"])
        wrong[0] = -wrong[0]
        await asyncio.sleep(5)
        log.store(packed(b"after the clock was set"))
        await until(lambda: payloads(told) == [b"heard", b"after the clock was set"])
        assert len(relays.queries) == 1 and "received_since" not in relays.queries[0]


@virtually
async def test_a_subscription_that_failed_goes_on_behind_what_it_handed_on() -> None:
    log = Log()
    relays = MarkedRelays(log)
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe_live([TOPIC])
        await until(lambda: relays.reading)
        log.store(packed(b"first"))
        await until(lambda: payloads(told) == [b"first"])
        relays.failure = RequestTimeout("SUBSCRIBE", 30)
        log.store(packed(b"second"))
        await asyncio.sleep(60)
        relays.failure = None
        await until(lambda: payloads(told) == [b"first", b"second"])
        assert relays.queries[-1]["cursor"] in "12"


class Placed(MadeRelays):
    """A pool of one relay that can continue from any place."""

    async def heads(self) -> dict[str, Position]:
        return {"ws://made": Position(str(len(self.log.packets)), START)}

    def subscribe(self, **query: Any) -> Any:
        self.queries.append(query)
        return PlacedStream(self, query["positions"])


class PlacedStream:
    """Delivers what comes after its positions, all of it as not live."""

    def __init__(self, relays: Placed, positions: dict[str, Position]) -> None:
        self._relays = relays
        self.positions = positions

    def __aiter__(self) -> PlacedStream:
        return self

    async def __anext__(self) -> Delivered:
        log, at = self._relays.log, int(self.positions["ws://made"].cursor or 0)
        while at == len(log.packets):
            await log.changed.wait()
            if self._relays.failure is not None:
                raise self._relays.failure
        self.positions = {"ws://made": Position(str(at + 1), START)}
        return Delivered(log.packets[at][0], live=False)

    async def aclose(self) -> None:
        pass


@virtually
async def test_over_a_pool_too_it_goes_on_where_it_stood_and_no_reading_is_trusted_with_what_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (heard, relay_node):
        monkeypatch.setattr(module, "PacketPool", Placed)
    log = Log()
    log.store(packed(b"before"))
    relays = Placed(log)
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe_live([TOPIC])
        await until(lambda: relays.queries)
        for number in range(3):
            log.store(packed(b"%d" % number))
        await until(lambda: len(payloads(told)) == 3)
        relays.failure = RequestTimeout("SUBSCRIBE", 10)
        log.tell()
        await asyncio.sleep(0.1)
        relays.failure = None
        await until(lambda: len(relays.queries) == 2)
        log.store(packed(b"3"))
        await until(lambda: b"3" in payloads(told))
        assert payloads(told) == [b"0", b"1", b"2", b"3"]
        # Another read of the pool may not find these.
        assert not any(event.stored or event.live for event in told.of(NodeMessageReceived))


@virtually
async def test_a_relay_that_is_away_at_first_is_heard_from_when_it_is_back() -> None:
    log = Log()
    log.store(packed(b"before"))
    relays = MarkedRelays(log, connected=0)
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe_live([TOPIC])
        await asyncio.sleep(60)
        relays.connect(1)
        await until(lambda: relays.reading)
        log.store(packed(b"now"))
        await until(lambda: payloads(told) == [b"now"])


# Asking the store.


@pytest.mark.req("C-259")
@virtually
async def test_history_comes_in_pages_newest_first_and_not_from_before_its_window():
    log = Log()
    relays = MadeRelays(log)
    for number in range(1_201):
        log.store(packed(b"%d" % number, now=START + number))
    async with node_over(relays) as node:
        pages = [page async for page in node.history(TOPIC, since_ms=(START + 100) * 1000 + 999)]
    assert [len(page) for page in pages] == [500, 500, 101]
    heard = [int(each.message.payload) for page in pages for each in page]
    assert heard == list(range(1_200, 99, -1))
    assert relays.queries[-1]["live"] is False


@virtually
async def test_reading_backwards_asks_for_a_page_at_a_time_and_goes_on_where_it_stood() -> None:
    log = Log()
    for number in range(1_100):
        log.store(packed(b"%d" % number))
    relays = MarkedRelays(log)
    async with node_over(relays) as node:
        async with aclosing(node.read(TOPIC, order="desc", since_ms=0)) as pages:
            found = [each.message.payload for each in (await anext(pages)).messages]
            assert len(relays.queries) == 1 and relays.queries[0]["limit"] == len(found) == 500
            async for page in pages:
                found += [each.message.payload for each in page.messages]
        assert found == [b"%d" % number for number in reversed(range(1_100))]


@pytest.mark.parametrize("order", ["asc", "desc"])
@virtually
async def test_a_page_is_bounded_by_its_bytes(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_PAGE_BYTES", 10_000)
    log = Log()
    for _ in range(20):
        log.store(packed(bytes(3_000)))
    async with node_over(MarkedRelays(log)) as node:
        pages = [len(page.messages) async for page in node.read(TOPIC, order=order, since_ms=0)]
    assert sum(pages) == 20 and max(pages) == 4


@pytest.mark.req("R-339")
@virtually
async def test_a_reading_goes_on_at_its_place_and_before_it_where_the_relay_has_forgotten_that() -> None:
    relays = MarkedRelays(Log())
    async with node_over(relays) as node:
        for url in (relays.url, "ws://another"):
            after = write_position({url: Place("5", START + 7)})
            assert [page async for page in node.read(TOPIC, order="asc", since_ms=0, after=after)]
    resumed, anew = relays.queries
    assert (resumed["cursor"], resumed["cursor_fallback_since"]) == ("5", START + 7 - RESUME_MARGIN_SECONDS)
    assert "cursor" not in anew


class PooledRelays(MadeRelays):
    """A pool of two relays with different packets, the first of which gives no cursors."""

    def __init__(self, plain: Log, marked: Log) -> None:
        super().__init__(plain)
        self.marked = marked

    def subscribe(self, **query: Any) -> Any:
        self.queries.append(query)
        return Merged({"ws://plain": self.log, "ws://marked": self.marked}, query)


class Merged:
    """What a pool returns for a query from newest to oldest."""

    def __init__(self, logs: dict[str, Log], query: dict[str, Any]) -> None:
        self.positions = dict(query.get("positions") or {})
        self._packets = self._walk(logs, query["limit"])

    def __aiter__(self) -> Any:
        return self._packets

    async def aclose(self) -> None:
        await self._packets.aclose()

    async def _walk(self, logs: dict[str, Log], limit: int | None) -> AsyncGenerator[Any, None]:
        given = 0
        for url, log in logs.items():
            stood = self.positions.get(url)
            end = len(log.packets) if stood is None or stood.cursor is None else int(stood.cursor)
            for place in reversed(range(end)):
                if given == limit:
                    return
                given += 1
                await asyncio.sleep(0.0002)
                self.positions[url] = Position(str(place) if url == "ws://marked" else None, START)
                yield Delivered(log.packets[place][0])


@virtually
async def test_reading_backwards_comes_to_the_end_where_some_relay_of_a_pool_gives_no_cursors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "PacketPool", PooledRelays)
    plain, marked = Log(), Log()
    for number in range(600):
        plain.store(packed(b"plain %d" % number))
        marked.store(packed(b"marked %d" % number))
    relays = PooledRelays(plain, marked)
    async with node_over(relays) as node, aclosing(node.read(TOPIC, order="desc", since_ms=0)) as pages:
        found: list[bytes] = []
        async with asyncio.timeout(60):
            async for page in pages:
                found += [each.message.payload for each in page.messages]
    assert [query["limit"] for query in relays.queries] == [500, None]
    assert found == [b"%s %d" % (kind, n) for kind in (b"plain", b"marked") for n in reversed(range(600))]


@virtually
async def test_reading_backwards_comes_to_the_end_where_the_relay_gives_no_cursors() -> None:
    log = Log()
    for number in range(1_100):
        log.store(packed(b"%d" % number))
    relays = MadeRelays(log)
    async with node_over(relays) as node, aclosing(node.read(TOPIC, order="desc", since_ms=0)) as pages:
        found = [each.message.payload async for page in pages for each in page.messages]
    assert [query.get("limit") for query in relays.queries] == [500, None]
    assert found == [b"%d" % number for number in reversed(range(1_100))]


@virtually
async def test_a_history_that_is_left_early_lets_go_of_its_query():
    log = Log()
    for number in range(501):
        log.store(packed(b"%d" % number))
    async with node_over(MadeRelays(log)) as node, aclosing(node.history(TOPIC, since_ms=0)) as pages:
        assert len(await anext(pages)) == 500


@pytest.mark.req("C-259")
@virtually
async def test_history_of_relays_that_are_away_is_an_error():
    async with node_over(MadeRelays(Log(), connected=0)) as node:
        with pytest.raises(ConnectionFailed):
            await anext(node.history(TOPIC, since_ms=0))
        with pytest.raises(ConnectionFailed):
            await anext(node.fetch(TOPIC, [bytes(32)]))


@pytest.mark.req("C-283")
@virtually
async def test_messages_are_fetched_by_the_bytes_of_their_packet_ids_and_other_lengths_are_left_out():
    log = Log()
    relays = MadeRelays(log)
    first, second = packed(b"first"), packed(b"second")
    log.store(first)
    log.store(second)
    async with node_over(relays) as node:
        found = [each async for each in node.fetch(TOPIC, [second.digest, b"short", bytes(33), b""])]
    assert [each.message.payload for each in found] == [b"second"]
    assert relays.found == [(second.packet_id,)]


# Health.


@pytest.mark.req("C-266")
@virtually
async def test_relays_that_go_one_by_one_and_come_back_are_told_in_order():
    relays = MadeRelays(Log(), connected=2, wanted=2)
    async with node_over(relays) as node:
        told = Told(node)
        assert node.topic_health(TOPIC) is TopicHealth.NOT_SUBSCRIBED
        await node.subscribe([TOPIC])
        await asyncio.sleep(1)
        for connected in (1, 0, 1, 2):
            relays.connect(connected)
            await asyncio.sleep(1)
        await node.unsubscribe([TOPIC])
        await asyncio.sleep(1)
        full, part, none = (
            ConnectionStatus.CONNECTED,
            ConnectionStatus.PARTIALLY_CONNECTED,
            ConnectionStatus.DISCONNECTED,
        )
        statuses = [event.status for event in told.of(ConnectionStatusChange)]
        assert statuses == [full, part, none, part, full]
        assert [str(status) for status in statuses[:3]] == [
            "Connected",
            "PartiallyConnected",
            "Disconnected",
        ]
        assert [str(event.health) for event in told.of(ContentTopicHealthChange)] == [
            "SUFFICIENTLY_HEALTHY",
            "MINIMALLY_HEALTHY",
            "UNHEALTHY",
            "MINIMALLY_HEALTHY",
            "SUFFICIENTLY_HEALTHY",
            "NOT_SUBSCRIBED",
        ]
        assert {event.content_topic for event in told.of(ContentTopicHealthChange)} == {TOPIC}


@pytest.mark.req("C-266")
@virtually
async def test_there_are_events_of_connection_and_topics_and_none_of_shards():
    async with node_over(MadeRelays(Log())) as node:
        assert node.health_events.names == ("connection_status_change", "content_topic_health_change")
        assert set(node.message_events.names) == {
            "message_received",
            "message_sent",
            "message_propagated",
            "message_error",
        }


@virtually
async def test_a_fault_while_health_is_looked_at_does_not_end_the_looking(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Faulty(MadeRelays):
        fault: Exception | None = None

        @property
        def seats(self) -> tuple[int, int]:
            if self.fault is not None:
                raise self.fault
            return super().seats

    relays = Faulty(Log())
    async with node_over(relays) as node:
        told = Told(node)
        await node.subscribe([TOPIC])
        await until(lambda: told.of(ConnectionStatusChange))
        relays.fault = RuntimeError("a fault of the client")
        await asyncio.sleep(60)
        assert 1 <= caplog.text.count("a fault of the client") <= 30
        relays.fault = None
        relays.connect(0)
        disconnected = ConnectionStatusChange(ConnectionStatus.DISCONNECTED)
        await until(lambda: told.of(ConnectionStatusChange)[-1] == disconnected)
    caplog.clear()


# The node as a whole.


@pytest.mark.req("C-268")
@virtually
async def test_a_node_lists_what_it_is_subscribed_to_and_what_it_is():
    async with node_over(MadeRelays(Log())) as node:
        await node.subscribe([TOPIC, OTHER])
        assert node.topics == (TOPIC, OTHER)
        assert node.transport_identity == ALICE.did
        assert node.declared_limit() is None


@pytest.mark.req("C-289")
@virtually
async def test_the_largest_payload_follows_the_smallest_limit_that_a_relay_has_told():
    relays = MadeRelays(Log())
    async with node_over(relays) as node:
        usual = node.largest_payload(TOPIC)
        assert 195_000 < usual < packets.DEFAULT_MAX_PACKET_BYTES * 3 // 4
        relays.max_packet_bytes = 1 << 30
        assert node.largest_payload(TOPIC) == usual, "readers take no more than the usual limit"
        relays.max_packet_bytes = 20_480
        most = node.largest_payload(TOPIC)
        assert 14_000 < most < 20_480 * 3 // 4
        assert node.largest_payload(TOPIC, repairable=True) < most
        await node.send(envelope(bytes(most), ephemeral=True))
        await until(lambda: relays.published)
        assert relays.published[0].size_bytes <= 20_480
        with pytest.raises(NodeError):
            await node.send(envelope(bytes(most + 64), ephemeral=True))


@virtually
async def test_closing_ends_every_task_and_may_be_repeated_and_the_node_goes_on_after_it():
    log = Log()
    relays = MadeRelays(log)
    node = node_over(relays)
    told = Told(node)
    relays.answers = [3_600.0]
    await node.subscribe([TOPIC])
    await node.send(envelope())
    await asyncio.sleep(1)
    before = asyncio.get_running_loop().time()
    await node.close()
    await node.close()
    assert asyncio.get_running_loop().time() == before, "nobody is waited for"
    assert len(asyncio.all_tasks()) == 1 and relays.reading == 0
    await node.subscribe([TOPIC])
    log.store(packed(b"again"))
    await until(lambda: b"again" in payloads(told))
    await node.close()


def test_a_relay_node_has_all_that_a_channel_asks_for():
    asked = {name for name in vars(MessagingNode) if not name.startswith("_")}
    node = RelayNode.__new__(RelayNode)
    in_instance = {"message_events", "health_events", "wall", "defaults"}
    assert asked - in_instance <= set(dir(node))


# The clock.


@virtually
async def test_a_topic_is_heard_by_a_device_whose_clock_was_not_set() -> None:
    log = Log()
    relays = MadeRelays(log)
    wrong = [-float(START) + 30]
    async with node_over(relays, off_by=wrong) as node:
        told = Told(node)
        await node.subscribe([TOPIC])
        await until(lambda: relays.queries)
        assert relays.queries[0]["received_since"] == 0
        log.store(packed(b"heard"))
        await until(lambda: payloads(told) == [b"heard"])


@virtually
async def test_a_topic_is_heard_again_once_a_clock_that_was_ahead_is_set_back() -> None:
    log = Log()
    relays = MadeRelays(log)
    wrong = [365 * 86_400.0]
    async with node_over(relays, off_by=wrong) as node:
        told = Told(node)
        await node.subscribe([TOPIC])
        await until(lambda: relays.queries)
        wrong[0] = 0.0
        await until(lambda: len(relays.queries) == 2)
        assert relays.queries[1]["received_since"] <= START
        assert relays.reading == 1
        log.store(packed(b"heard"))
        await until(lambda: payloads(told) == [b"heard"])
