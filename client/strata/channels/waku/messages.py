"""Waku messages as the REST interface of nwaku writes them, their hashes, and their shards.

The hash is defined in 14/WAKU2-MESSAGE, the shard in 51/WAKU2-RELAY-SHARDING. Hashes are hex in the current
interface and were base64 in older versions; both are read.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from strata.channels.messaging.node import InvalidContentTopic
from strata.channels.messaging.values import MessageEnvelope, NodeMessageReceived, ReceivedEnvelope

__all__ = [
    "Page",
    "encode_message",
    "encode_push",
    "read_health",
    "read_messages",
    "read_page",
    "shard_of",
    "waku_message_hash",
]

T = TypeVar("T")

_NS = 1_000_000_000
_HASH_BYTES = 32


class _Message(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    payload: str
    content_topic: str = ""
    version: int | None = None
    timestamp: int | None = None
    ephemeral: bool = False
    meta: str | None = None


class _Push(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    message: _Message
    pubsub_topic: str | None = None


class _Stored(msgspec.Struct, frozen=True, rename="camel"):
    message_hash: str
    message: _Message | None = None
    pubsub_topic: str | None = None


class _StoreAnswer(msgspec.Struct, frozen=True, rename="camel"):
    messages: list[_Stored]
    status_code: int = 200
    status_desc: str = ""
    pagination_cursor: str | None = None


class _Health(msgspec.Struct, frozen=True, rename="camel"):
    node_health: str


_MESSAGES = msgspec.json.Decoder(list[_Message])
_STORE_ANSWER = msgspec.json.Decoder(_StoreAnswer)
_HEALTH = msgspec.json.Decoder(_Health)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a store's answer, newest first."""

    messages: Sequence[NodeMessageReceived]
    cursor: str | None
    """Where the next page begins, as the node wrote it; None at the end."""
    refusal: str | None
    """The error that the store reported instead of a page, if any."""


def shard_of(content_topic: str, cluster_id: int, shards: int) -> str:
    """The pubsub topic of a content topic under automatic sharding.

    Raises `InvalidContentTopic` unless the topic is `/application/version/name/encoding`, with or without
    `/0` before it.
    """
    parts = content_topic.split("/")
    if len(parts) == 6 and parts[1] == "0":
        del parts[1]
    if len(parts) != 5 or parts[0] or not all(parts[1:]):
        raise InvalidContentTopic(content_topic)
    digest = hashlib.sha256((parts[1] + parts[2]).encode()).digest()
    return f"/waku/2/rs/{cluster_id}/{int.from_bytes(digest[-8:]) % shards}"


def waku_message_hash(
    pubsub_topic: str, payload: bytes, content_topic: str, meta: bytes | None, timestamp_ns: int
) -> bytes:
    """The 32 bytes by which a store finds a message."""
    texts = pubsub_topic.encode() + payload + content_topic.encode() + (meta or b"")
    return hashlib.sha256(texts + (timestamp_ns % 2**64).to_bytes(8)).digest()


def encode_message(envelope: MessageEnvelope, timestamp_ns: int) -> bytes:
    """The body of a relay publish request."""
    return msgspec.json.encode(_written(envelope, timestamp_ns))


def encode_push(envelope: MessageEnvelope, timestamp_ns: int, pubsub_topic: str | None) -> bytes:
    """The body of a light push request."""
    return msgspec.json.encode(_Push(_written(envelope, timestamp_ns), pubsub_topic))


def _written(envelope: MessageEnvelope, timestamp_ns: int) -> _Message:
    meta = None if envelope.meta is None else base64.b64encode(envelope.meta).decode()
    payload = base64.b64encode(envelope.payload).decode()
    return _Message(payload, envelope.content_topic, 0, timestamp_ns, envelope.ephemeral, meta)


def read_messages(
    body: bytes, pubsub_topic: str | None, sharding: tuple[int, int]
) -> list[NodeMessageReceived]:
    """Read the messages that a node held for a topic, without those that cannot be read.

    Under automatic sharding `pubsub_topic` is None, and `sharding` has the cluster and the number of shards.
    Raises `ValueError` if the body is not a list of messages.
    """
    found: list[NodeMessageReceived] = []
    for each in _decoded(_MESSAGES, body):
        event = _event(each, pubsub_topic, sharding, None)
        if event is not None:
            found.append(event)
    return found


def read_page(body: bytes, pubsub_topic: str | None, sharding: tuple[int, int]) -> Page:
    """Read a page of the store. Raises `ValueError` if the body is not a page."""
    answer = _decoded(_STORE_ANSWER, body)
    if answer.status_code != 200:
        return Page((), None, f"{answer.status_code} {answer.status_desc}".strip()[:200])
    found: list[NodeMessageReceived] = []
    for each in answer.messages:
        message_hash = _hash_of(each.message_hash)
        if each.message is not None and message_hash is not None:
            event = _event(each.message, each.pubsub_topic or pubsub_topic, sharding, message_hash)
            if event is not None:
                found.append(event)
    # Stores return the messages of a page in order of time, whatever the order of the pages.
    found.sort(key=lambda event: event.message.timestamp or 0)
    found.reverse()
    return Page(found, answer.pagination_cursor or None, None)


def read_health(body: bytes) -> str:
    """A node's report of its health, in capitals; "READY" for the text of older versions that means it."""
    try:
        return _HEALTH.decode(body).node_health.upper()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "READY" if b"is healthy" in body else "NOT_READY"


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _event(
    message: _Message, pubsub_topic: str | None, sharding: tuple[int, int], message_hash: bytes | None
) -> NodeMessageReceived | None:
    payload = _bytes_of(message.payload)
    meta = None if message.meta is None else _bytes_of(message.meta)
    if not payload:
        return None
    timestamp_ns = message.timestamp or 0
    if not -(2**63) <= timestamp_ns < 2**63:
        return None
    if message_hash is None:
        try:
            topic = pubsub_topic or shard_of(message.content_topic, *sharding)
        except InvalidContentTopic:
            return None
        message_hash = waku_message_hash(topic, payload, message.content_topic, meta, timestamp_ns)
    received = ReceivedEnvelope(
        content_topic=message.content_topic,
        payload=payload,
        ephemeral=message.ephemeral,
        timestamp=timestamp_ns // _NS,
        meta=meta or None,
    )
    return NodeMessageReceived(message_hash, received)


def _hash_of(text: str) -> bytes | None:
    """The 32 bytes of a hash, given in hex with `0x` or in base64; None for other texts."""
    if len(text) != 2 + 2 * _HASH_BYTES or not text.startswith("0x"):
        found = _bytes_of(text)
    else:
        try:
            found = bytes.fromhex(text[2:])
        except ValueError:
            return None
    return found if found is not None and len(found) == _HASH_BYTES else None


def _bytes_of(text: str) -> bytes | None:
    """Decode base64 of either alphabet, with or without padding; None for other texts.

    One in 4096 of such texts begins with `0x`.
    """
    try:
        standard = text.rstrip("=").replace("-", "+").replace("_", "/")
        return base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except (ValueError, binascii.Error):
        return None
