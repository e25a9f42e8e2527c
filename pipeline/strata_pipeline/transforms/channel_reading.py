"""The SDS message in each packet of a channel, read with the client's own code.

A packet without a readable message is kept, with its author, size and time. Encrypted messages, messages in
another encoding and garbage cannot be distinguished here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from strata.channels.messaging.binding import read_packet
from strata.channels.sds import Kind, SdsMessage
from strata.channels.sds.messages import is_usable_id
from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet

from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.channels import ChannelPackets
from strata_pipeline.lake.kinds import CHANNEL, kind_of
from strata_pipeline.schemas import schema

__all__ = ["read_channels"]

_READ = ("sequence", "received_at", "author_id", "content_type", "size", "body")
_FOUND = ("kind", "has_payload", "channel_id", "sender_id", "message_id", "history")
_ARROW = to_arrow_schema(schema("channel_packets"))
_DAY_BITS = 32
_Found = tuple[str | None, bool, str | None, str | None, str | None, list[str] | None]
_NO_PAYLOAD: _Found = (None, False, None, None, None, None)
_NO_MESSAGE: _Found = (None, True, None, None, None, None)


def read_channels(packets: Packets) -> ChannelPackets:
    """The packets whose type is a content topic, each with its message."""
    return ChannelPackets(packets.frame.select(*_READ).mapInArrow(_read, schema("channel_packets")))


def _read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for whole in batches:
        ours = [kind_of(topic) == CHANNEL for topic in whole.column("content_type").to_pylist()]
        batch = whole.filter(pa.array(ours, pa.bool_()))
        sequence, topics = batch.column("sequence"), batch.column("content_type")
        columns = {name: batch.column(name) for name in ("received_at", "author_id", "size")}
        # The day in the sequence, which is also its folder in the lake.
        day = pc.shift_right(sequence, _DAY_BITS).cast(pa.int32()).cast(pa.date32())
        columns |= {"sequence": sequence, "day": day, "content_topic": topics}
        found = list(map(message_of, batch.column("body").to_pylist(), topics.to_pylist()))
        for place, name in enumerate(_FOUND):
            columns[name] = pa.array([row[place] for row in found], _ARROW.field(name).type)
        yield pa.RecordBatch.from_pydict({name: columns[name] for name in _ARROW.names}, schema=_ARROW)


def message_of(body: bytes, topic: str) -> _Found:
    """The kind of the message in a packet, whether it has a payload, its channel, sender, id and history."""
    try:
        packet = Packet.read(body)
        received = read_packet(packet, topic)
    except InvalidPacket:
        return _NO_PAYLOAD
    if received is None:
        return _NO_PAYLOAD
    message = SdsMessage.decode(received.message.payload)
    if message is None or message.kind is None or not _is_usable(message):
        return _NO_MESSAGE
    return (
        message.kind.value,
        True,
        message.channel_id,
        message.sender_id,
        message.message_id or None,
        [entry.message_id for entry in message.causal_history],
    )


def _is_usable(message: SdsMessage) -> bool:
    """Whether a participant would accept a message: it has every needed id, and none is too long (C-302)."""
    ids = [message.channel_id, message.sender_id, *(entry.message_id for entry in message.causal_history)]
    if message.message_id or message.kind is not Kind.SYNC:
        ids.append(message.message_id)
    return all(map(is_usable_id, ids))
