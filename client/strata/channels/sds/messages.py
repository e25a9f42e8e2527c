"""The wire messages of SDS: protobuf with the field numbers of the document (C-096, A-134).

The descriptors are built here, so that nobody needs a protobuf compiler. Unknown fields are skipped.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from typing import Any

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

__all__ = ["NO_CHANNEL", "HistoryEntry", "Kind", "SdsMessage"]

NO_CHANNEL = "0"
"""`channel_id` of messages outside any channel (C-099)."""
_MAX_LAMPORT = 2**64 - 1


class Kind(enum.Enum):
    """What a message is, told by which fields it has."""

    CONTENT = "content"
    SYNC = "sync"
    EPHEMERAL = "ephemeral"


class HistoryEntry(msgspec.Struct, frozen=True):
    """A message named by another: in its causal history, or in a request for repair."""

    message_id: str
    retrieval_hint: bytes | None = None
    """What finds the message in a store; on relays the 32 bytes of a packet id (A-129)."""
    sender_id: str | None = None


class SdsMessage(msgspec.Struct, frozen=True):
    """One message as it travels. None in an optional field means that it is not on the wire."""

    sender_id: str
    message_id: str
    channel_id: str
    lamport_timestamp: int | None = None
    causal_history: tuple[HistoryEntry, ...] = ()
    bloom_filter: bytes | None = None
    repair_request: tuple[HistoryEntry, ...] = ()
    content: bytes | None = None

    @property
    def kind(self) -> Kind | None:
        """The kind of message this is; None if it is neither, which receivers drop."""
        if self.lamport_timestamp is not None:
            return Kind.CONTENT if self.content else Kind.SYNC
        return Kind.EPHEMERAL if self.content else None

    def encode(self) -> bytes:
        """The message as bytes; equal messages give equal bytes. Raises `ValueError`."""
        if self.lamport_timestamp is not None and not 0 <= self.lamport_timestamp <= _MAX_LAMPORT:
            raise ValueError("lamport_timestamp is not an unsigned 64-bit integer")
        wire = _Message(
            sender_id=self.sender_id,
            message_id=self.message_id,
            channel_id=self.channel_id,
            lamport_timestamp=self.lamport_timestamp,
            causal_history=[_entry_fields(entry) for entry in self.causal_history],
            bloom_filter=self.bloom_filter,
            repair_request=[_entry_fields(entry) for entry in self.repair_request],
            content=self.content,
        )
        data: bytes = wire.SerializeToString(deterministic=True)
        return data

    @classmethod
    def decode(cls, data: bytes, *, max_entries: int = 1_000) -> SdsMessage | None:
        """Read a message; None if it cannot be one, or names more than `max_entries` messages (C-302)."""
        wire = _Message()
        try:
            wire.ParseFromString(data)
        except DecodeError:
            return None
        if len(wire.causal_history) > max_entries or len(wire.repair_request) > max_entries:
            return None
        return cls(
            wire.sender_id,
            wire.message_id,
            wire.channel_id,
            wire.lamport_timestamp if wire.HasField("lamport_timestamp") else None,
            tuple([_entry(entry) for entry in wire.causal_history]),
            wire.bloom_filter if wire.HasField("bloom_filter") else None,
            tuple([_entry(entry) for entry in wire.repair_request]),
            wire.content if wire.HasField("content") else None,
        )


def _entry_fields(entry: HistoryEntry) -> Any:
    return _HistoryEntry(
        message_id=entry.message_id, retrieval_hint=entry.retrieval_hint, sender_id=entry.sender_id
    )


def _entry(wire: Any) -> HistoryEntry:
    return HistoryEntry(
        wire.message_id,
        wire.retrieval_hint if wire.HasField("retrieval_hint") else None,
        wire.sender_id if wire.HasField("sender_id") else None,
    )


_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "strata.sds"


def _add(message: descriptor_pb2.DescriptorProto, name: str, number: int, type_: Any, kind: str = "") -> None:
    field = message.field.add(name=name, number=number, type=type_, label=_Field.LABEL_OPTIONAL)
    if kind == "repeated":
        field.label = _Field.LABEL_REPEATED
        field.type_name = f".{_PACKAGE}.HistoryEntry"
    elif kind == "optional":
        # Presence in proto3 is a oneof of one, which is how the compiler writes it too.
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _classes() -> tuple[Any, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="strata/sds.proto", package=_PACKAGE, syntax="proto3")
    entry = file.message_type.add(name="HistoryEntry")
    _add(entry, "message_id", 1, _Field.TYPE_STRING)
    _add(entry, "retrieval_hint", 2, _Field.TYPE_BYTES, "optional")
    _add(entry, "sender_id", 3, _Field.TYPE_STRING, "optional")
    message = file.message_type.add(name="Message")
    _add(message, "sender_id", 1, _Field.TYPE_STRING)
    _add(message, "message_id", 2, _Field.TYPE_STRING)
    _add(message, "channel_id", 3, _Field.TYPE_STRING)
    _add(message, "lamport_timestamp", 10, _Field.TYPE_UINT64, "optional")
    _add(message, "causal_history", 11, _Field.TYPE_MESSAGE, "repeated")
    _add(message, "bloom_filter", 12, _Field.TYPE_BYTES, "optional")
    _add(message, "repair_request", 13, _Field.TYPE_MESSAGE, "repeated")
    _add(message, "content", 20, _Field.TYPE_BYTES, "optional")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Message")),
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.HistoryEntry")),
    )


_Message, _HistoryEntry = _classes()
