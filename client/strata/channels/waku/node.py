"""A messaging node over the REST interface of a Waku node (nwaku): relay, light push, filter, store, health.

A Waku node keeps about fifty of the latest messages of a topic for the program that polls it, and forgets
them once it has answered. SDS detects messages that are lost between two polls, and the store has them. An
outgoing message has the time and the hash that this side computed, because the interface does not return the
hash.

Waku signs nothing, so there are no authors, and no proof of who wrote a message. Use an encryption hook.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl as ssl_module
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Literal, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.ending import ending
from strata.channels.messaging.node import NodeError, check_content_topic
from strata.channels.messaging.values import (
    HEALTH_EVENTS,
    MESSAGE_EVENTS,
    ConnectionStatus,
    ConnectionStatusChange,
    ContentTopicHealthChange,
    MessageEnvelope,
    NodeMessageError,
    NodeMessagePropagated,
    NodeMessageReceived,
    NodeMessageSent,
    TopicHealth,
)
from strata.channels.waku.http import HttpReply, WakuRefused, WakuUnreachable, request
from strata.channels.waku.messages import (
    Page,
    encode_message,
    encode_push,
    read_health,
    read_messages,
    read_page,
    shard_of,
    waku_message_hash,
)
from strata.protocol.errors import StrataError

__all__ = ["WakuNode"]

_log = logging.getLogger("strata.messaging")

T = TypeVar("T")

_MAX_MESSAGE_BYTES = 150 * 1024
"""The largest message that a Waku network accepts by default, including everything around the payload."""
_AROUND_BYTES = 1_024
"""Room for the rate-limit proof, the fields and the time."""
_MAX_ANSWER_BYTES = 64 << 20
_PAGE_MESSAGES = 50
_MAX_HASHES = 50
_MAX_UNDER_WAY = 64
_HEALTH_SECONDS = 5.0
_FAULT_SECONDS = 5.0
"""How long a task waits after a bug of ours; it then continues, because it must not end unnoticed."""
_BUSY_MS = 10_000
_READY = {"READY", "SYNCHRONIZING"}


class WakuNode:
    """A messaging node for channels, on one Waku node. Use as a context manager, or call `close`.

        async with WakuNode("http://127.0.0.1:8645") as node:
            room = await create_reliable_channel(node, "room", "/chat/1/room/proto", "alice")

    It belongs to one event loop.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8645",
        *,
        send_by: Literal["relay", "lightpush"] = "relay",
        receive_by: Literal["relay", "filter"] = "relay",
        pubsub_topic: str | None = None,
        cluster_id: int = 1,
        shards: int = 8,
        store_peer: str | None = None,
        poll_seconds: float = 1.0,
        timeout: float = 10.0,
        defaults: object = None,
        ssl: ssl_module.SSLContext | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`url` is the URL of the REST interface. Without a `pubsub_topic`, topics are sharded automatically,
        as in a network with this cluster and number of shards. `store_peer` is the multiaddress of the store
        to query; None leaves the choice to the node. `timeout` is for each request, in seconds.

        Raises `ValueError` for unusable arguments.
        """
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"{url!r} is not an http or https URL")
        if send_by not in ("relay", "lightpush") or receive_by not in ("relay", "filter"):
            raise ValueError("send_by is relay or lightpush, and receive_by relay or filter")
        if shards < 1 or not poll_seconds > 0 or not timeout > 0:
            raise ValueError("shards, poll_seconds and timeout must be positive")
        self.hub: object = None
        self.message_events = EventEmitter(MESSAGE_EVENTS)
        self.health_events = EventEmitter(HEALTH_EVENTS)
        self.defaults = defaults
        """A `ReliableChannelConfig` for settings that a channel leaves open (C-031)."""
        self.wall = wall
        self._url = url
        self._send_by = send_by
        self._receive_by = receive_by
        self._pubsub_topic = pubsub_topic
        self._sharding = (cluster_id, shards)
        self._store_peer = store_peer
        self._poll_seconds = poll_seconds
        self._timeout = timeout
        self._ssl = ssl
        self._status = ConnectionStatus.DISCONNECTED
        self._last_ns = 0
        self._topics: dict[str, TopicHealth] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_MAX_UNDER_WAY)
        self._monitor: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watch()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every task; messages under way may arrive or not. Idempotent; the node can be used again.

        A handler that closes its node ends at its next wait.
        """
        tasks = [*self._readers.values(), *self._under_way, *([self._monitor] if self._monitor else [])]
        self._monitor = None
        self._readers.clear()
        self._topics.clear()
        async with ending(tasks):
            self._status = ConnectionStatus.DISCONNECTED

    @property
    def transport_identity(self) -> str:
        """The URL of the Waku node, whose users share its limits."""
        return self._url

    @property
    def connection_status(self) -> ConnectionStatus:
        """Whether the Waku node answers, and whether it reports that it is ready."""
        return self._status

    @property
    def topics(self) -> tuple[str, ...]:
        """The subscribed topics (C-268)."""
        return tuple(self._topics)

    def largest_payload(self, content_topic: str, *, repairable: bool = False) -> int:
        """The largest payload of one Waku message, in bytes."""
        return _MAX_MESSAGE_BYTES - _AROUND_BYTES - len(content_topic.encode())

    def declared_limit(self) -> tuple[int, int] | None:
        """None; set the rate limit of the channels to that of the network (`messages_per_epoch`)."""
        return None

    # Sending.

    async def send(self, envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
        """Publish a message; `message_events` reports its outcome.

        Raises `NodeError` for an invalid topic or a size that can never be sent. Cancelling sends nothing or
        everything.
        """
        pubsub_topic = self._pubsub_of(check_content_topic(envelope.content_topic))
        if len(envelope.payload) > self.largest_payload(envelope.content_topic):
            raise NodeError(f"{len(envelope.payload)} bytes are more than a Waku message holds")
        request_id = request_id or secrets.token_hex(16)
        await self._slots.acquire()
        name = f"strata-waku-send {request_id}"
        task = asyncio.create_task(self._publish(envelope, pubsub_topic, request_id), name=name)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return request_id

    async def send_again(
        self, message_hash: bytes, *, topic: str, request_id: str, retention_seconds: int | None = None
    ) -> None:
        """Report a final error, because nothing on Waku proves who wrote a message."""
        told = NodeMessageError(request_id, None, "Waku has no signed originals", "unsupported", False)
        await self.message_events.emit(told)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._slots.release()

    async def _publish(self, envelope: MessageEnvelope, pubsub_topic: str, request_id: str) -> None:
        now_ns = self._last_ns = max(int(self.wall() * 1e9), self._last_ns + 1)
        meta, topic = envelope.meta, envelope.content_topic
        message_hash = waku_message_hash(pubsub_topic, envelope.payload, topic, meta, now_ns)
        if self._send_by == "lightpush":
            path, body = "/lightpush/v3/message", encode_push(envelope, now_ns, self._pubsub_topic)
        elif self._pubsub_topic is None:
            path, body = "/relay/v1/auto/messages", encode_message(envelope, now_ns)
        else:
            path = f"/relay/v1/messages/{quote(self._pubsub_topic, safe='')}"
            body = encode_message(envelope, now_ns)
        try:
            await self._ask("POST", path, body)
        except Exception as error:
            # The channel that waits for the outcome must learn of any error.
            if not isinstance(error, StrataError):
                _log.exception("a message could not be sent")
            await self.message_events.emit(_failure(request_id, message_hash, error))
            return
        await self.message_events.emit(NodeMessagePropagated(request_id, message_hash))
        await self.message_events.emit(NodeMessageSent(request_id, message_hash))

    def _pubsub_of(self, content_topic: str) -> str:
        return self._pubsub_topic or shard_of(content_topic, *self._sharding)

    # Receiving.

    async def subscribe(self, topics: Sequence[str], *, authors: Iterable[str] = ()) -> None:
        """Receive messages on these topics from now on. A Waku node that is away is no error.

        Raises `NodeError` for a topic that Waku cannot shard, and for named authors, which Waku lacks.
        """
        if tuple(authors):
            raise NodeError("Waku messages have no authors")
        for topic in topics:
            self._pubsub_of(check_content_topic(topic))
        for topic in topics:
            self._topics.setdefault(topic, TopicHealth.UNHEALTHY)
            key = self._cache_of(topic)
            if key not in self._readers:
                self._readers[key] = asyncio.create_task(self._read(key), name=f"strata-waku-topic {key}")
        self._watch()

    async def unsubscribe(self, topics: Sequence[str]) -> None:
        """Stop receiving topics. Raises `NodeError` for a topic that is not subscribed."""
        for topic in topics:
            if topic not in self._topics:
                raise NodeError(f"{topic} is not subscribed")
        for topic in topics:
            del self._topics[topic]
        wanted = {self._cache_of(topic) for topic in self._topics}
        gone = [key for key in self._readers if key not in wanted]
        async with ending([self._readers.pop(key) for key in gone]):
            for key in gone:
                try:
                    await self._ask("DELETE", *self._subscription(key))
                except StrataError as error:
                    _log.info("%s stays subscribed at the Waku node: %s", key, error)
            for topic in topics:
                change = ContentTopicHealthChange(topic, TopicHealth.NOT_SUBSCRIBED)
                await self.health_events.emit(change)

    def _cache_of(self, topic: str) -> str:
        """The key under which the Waku node keeps messages: for relay the pubsub topic, if one was named."""
        return self._pubsub_topic if self._receive_by == "relay" and self._pubsub_topic else topic

    def _subscription(self, key: str) -> tuple[str, bytes]:
        if self._receive_by == "filter":
            wanted: dict[str, object] = {"requestId": secrets.token_hex(16), "contentFilters": [key]}
            if self._pubsub_topic is not None:
                wanted["pubsubTopic"] = self._pubsub_topic
            return "/filter/v2/subscriptions", msgspec.json.encode(wanted)
        sharded = "" if self._pubsub_topic is not None else "/auto"
        return f"/relay/v1{sharded}/subscriptions", msgspec.json.encode([key])

    def _messages_path(self, key: str) -> str:
        held = quote(key, safe="")
        if self._receive_by == "filter":
            return f"/filter/v2/messages/{held}"
        return f"/relay/v1{'' if self._pubsub_topic is not None else '/auto'}/messages/{held}"

    async def _read(self, key: str) -> None:
        """Fetch messages that arrive under a key, as long as it is subscribed."""
        subscribed = False
        while self._readers.get(key) is asyncio.current_task():
            try:
                if not subscribed:
                    await self._ask("POST", *self._subscription(key))
                    subscribed = True
                answer = await self._ask("GET", self._messages_path(key))
                events = self._readable(read_messages, answer)
            except StrataError as error:
                # A node that was restarted has no subscriptions, and reports that.
                subscribed = subscribed and not _is_forgotten(error)
                await self._tell_topics(key, TopicHealth.UNHEALTHY)
                if isinstance(error, WakuUnreachable):
                    # A lost answer may have contained messages, so the store must be queried.
                    await self._set_status(ConnectionStatus.DISCONNECTED)
                _log.debug("%s cannot be read: %s", key, error)
            except Exception:
                _log.exception("reading %s failed", key)
                await asyncio.sleep(_FAULT_SECONDS)
            else:
                await self._tell_topics(key, TopicHealth.SUFFICIENTLY_HEALTHY)
                if self._status is ConnectionStatus.DISCONNECTED:
                    await self._set_status(ConnectionStatus.CONNECTED)
                for event in events:
                    if event.message.content_topic in self._topics:
                        await self.message_events.emit(event)
            await asyncio.sleep(self._poll_seconds)

    # The store.

    async def history(
        self, topic: str, *, since_ms: int
    ) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
        """The messages that the store has since `since_ms`, newest first, in pages.

        Raises `WakuUnreachable`, and `WakuRefused` if the node has no store to query.
        """
        query = {"contentTopics": topic, "startTime": str(max(1, since_ms) * 1_000_000), "ascending": "false"}
        cursor: str | None = None
        asked: set[str] = set()
        while True:
            page = await self._ask_store(topic, query | ({} if cursor is None else {"cursor": cursor}))
            if page.messages:
                yield page.messages
            if page.cursor is None or page.cursor in asked:
                return  # a store that repeats a cursor has no more messages
            cursor = page.cursor
            asked.add(cursor)

    async def fetch(self, topic: str, hashes: Sequence[bytes]) -> AsyncGenerator[NodeMessageReceived, None]:
        """The messages that the store has under these hashes. Raises as `history` does."""
        for start in range(0, len(hashes), _MAX_HASHES):
            part = hashes[start : start + _MAX_HASHES]
            wanted = {"hashes": ",".join(f"0x{each.hex()}" for each in part)}
            for event in reversed((await self._ask_store(topic, wanted)).messages):
                if event.message.content_topic == topic:
                    yield event

    async def _ask_store(self, topic: str, query: dict[str, str]) -> Page:
        query = query | {"includeData": "true", "pageSize": str(_PAGE_MESSAGES)}
        if "hashes" not in query:
            query["pubsubTopic"] = self._pubsub_of(topic)
        if self._store_peer is not None:
            query["peerAddr"] = self._store_peer
        answer = await self._ask("GET", f"/store/v3/messages?{urlencode(query)}")
        page = self._readable(read_page, answer)
        if page.refusal is not None:
            raise WakuRefused("/store/v3/messages", answer.status, page.refusal)
        return page

    # Health.

    def _watch(self) -> None:
        if self._monitor is None:
            self._monitor = asyncio.create_task(self._monitor_health(), name="strata-waku-health")

    async def _monitor_health(self) -> None:
        while self._monitor is asyncio.current_task():
            try:
                ready = read_health((await self._ask("GET", "/health")).body) in _READY
            except WakuUnreachable:
                await self._set_status(ConnectionStatus.DISCONNECTED)
            except StrataError:
                await self._set_status(ConnectionStatus.PARTIALLY_CONNECTED)
            except Exception:
                _log.exception("the health of the node could not be told")
            else:
                connected = ConnectionStatus.CONNECTED
                await self._set_status(connected if ready else ConnectionStatus.PARTIALLY_CONNECTED)
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _set_status(self, status: ConnectionStatus) -> None:
        if status is not self._status:
            self._status = status
            await self.health_events.emit(ConnectionStatusChange(status))

    async def _tell_topics(self, key: str, health: TopicHealth) -> None:
        for topic, before in list(self._topics.items()):
            # A topic may be unsubscribed while the change of another one is being reported.
            if topic in self._topics and self._cache_of(topic) == key and before is not health:
                self._topics[topic] = health
                await self.health_events.emit(ContentTopicHealthChange(topic, health))

    # Requests.

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> HttpReply:
        """Return the node's answer. Raises `WakuUnreachable`, or `WakuRefused` for a status from 300 on."""
        answer = await request(
            self._url, method, path, body, ssl=self._ssl, timeout=self._timeout, max_bytes=_MAX_ANSWER_BYTES
        )
        if answer.status >= 300:
            reason = answer.body[:200].decode("utf-8", "replace")
            raise WakuRefused(path.partition("?")[0], answer.status, reason)
        return answer

    def _readable(self, read: Callable[[bytes, str | None, tuple[int, int]], T], answer: HttpReply) -> T:
        try:
            return read(answer.body, self._pubsub_topic, self._sharding)
        except ValueError as error:
            raise WakuUnreachable(f"the answer cannot be read: {error}") from error


def _is_forgotten(error: StrataError) -> bool:
    """Whether a node reports that it is not subscribed to the requested topic."""
    return isinstance(error, WakuRefused) and (error.status == 404 or "ot subscribed" in error.reason)


def _failure(request_id: str, message_hash: bytes, error: Exception) -> NodeMessageError:
    """Return the event for a message that failed with this error (C-292).

    A node answers 400 to messages that it can never accept, and also to messages that come too soon for its
    rate limit or its subscriptions.
    """
    code, recoverable, wait = type(error).__name__, True, None
    if isinstance(error, WakuRefused):
        code = str(error.status)
        said = error.reason.lower()
        limited = error.status == 429 or "rate limit" in said or "limit exceeded" in said or "spam" in said
        if limited:
            wait = _BUSY_MS
        elif 400 <= error.status < 500 and error.status not in (404, 408):
            recoverable = _is_forgotten(error) or "peer" in error.reason
    return NodeMessageError(request_id, message_hash, str(error), code, recoverable, wait)
