"""Packets of channels for the pipeline's tests, as rows of a lake."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql import SparkSession
from strata.channels.messaging.binding import PROFILE, build_packet
from strata.channels.messaging.values import MessageEnvelope
from strata.channels.sds import HistoryEntry, SdsMessage
from strata.protocol import packets
from strata.protocol.packets import Packet
from strata.protocol.sequences import first_of_day
from strata_pipeline.datasets import Packets
from strata_pipeline.schemas import schema

from tests.support import relay_logs

DAY = 20_700
"""The day of rows for which no other is given."""
NOON = DAY * 86_400 + 43_200
TOPIC = "/chat/1/room/proto"

_numbers = iter(range(10**9))


def carry(payload: bytes, *, who: int = 0, topic: str = TOPIC, at: int = NOON) -> Packet:
    """A packet around any bytes, a different one at each call."""
    envelope = MessageEnvelope(content_topic=topic, payload=payload)
    return build_packet(relay_logs.author(who), envelope, now=at, nonce=str(next(_numbers)))


def sds(
    sender: str,
    message_id: str,
    history: Iterable[str] = (),
    *,
    channel: str = "room",
    content: bytes | None = b"hello",
) -> bytes:
    """An SDS message: a content message, or a sync message if `content` is None."""
    return SdsMessage(
        sender, message_id, channel, 1, tuple(HistoryEntry(name) for name in history), None, (), content
    ).encode()


def ephemeral(sender: str, message_id: str) -> bytes:
    """An ephemeral message."""
    return SdsMessage(sender, message_id, "room", content=b"typing").encode()


def bare(content: dict[str, Any], *, who: int = 0, at: int = NOON) -> Packet:
    """A packet of a content topic, with any members."""
    return packets.build(
        relay_logs.author(who),
        {"type": TOPIC, "profile": PROFILE} | content,
        timestamp=at,
        nonce=str(next(_numbers)),
    )


def row(packet: Packet, place: int, received_at: int, size: int | None = None) -> tuple[Any, ...]:
    """A packet at a place of its day's log."""
    sequence = first_of_day(received_at // 86_400) + place
    body = packet.canonical
    return (
        sequence, received_at, packet.timestamp, packet.expires_at, packet.digest, packet.author_id,
        packet.content_type, len(body) if size is None else size, body, None,
    )  # fmt: skip


def dataset(spark: SparkSession, received: Iterable[tuple[int, Packet]]) -> Packets:
    """(seconds after `NOON`, packet) in log order, as a lake's packets."""
    rows = [row(packet, place, NOON + at) for place, (at, packet) in enumerate(received, 1)]
    return Packets(spark.createDataFrame(rows, schema("packets")))
