"""The messaging node over a Waku node's REST interface, against fixed exchanges and a small fake nwaku."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from strata.channels.messaging import (
    ConnectionStatus,
    ContentTopicHealthChange,
    InvalidContentTopic,
    MessageEnvelope,
    MessagingNode,
    NodeError,
    NodeMessageError,
    NodeMessagePropagated,
    NodeMessageReceived,
    NodeMessageSent,
    TopicHealth,
)
from strata.channels.reliable import MessageReceived, ReliableMessageDelivered, create_reliable_channel
from strata.channels.waku import WakuNode, WakuRefused, WakuUnreachable, shard_of, waku_message_hash
from strata.channels.waku import node as waku_module
from strata.channels.waku.messages import read_health, read_messages, read_page

from tests.support.waiting import until
from tests.support.waku_rest import WakuNetwork, WakuRest

TOPIC = "/chat/1/room/proto"
STATIC = "/waku/2/rs/16/3"
START = 1_760_000_000.0


class Told:
    """All events of a node, in order."""

    def __init__(self, node: WakuNode) -> None:
        self.events: list[Any] = []
        for emitter in (node.message_events, node.health_events):
            for name in emitter.names:
                emitter.on(name, self.events.append)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def payloads(self) -> list[bytes]:
        return [event.message.payload for event in self.of(NodeMessageReceived)]


@contextlib.asynccontextmanager
async def waku(**options: Any) -> AsyncIterator[tuple[WakuRest, WakuNode, Told]]:
    rest = WakuRest(WakuNetwork())
    await rest.start()
    try:
        async with WakuNode(rest.url, **{"poll_seconds": 0.01, "timeout": 5.0, **options}) as node:
            yield rest, node, Told(node)
    finally:
        await rest.stop()


def envelope(payload: bytes = b"hello", **more: Any) -> MessageEnvelope:
    return MessageEnvelope(content_topic=TOPIC, payload=payload, **more)


# What is written and read.


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        (b"", "cccab07fed94181c83937c8ca8340c9108492b7ede354a6d95421ad34141fd37"),
        (b"super-secret", "b9b4852f9d8c489846e8bfc6c5ca6a1a8d460a40d28832a966e029eb39619199"),
    ],
)
def test_the_hash_is_that_of_the_document(meta: bytes, expected: str) -> None:
    payload = b"\x01\x02\x03\x04TEST\x05\x06\x07\x08"
    content_topic = "/waku/2/default-content/proto"
    timestamp = 0x175789BFA23F8400
    assert waku_message_hash("/waku/2/rs/0/0", payload, content_topic, meta, timestamp).hex() == expected


def test_a_topic_has_its_shard_by_application_and_version() -> None:
    assert (
        shard_of(TOPIC, 1, 8)
        == shard_of("/0/chat/1/other/json", 1, 8)
        == "/waku/2/rs/1/" + str(int(shard_of(TOPIC, 7, 8).rpartition("/")[2]))
    )
    assert shard_of(TOPIC, 1, 8) == WakuNetwork().shard(TOPIC)
    for wrong in ("/chat/1/room", "/1/chat/1/room/proto", "chat/1/room/proto", "/chat//room/proto"):
        with pytest.raises(InvalidContentTopic):
            shard_of(wrong, 1, 8)


def test_an_answer_of_an_older_node_is_read_too() -> None:
    message = {"payload": "aGk", "contentTopic": TOPIC, "timestamp": 1_760_000_000_000_000_000, "version": 0}
    key = base64.b64encode(bytes(range(32))).decode()
    answer = {
        "requestId": "",
        "statusCode": 200,
        "statusDesc": "",
        "messages": [{"messageHash": key}, {"messageHash": key, "message": message, "more": 1}],
    }
    (event,) = read_page(json.dumps(answer).encode(), None, (1, 8)).messages
    assert event.message_hash == bytes(range(32))
    assert (event.message.payload, event.message.timestamp) == (b"hi", 1_760_000_000)
    assert read_health(b"Node is healthy") == "READY" and read_health(b"Node is not ready") == "NOT_READY"
    assert read_health(b'{"nodeHealth":"Ready","protocolsHealth":[]}') == "READY"


@pytest.mark.parametrize("in_hex", [True, False])
def test_bytes_whose_base64_looks_like_hex_are_read_as_what_they_are(in_hex: bool) -> None:
    payload = digest = b"\xd3\x1b" + bytes(range(30))  # as of a hook whose output begins with a random nonce
    text = base64.b64encode(payload).decode()
    assert text.startswith("0x")
    message = {"payload": text, "meta": text, "contentTopic": TOPIC, "timestamp": 1}
    stored = {"messageHash": f"0x{digest.hex()}" if in_hex else text, "message": message}
    answer = {"statusCode": 200, "statusDesc": "", "messages": [stored]}
    (found,) = read_page(json.dumps(answer).encode(), None, (1, 8)).messages
    (heard,) = read_messages(json.dumps([message]).encode(), None, (1, 8))
    assert found.message == heard.message and found.message_hash == digest
    assert (heard.message.payload, heard.message.meta) == (payload, payload)


@pytest.mark.parametrize(
    "junk", [b"", b"[", b"{}", b'[{"payload":1}]', b"\xff", b'{"messages":3}', b"[" * 10_000]
)
def test_junk_is_no_answer(junk: bytes) -> None:
    for read in (read_messages, read_page):
        with pytest.raises(ValueError):
            read(junk, None, (1, 8))
    read_health(junk)


def test_messages_that_cannot_be_read_do_not_hide_the_others() -> None:
    good = {"payload": base64.b64encode(b"good").decode(), "contentTopic": TOPIC, "timestamp": 1}
    bad = [
        {"payload": "%%%", "contentTopic": TOPIC},
        {"payload": "", "contentTopic": TOPIC},
        {"payload": "aGk=", "contentTopic": "nowhere"},
        {"payload": "aGk=", "contentTopic": TOPIC, "timestamp": 10**100},
    ]
    (event,) = read_messages(json.dumps([*bad, good]).encode(), None, (1, 8))
    assert event.message.payload == b"good"


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "ws://127.0.0.1"},
        {"url": "nowhere"},
        {"shards": 0},
        {"poll_seconds": 0},
        {"send_by": "post"},
        {"receive_by": "post"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not an http|relay|positive"):
        WakuNode(**wrong)


# Sending.


async def test_a_message_is_published_as_the_interface_has_it_and_its_hash_is_that_of_the_store() -> None:
    async with waku(wall=lambda: START) as (rest, node, told):
        await node.send(envelope(meta=b"proof", ephemeral=False), request_id="r")
        await node.send(envelope(b"at the same moment"), request_id="s")
        await until(lambda: len(told.of(NodeMessageSent)) == 2)
        first, second = (request for request in rest.requests if request[0] == "POST")
        assert first == (
            "POST",
            "/relay/v1/auto/messages",
            {
                "payload": "aGVsbG8=",
                "contentTopic": TOPIC,
                "version": 0,
                "timestamp": 1_760_000_000_000_000_000,
                "meta": "cHJvb2Y=",
            },
        )
        assert second[2]["timestamp"] == 1_760_000_000_000_000_001, "no two have one time"
        hashes = [bytes.fromhex(each.hash[2:]) for each in rest.network.archive]
        assert [event.message_hash for event in told.of(NodeMessageSent)] == hashes
        assert [event.request_id for event in told.of(NodeMessagePropagated)] == ["r", "s"]


async def test_by_light_push_and_on_a_named_shard() -> None:
    options = {"send_by": "lightpush", "pubsub_topic": STATIC, "receive_by": "filter"}
    async with waku(**options) as (rest, node, told):
        await node.subscribe([TOPIC])
        await until(lambda: node._topics[TOPIC] is TopicHealth.SUFFICIENTLY_HEALTHY)
        await node.send(envelope())
        await until(lambda: told.payloads == [b"hello"])
        posted = {path: body for method, path, body in rest.requests if method == "POST"}
        assert posted["/lightpush/v3/message"]["pubsubTopic"] == STATIC
        wanted = posted["/filter/v2/subscriptions"]
        assert wanted["contentFilters"] == [TOPIC] and wanted["pubsubTopic"] == STATIC
        assert told.of(NodeMessageReceived)[0].message_hash == told.of(NodeMessageSent)[0].message_hash


async def test_a_named_shard_by_relay_brings_only_the_topics_that_are_subscribed() -> None:
    async with waku(pubsub_topic=STATIC) as (rest, node, told):
        await node.subscribe([TOPIC, "/chat/1/hall/proto"])
        await until(lambda: node._topics[TOPIC] is TopicHealth.SUFFICIENTLY_HEALTHY)
        other = MessageEnvelope(content_topic="/chat/1/cellar/proto", payload=b"unheard")
        for each in (other, envelope()):
            await node.send(each)
        await until(lambda: told.payloads == [b"hello"])
        assert next(body for method, _, body in rest.requests if method == "POST") == [STATIC]
        await node.unsubscribe([TOPIC])
        assert not any(method == "DELETE" for method, _, _ in rest.requests)
        await node.unsubscribe(["/chat/1/hall/proto"])
        assert rest.requests[-1][0] == "DELETE" and rest.requests[-1][2] == [STATIC]


async def test_a_topic_let_go_of_while_the_health_of_another_is_told_stays_so() -> None:
    async with waku(pubsub_topic=STATIC) as (_, node, told):

        async def let_go(event: ContentTopicHealthChange) -> None:
            if event.content_topic == TOPIC and event.health is TopicHealth.SUFFICIENTLY_HEALTHY:
                await node.unsubscribe(["/chat/1/hall/proto"])

        node.health_events.on(ContentTopicHealthChange.name, let_go)
        await node.subscribe([TOPIC, "/chat/1/hall/proto"])
        await until(lambda: "/chat/1/hall/proto" not in node._topics)
        await node.send(envelope())
        await until(lambda: told.payloads == [b"hello"])
        assert list(node._topics) == [TOPIC]
        await node.unsubscribe([TOPIC])
        assert not node._readers


@pytest.mark.parametrize(
    ("status", "text", "recoverable", "wait"),
    [
        (400, "Failed to publish: limit exceeded, try again later", True, 10_000),
        (429, "Request rate limit reached", True, 10_000),
        (400, "Failed to publish: Node not subscribed to topic: /waku/2/rs/1/0", True, None),
        (400, "Invalid content body, could not decode", False, None),
        (413, "Payload too large", False, None),
        (500, "Failed to publish: timedout", True, None),
        (503, "No suitable service peer & none discovered", True, None),
    ],
)
async def test_each_refusal_tells_whether_and_when_to_try_again(
    status: int, text: str, recoverable: bool, wait: int | None
) -> None:
    async with waku() as (rest, node, told):
        rest.refuse = lambda method, path: (status, text) if method == "POST" else None
        await node.send(envelope(), request_id="r")
        await until(lambda: told.of(NodeMessageError))
        (error,) = told.of(NodeMessageError)
        assert (error.request_id, error.recoverable, error.retry_after_ms) == ("r", recoverable, wait)
        assert text in error.error and error.code == str(status)


async def test_a_node_that_is_away_is_a_passing_fault_and_what_can_never_be_is_refused() -> None:
    async with waku() as (rest, node, told):
        await rest.stop()
        await node.send(envelope(), request_id="r")
        await until(lambda: told.of(NodeMessageError))
        assert told.of(NodeMessageError)[0].recoverable
        with pytest.raises(NodeError):
            await node.send(MessageEnvelope(content_topic="/unsharded", payload=b"x"))
        with pytest.raises(NodeError):
            await node.send(envelope(bytes(node.largest_payload(TOPIC) + 1)))
        with pytest.raises(NodeError):
            await node.subscribe([TOPIC], authors=["did:key:z6Mk"])
        with pytest.raises(NodeError):
            await node.unsubscribe([TOPIC])
        with pytest.raises(WakuUnreachable):
            assert [page async for page in node.history(TOPIC, since_ms=0)]
        await node.send_again(bytes(32), topic=TOPIC, request_id="again")
        assert not told.of(NodeMessageError)[-1].recoverable


# Receiving.


async def test_messages_are_fetched_and_forgotten_topics_subscribed_again() -> None:
    async with waku() as (rest, node, told):
        await node.subscribe([TOPIC])
        await until(lambda: node._topics[TOPIC] is TopicHealth.SUFFICIENTLY_HEALTHY)
        await node.send(envelope(b"one"))
        await until(lambda: told.payloads == [b"one"])
        port = int(rest.url.rpartition(":")[2])
        await rest.stop()
        await until(lambda: node.connection_status is ConnectionStatus.DISCONNECTED)
        await rest.start(port)  # it has forgotten all subscriptions
        await until(lambda: node.connection_status is not ConnectionStatus.DISCONNECTED)
        await until(lambda: sum(path.endswith("subscriptions") for _, path, _ in rest.requests) == 2)
        await until(lambda: node._topics[TOPIC] is TopicHealth.SUFFICIENTLY_HEALTHY)
        await node.send(envelope(b"two"))
        await until(lambda: told.payloads == [b"one", b"two"])
        assert f"/relay/v1/auto/messages/{TOPIC.replace('/', '%2F')}" in {
            path for _, path, _ in rest.requests
        }


@pytest.mark.parametrize(
    ("health", "status"),
    [
        ({"nodeHealth": "READY", "protocolsHealth": [{"Relay": "READY"}]}, ConnectionStatus.CONNECTED),
        ({"nodeHealth": "INITIALIZING", "protocolsHealth": []}, ConnectionStatus.PARTIALLY_CONNECTED),
        ("Node is healthy", ConnectionStatus.CONNECTED),
    ],
)
async def test_the_health_of_the_node_is_the_status(health: Any, status: ConnectionStatus) -> None:
    rest = WakuRest(WakuNetwork(), health=health)
    await rest.start()
    async with WakuNode(rest.url) as node:
        await until(lambda: node.connection_status is status)
    assert node.connection_status is ConnectionStatus.DISCONNECTED
    await rest.stop()


# The store.


async def test_history_is_read_by_cursor_newest_first_and_messages_by_hash() -> None:
    clock = [START]
    async with waku(wall=lambda: clock[0]) as (rest, node, told):
        rest.page_limit = 7
        for number in range(20):
            clock[0] += 1
            await node.send(envelope(b"%d" % number))
            await until(lambda: len(told.of(NodeMessageSent)) > number)  # noqa: B023 -- it waits here
        since = int((START + 4) * 1000)
        pages = [page async for page in node.history(TOPIC, since_ms=since)]
        assert [len(page) for page in pages] == [7, 7, 3]
        found = [event.message.payload for page in pages for event in page]
        assert found == [b"%d" % number for number in range(19, 2, -1)]
        asked = [path for _, path, _ in rest.requests if "/store/" in path]
        assert "startTime=1760000004000000000" in asked[0] and "cursor=0x" in asked[1]
        assert "includeData=true" in asked[0] and "pubsubTopic=%2Fwaku%2F2%2Frs%2F1%2F" in asked[0]
        hashes = [event.message_hash for event in told.of(NodeMessageSent)][:3]
        wanted = [event async for event in node.fetch(TOPIC, [*hashes, bytes(32)])]
        assert [event.message_hash for event in wanted] == hashes
        rest.refuse = lambda method, path: (412, "No suitable service peer & none discovered")
        with pytest.raises(WakuRefused) as refused:
            assert [page async for page in node.history(TOPIC, since_ms=0)]
        assert refused.value.status == 412


async def test_a_store_whose_cursors_go_round_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with waku() as (rest, node, told):
        rest.page_limit = 2
        for number in range(5):
            await node.send(envelope(b"%d" % number))
            await until(lambda: len(told.of(NodeMessageSent)) > number)  # noqa: B023 -- it waits here
        honest = rest._store
        first: list[str] = []

        def go_round(query: dict[str, str]) -> dict[str, Any]:
            answer = honest(query)
            first.append(answer.setdefault("paginationCursor", first[0] if first else ""))
            return answer

        monkeypatch.setattr(rest, "_store", go_round)
        async with asyncio.timeout(5):
            pages = [page async for page in node.history(TOPIC, since_ms=0)]
        assert [len(page) for page in pages] == [2, 2, 1]


async def test_an_answer_of_the_store_that_is_no_success_is_an_error() -> None:
    async with waku() as (rest, node, _):
        body = json.dumps(
            {"requestId": "", "statusCode": 504, "statusDesc": "PEER_DIAL_FAILURE", "messages": []}
        )
        rest.refuse = lambda method, path: (200, body) if "store" in path else None
        with pytest.raises(WakuRefused, match="PEER_DIAL_FAILURE"):
            assert [page async for page in node.history(TOPIC, since_ms=0)]


# Channels.

QUICK: dict[str, Any] = {"acknowledgement_timeout_ms": 400, "process_task_min_elapse_ms": 20}


def _keep(received: list[bytes], event: MessageReceived) -> None:
    received.append(event.payload)


async def test_a_channel_runs_over_waku_through_lost_answers_and_a_flood() -> None:
    network = WakuNetwork()
    rests = [WakuRest(network), WakuRest(network)]
    for rest in rests:
        await rest.start()
    nodes = [WakuNode(rest.url, poll_seconds=0.02) for rest in rests]
    settings = {"retrieve_frequency_ms": 100, "segmentation": "auto", "max_retransmissions": 20}
    channels = []
    taken: list[list[bytes]] = [[], []]
    delivered: list[str] = []
    for node, name, received in zip(nodes, ("alice", "bob"), taken, strict=True):
        asked: MessagingNode = node
        channel = await create_reliable_channel(asked, "room", TOPIC, name, options={**QUICK, **settings})
        keep = functools.partial(_keep, received)
        channel.message_events.on("message-received", keep)
        channels.append(channel)
    alice, bob = channels
    alice.message_events.on(ReliableMessageDelivered.name, lambda event: delivered.append(event.request_id))
    await until(
        lambda: all(node.topics and node._topics[TOPIC] is TopicHealth.SUFFICIENTLY_HEALTHY for node in nodes)
    )
    requests = [await alice.send(b"hello")]
    await until(lambda: taken[1] == [b"hello"])
    rests[1].lose_answers = 3  # together with their contents
    said = [b"hello"]
    for number in range(10):
        said.append(b"number %d" % number)
        requests.append(await alice.send(said[-1]))
    await until(lambda: len(taken[1]) == len(said))
    rests[1].deaf = True  # more than its cache holds without being read
    for number in range(10, 20):
        said.append(b"number %d" % number)
        requests.append(await alice.send(said[-1]))
    await until(lambda: len(network.archive) >= len(said))
    rests[1].deaf = False
    await bob.send(b"an answer")
    said.append(b"and one more")
    requests.append(await alice.send(said[-1]))
    await until(lambda: len(taken[1]) == len(said) and taken[0] == [b"an answer"])
    assert taken[1] == said, "each once, in order"
    await until(lambda: set(delivered) >= set(requests))
    for channel, node, rest in zip(channels, nodes, rests, strict=True):
        await channel.close()
        await node.close()
        await rest.stop()


@pytest.mark.parametrize("task", ["sending", "receiving", "health"])
async def test_a_fault_of_ours_ends_no_task_unseen(
    task: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waku_module, "_FAULT_SECONDS", 0.01)
    monkeypatch.setattr(waku_module, "_HEALTH_SECONDS", 0.01)
    path = {"sending": "/relay/v1/auto/messages", "receiving": "/messages/", "health": "/health"}[task]
    async with waku() as (_, node, told):
        await node.subscribe([TOPIC])
        await until(lambda: node._topics[TOPIC] is TopicHealth.SUFFICIENTLY_HEALTHY)
        ask, faults = node._ask, 0

        async def faulty(method: str, asked: str, body: bytes | None = None) -> Any:
            nonlocal faults
            if path in asked and (method == "POST") == (task == "sending") and faults < 3:
                faults += 1
                raise RuntimeError("a fault of the client")
            return await ask(method, asked, body)

        monkeypatch.setattr(node, "_ask", faulty)
        for number in range(3 if task == "sending" else 0):
            await node.send(envelope(), request_id=f"{number}")
        await until(lambda: faults == 3)
        await until(lambda: caplog.text.count("a fault of the client") >= 3)
        if task == "sending":
            await until(lambda: len(told.of(NodeMessageError)) == 3)
            assert all(event.recoverable for event in told.of(NodeMessageError))
        await node.send(envelope(b"all the same"))
        await until(lambda: told.payloads == [b"all the same"])
