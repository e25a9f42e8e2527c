"""The participants who acknowledged a message, and the time: causal histories, followed as receivers do.

A history names about two messages, and a participant delivers a message only when it has all messages that
the message follows. So a packet acknowledges, for its sender, each message in its history and every message
that these follow (history and descendants in SDS). Filters are not read, because their parameters do not
travel: a message that was acknowledged by filters alone counts as unacknowledged.

One task follows the ids of one channel. Each participant visits each message once; where that would be too
much work, only two distinct participants do. Then the first acknowledgement is known as before, and only the
list of all who acknowledged is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from strata.channels.sds import Kind

from strata_pipeline.datasets.channels import ChannelMessages, ChannelPackets
from strata_pipeline.schemas import schema

__all__ = ["PacketRow", "acknowledge", "follow"]

_MAX_VISITS = 20_000_000
_MAX_PARTICIPANTS = 128
_DAY_BITS = 32
_SOMEBODY = 2

_ARROW = to_arrow_schema(schema("channel_messages"))


class PacketRow(NamedTuple):
    """The columns of a packet that are followed."""

    sequence: int
    received_at: int
    sender_id: str
    content_id: str | None
    """The id of its message if it has content: no other message can be acknowledged."""
    history: Sequence[str]


@dataclass(slots=True)
class Message:
    """A message of a channel, or one that is only named so far."""

    message_id: str
    sender_id: str | None = None
    first_sequence: int = 0
    first_at: int = 0
    history: Sequence[str] = ()
    visitors: list[str] = field(default_factory=list)
    """The senders of packets that name it or a message that follows it, in order."""
    acknowledged_at: int | None = None

    def others(self) -> list[str]:
        """The visitors without its sender: those who acknowledged it."""
        return [who for who in self.visitors if who != self.sender_id]


def acknowledge(packets: ChannelPackets) -> ChannelMessages:
    """The content messages in these packets, each with its first acknowledgement and those who gave one."""
    readable = packets.frame.where(F.col("kind").isNotNull()).select(
        "content_topic", "channel_id", "sequence", "received_at", "sender_id",
        F.when(F.col("kind") == Kind.CONTENT.value, F.col("message_id")).alias("content_id"), "history",
    )  # fmt: skip
    by_channel = readable.groupBy("content_topic", "channel_id")
    return ChannelMessages(by_channel.applyInArrow(_follow, schema("channel_messages")))


def _follow(key: tuple[pa.Scalar, ...], table: pa.Table) -> pa.Table:
    table = table.sort_by("sequence")
    columns = [table.column(name).to_pylist() for name in PacketRow._fields]
    messages, everybody = follow([PacketRow(*row) for row in zip(*columns, strict=True)])
    topic, channel = (scalar.as_py() for scalar in key)
    rows = [
        {
            "day": message.first_sequence >> _DAY_BITS,
            "content_topic": topic,
            "channel_id": channel,
            "message_id": message.message_id,
            "sender_id": message.sender_id,
            "first_sequence": message.first_sequence,
            "first_at": message.first_at,
            "acknowledged_at": message.acknowledged_at,
            "acknowledged_by": message.others() if everybody else None,
        }
        for message in messages
    ]
    return pa.Table.from_pylist(rows, schema=_ARROW)


def follow(rows: Sequence[PacketRow]) -> tuple[list[Message], bool]:
    """The messages of one channel's packets, which come in log order, and whether all visitors are known."""
    senders = {row.sender_id for row in rows}
    edges = sum(len(row.history) for row in rows)
    few = len(senders) <= _MAX_PARTICIPANTS and len(senders) * edges <= _MAX_VISITS
    everybody = few or len(senders) <= _SOMEBODY
    channel = _Channel(len(senders) if everybody else _SOMEBODY)
    for row in rows:
        channel.take(row)
    return [message for message in channel.messages.values() if message.sender_id is not None], everybody


class _Channel:
    def __init__(self, most_visitors: int) -> None:
        self._most = most_visitors
        self.messages: dict[str, Message] = {}

    def take(self, row: PacketRow) -> None:
        if row.content_id is not None:
            self._arrive(row.content_id, row)
        self._visit(row.sender_id, row.history, row.received_at)

    def _arrive(self, message_id: str, row: PacketRow) -> None:
        message = self._named(message_id)
        if message.sender_id is not None:
            return  # sent again
        message.sender_id = row.sender_id
        message.first_sequence, message.first_at = row.sequence, row.received_at
        message.history = row.history
        # A participant who named it earlier had it from elsewhere: that acknowledges it on arrival.
        for who in message.visitors:
            self._mark(message, who, row.received_at)
            self._visit(who, message.history, row.received_at)

    def _visit(self, who: str, ids: Iterable[str], at: int) -> None:
        waiting = list(ids)
        while waiting:
            message = self._named(waiting.pop())
            # With two distinct visitors all that it follows has the same two: one is not its sender.
            if who in message.visitors or len(message.visitors) >= self._most:
                continue
            message.visitors.append(who)
            self._mark(message, who, at)
            waiting.extend(message.history)

    def _named(self, message_id: str) -> Message:
        message = self.messages.get(message_id)
        if message is None:
            message = self.messages[message_id] = Message(message_id)
        return message

    @staticmethod
    def _mark(message: Message, who: str, at: int) -> None:
        if message.sender_id not in (None, who) and message.acknowledged_at is None:
            message.acknowledged_at = max(at, message.first_at)
