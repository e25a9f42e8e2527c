"""Who acknowledged a message, and when: causal histories, followed as receivers follow them.

A history names about two messages, and a participant delivers a message only when it has all messages that
the message follows. So a packet acknowledges, for its sender, each message in its history and every message
that these follow (history and descendants in SDS). Bloom filters are not read, because their parameters are
not sent: a message that was acknowledged only by filters counts as unacknowledged.

One task follows the ids of one channel. Each participant visits each message once; if that would be too much
work, only two distinct participants do. Then the first acknowledgement is still known, but the list of all
participants who acknowledged is not.

A channel of ten million messages must fit into the memory of a task. So ids arrive as hashes of 64 bits, with
a salt that nobody can know beforehand, some thousand rows at a time, and all that is kept of a message is a
few numbers in arrays.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType
from strata.channels.sds import Kind

from strata_pipeline.datasets.channels import ChannelMessages, ChannelPackets
from strata_pipeline.schemas import schema

__all__ = ["PacketRow", "acknowledge", "follow", "follow_rows"]

_MAX_VISITS = 20_000_000
_MAX_PARTICIPANTS = 128
_SOMEBODY = 2
_GIVEN_ROWS = 10_000
_CODES = "qqiqiq"
"""Type codes of the input: sequence, received_at, sender, content, length of the history, names in it."""

_FIELDS = StructType(
    [schema("channel_messages")[name] for name in ("first_sequence", "acknowledged_at", "acknowledged_by")]
)
_RESULT = to_arrow_schema(_FIELDS)


class PacketRow(NamedTuple):
    """The columns of a packet that are used here."""

    sequence: int
    received_at: int
    sender_id: str
    content_id: str | None
    """The id of its message if it is a content message: no other kind can be acknowledged."""
    history: Sequence[str]


@dataclass(slots=True)
class Message:
    """A message of a channel."""

    message_id: str
    sender_id: str
    acknowledged_at: int | None
    visitors: list[str] = field(default_factory=list)
    """The senders of packets that name it or a message that follows it, in order."""

    def others(self) -> list[str]:
        """The visitors other than its sender: those who acknowledged it."""
        return [who for who in self.visitors if who != self.sender_id]


def acknowledge(packets: ChannelPackets) -> ChannelMessages:
    """The content messages in these packets, each with its first acknowledgement and all who gave one."""
    salt = secrets.randbits(62)
    is_content = F.col("kind") == Kind.CONTENT.value
    readable = packets.frame.where(F.col("kind").isNotNull()).select(
        "content_topic", "channel_id", "sequence", "received_at", "sender_id",
        F.when(is_content, F.xxhash64(F.lit(salt), "message_id")).alias("content"),
        F.transform("history", lambda one: F.xxhash64(F.lit(salt), one)).alias("history"),
    )  # fmt: skip
    followed = readable.groupBy("content_topic", "channel_id").applyInArrow(follow_rows, _FIELDS)
    firsts = packets.frame.where(is_content).select(
        "day", "content_topic", "channel_id", "message_id", "sender_id",
        F.col("sequence").alias("first_sequence"), F.col("received_at").alias("first_at"),
    )  # fmt: skip
    return ChannelMessages(followed.join(firsts, on="first_sequence", how="inner"))


def follow_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The work of one task: turn the packets of one channel, in any order, into its messages."""
    rows, senders = _columns(batches)
    channel = _Channel(rows, len(senders))
    channel.follow()
    given: list[dict[str, object]] = []
    for message in channel.messages():
        by = [senders[who] for who in channel.others(message)] if channel.everybody else None
        given.append(
            {
                "first_sequence": rows.sequences[channel.rows[message]],
                "acknowledged_at": channel.acknowledged(message),
                "acknowledged_by": by,
            }
        )
        if len(given) == _GIVEN_ROWS:
            yield pa.RecordBatch.from_pylist(given, schema=_RESULT)
            given = []
    if given:
        yield pa.RecordBatch.from_pylist(given, schema=_RESULT)


def follow(rows: Sequence[PacketRow]) -> tuple[list[Message], bool]:
    """The messages in one channel's packets, given in log order, and whether all visitors are known."""
    names = list(dict.fromkeys(name for row in rows for name in (row.content_id, *row.history) if name))
    senders = list(dict.fromkeys(row.sender_id for row in rows))
    codes = {name: code for code, name in enumerate(names)}
    columns = _Columns(
        _array([row.sequence for row in rows]),
        _array([row.received_at for row in rows]),
        _array([senders.index(row.sender_id) for row in rows]),
        _array([-1 if row.content_id is None else codes[row.content_id] for row in rows]),
        _array(np.cumsum([0, *(len(row.history) for row in rows)])),
        _array([codes[name] for row in rows for name in row.history]),
        len(names),
    )
    channel = _Channel(columns, len(senders))
    channel.follow()
    found = [
        Message(
            names[message],
            senders[channel.sender(message)],
            channel.acknowledged(message),
            [senders[who] for who in channel.visitors(message)],
        )
        for message in channel.messages()
    ]
    return found, channel.everybody


class _Columns(NamedTuple):
    """The packets of a channel in log order, as numbers."""

    sequences: array[int]
    received: array[int]
    senders: array[int]
    contents: array[int]
    """The number of the message in each packet, -1 for none."""
    starts: array[int]
    """Where the history of each packet begins in `history`, and the end of the last."""
    history: array[int]
    """Numbers of messages."""
    messages: int
    """How many message numbers there are, including those of messages that are only named."""


def _columns(batches: Iterator[pa.RecordBatch]) -> tuple[_Columns, list[str]]:
    senders: dict[str, int] = {}
    # Each grows in one place: thousands of small pieces would fragment the memory.
    parts = [array(code) for code in _CODES]
    there = bytearray()
    for batch in batches:
        column = batch.column("sender_id").dictionary_encode()
        known = [senders.setdefault(name, len(senders)) for name in column.dictionary.to_pylist()]
        lists = batch.column("history")
        arrays = (
            _numbers(batch.column("sequence")),
            _numbers(batch.column("received_at")),
            np.array(known, np.int64)[column.indices.to_numpy()],
            _numbers(batch.column("content").fill_null(0)),
            _numbers(lists.value_lengths().fill_null(0)),
            _numbers(lists.flatten()),
        )
        for part, numbers in zip(parts, arrays, strict=True):
            part.frombytes(np.asarray(numbers, np.dtype(part.typecode)).tobytes())
        there += batch.column("content").is_valid().to_numpy(zero_copy_only=False).tobytes()
    sequences, received, who, contents, lengths, history = map(np.asarray, parts)
    parts.clear()
    is_there = np.frombuffer(there, np.bool_)
    names = _distinct(np.concatenate([contents[is_there], history]))
    contents = np.where(is_there, np.searchsorted(names, contents).astype(np.int32), np.int32(-1))
    history = np.searchsorted(names, history).astype(np.int32)
    order = np.argsort(sequences, kind="stable")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    after = np.concatenate([[0], np.cumsum(lengths[order])])
    # The index in the input of each name in the sorted histories.
    moved = np.arange(len(history)) + np.repeat(starts[:-1][order] - after[:-1], lengths[order])
    columns = _Columns(
        _array(sequences[order]),
        _array(received[order]),
        _array(who[order], "i"),
        _array(contents[order], "i"),
        _array(after),
        _array(history[moved], "i"),
        len(names),
    )
    return columns, list(senders)


def _distinct(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each of these numbers once, in order. They are sorted in place: a copy would be the largest object of
    the task."""
    numbers.sort()
    is_new = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=is_new[1:])
    return numbers[is_new]


def _numbers(column: pa.Array) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = column.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _array(numbers: Sequence[int] | NDArray[np.int64] | NDArray[np.int32], code: str = "q") -> array[int]:
    """An array whose items are plain Python integers, made one by one when they are read."""
    return array(code, np.asarray(numbers, np.dtype(code)).tobytes())


class _Channel:
    """The messages of a channel by number, and the visitors of each, in the order of visits."""

    def __init__(self, columns: _Columns, senders: int) -> None:
        few = senders <= _MAX_PARTICIPANTS and senders * len(columns.history) <= _MAX_VISITS
        self.everybody = few or senders <= _SOMEBODY
        self._most = senders if self.everybody else _SOMEBODY
        self._columns = columns
        ids = columns.messages
        self.rows = array("q", [-1]) * ids
        """The row of the first packet of each message, -1 for a message that is only named so far."""
        self._acknowledged = array("q", [-1]) * ids
        self._visits = bytearray(ids)
        self._first, self._last = array("i", [-1]) * ids, array("i", [-1]) * ids
        self._who, self._next = array("i"), array("i")
        masks = ids if self._most > _SOMEBODY else 0
        self._low, self._high = array("Q", [0]) * masks, array("Q", [0]) * masks

    def follow(self) -> None:
        """Process all packets."""
        contents, senders, received = self._columns.contents, self._columns.senders, self._columns.received
        for row in range(len(contents)):
            message = contents[row]
            if message >= 0 and self.rows[message] < 0:  # else it was sent again
                self.rows[message] = row
                # A participant who named it earlier had it from elsewhere, so it is acknowledged on arrival.
                for who in self.visitors(message):
                    self._mark(message, who, received[row])
                    self._visit(who, row, received[row])
            self._visit(senders[row], row, received[row])

    def messages(self) -> Iterator[int]:
        """The messages that a packet carries, in log order."""
        for row, message in enumerate(self._columns.contents):
            if message >= 0 and self.rows[message] == row:
                yield message

    def sender(self, message: int) -> int:
        """The number of the sender of a message."""
        return self._columns.senders[self.rows[message]]

    def acknowledged(self, message: int) -> int | None:
        """When somebody other than its sender first had it; None for never."""
        at = self._acknowledged[message]
        return None if at < 0 else at

    def visitors(self, message: int) -> Iterator[int]:
        """The visitors of a message, in order."""
        entry = self._first[message]
        while entry >= 0:
            yield self._who[entry]
            entry = self._next[entry]

    def others(self, message: int) -> list[int]:
        """The visitors of a message other than its sender."""
        sender = self.sender(message)
        return [who for who in self.visitors(message) if who != sender]

    def _visit(self, who: int, row: int, at: int) -> None:
        history, starts = self._columns.history, self._columns.starts
        waiting = list(history[starts[row] : starts[row + 1]])
        while waiting:
            message = waiting.pop()
            # With two distinct visitors, every message that it follows has two too: one is not its sender.
            if self._visits[message] >= self._most or self._has_visited(message, who):
                continue
            self._add(message, who)
            self._mark(message, who, at)
            first = self.rows[message]
            if first >= 0:
                waiting.extend(history[starts[first] : starts[first + 1]])

    def _has_visited(self, message: int, who: int) -> bool:
        if not self._low:
            return who in self.visitors(message)
        mask = self._low if who < 64 else self._high
        return bool(mask[message] >> (who & 63) & 1)

    def _add(self, message: int, who: int) -> None:
        entry, last = len(self._who), self._last[message]
        self._who.append(who)
        self._next.append(-1)
        if last < 0:
            self._first[message] = entry
        else:
            self._next[last] = entry
        self._last[message] = entry
        self._visits[message] += 1
        if self._low:
            mask = self._low if who < 64 else self._high
            mask[message] |= 1 << (who & 63)

    def _mark(self, message: int, who: int, at: int) -> None:
        row = self.rows[message]
        if row >= 0 and self._columns.senders[row] != who and self._acknowledged[message] < 0:
            self._acknowledged[message] = max(at, self._columns.received[row])
