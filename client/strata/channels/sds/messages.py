"""The wire messages of SDS: protobuf with the field numbers of the document (C-096, A-134).

The descriptors are built here, so that no protobuf compiler is needed. Unknown fields are skipped.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
import functools
from typing import Any

import msgspec
from Crypto.Hash import keccak
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from strata.channels.sds.config import MAX_ID_BYTES
from strata.protocol.errors import StrataError

__all__ = [
    "NO_CHANNEL",
    "HistoryEntry",
    "InvalidSdsMessage",
    "Kind",
    "SdsFault",
    "SdsMessage",
    "check_id",
    "is_usable_id",
    "message_id",
    "person_of",
]

NO_CHANNEL = "0"
"""The `channel_id` of messages outside any channel (C-099)."""
_MAX_LAMPORT = 2**64 - 1
_MAX_REMEMBERED, _MAX_REMEMBERED_BYTES = 256, 4_096
"""A message arrives from several relays and again from the store: the last small ones are decoded once."""


class SdsFault(enum.StrEnum):
    """Why bytes were refused as a message."""

    UNDECODABLE = "undecodable"
    """They are not a protobuf of this form."""
    TOO_MANY_ENTRIES = "too_many_entries"
    """The history, or the repair request, names more messages than the reader accepts (C-302)."""


class InvalidSdsMessage(StrataError, ValueError):
    """Bytes that are not an SDS message; `fault` says why. The error never quotes the bytes."""

    def __init__(self, fault: SdsFault) -> None:
        super().__init__(fault)
        self.fault = fault

    def __str__(self) -> str:
        return f"not a valid SDS message: {self.fault.value.replace('_', ' ')}"


class Kind(enum.Enum):
    """The kind of a message, as its fields show it."""

    CONTENT = "content"
    SYNC = "sync"
    EPHEMERAL = "ephemeral"


class HistoryEntry(msgspec.Struct, frozen=True):
    """A message that another message names, in its causal history or in its repair request."""

    message_id: str
    retrieval_hint: bytes | None = None
    """The hint by which a store finds the message; on relays the 32 bytes of a packet id (A-129)."""
    sender_id: str | None = None


class SdsMessage(msgspec.Struct, frozen=True):
    """One message as it travels. An optional field that is None is not on the wire."""

    sender_id: str
    message_id: str
    channel_id: str
    lamport_timestamp: int | None = None
    causal_history: tuple[HistoryEntry, ...] = ()
    bloom_filter: bytes | None = None
    repair_request: tuple[HistoryEntry, ...] = ()
    content: bytes | None = None
    receipts: bytes | None = None
    """Receipts of messages that the sender has received; an additional field (see `sds.receipts`)."""

    @property
    def kind(self) -> Kind | None:
        """The kind of this message; None for a message of no kind, which receivers drop."""
        if self.lamport_timestamp is not None:
            return Kind.CONTENT if self.content else Kind.SYNC
        return Kind.EPHEMERAL if self.content else None

    @property
    def history_ids(self) -> list[str]:
        """The ids of the messages in the causal history."""
        return [entry.message_id for entry in self.causal_history]

    @property
    def has_usable_ids(self) -> bool:
        """Whether no id in this message is empty or too long. A sync message needs no message id."""
        if self.kind is not Kind.SYNC and not self.message_id:
            return False
        texts = [self.sender_id, self.channel_id, *self.history_ids]
        texts += [entry.message_id for entry in self.repair_request]
        return all(map(is_usable_id, texts)) and (not self.message_id or is_usable_id(self.message_id))

    def encode(self) -> bytes:
        """The message as bytes; equal messages give equal bytes. Raises `ValueError` for invalid fields."""
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
            receipts=self.receipts,
        )
        data: bytes = wire.SerializeToString(deterministic=True)
        return data

    @classmethod
    def decode(cls, data: bytes, *, max_entries: int = 1_000) -> SdsMessage | None:
        """Read received bytes; None if they are not a message, or name more than `max_entries` (C-302)."""
        return _decode_small(data, max_entries)[0] if _is_small(data) else _decode(data, max_entries)

    @classmethod
    def decode_usable(cls, data: bytes, *, max_entries: int = 1_000) -> SdsMessage | None:
        """Read received bytes as `decode` does; None also for a message of no kind or with unusable ids."""
        if _is_small(data):
            message, usable = _decode_small(data, max_entries)
            return message if usable else None
        message = _decode(data, max_entries)
        return message if _is_usable(message) else None

    @classmethod
    def parse(cls, data: bytes, *, max_entries: int = 1_000) -> SdsMessage:
        """Read received bytes as `decode` does. Raises `InvalidSdsMessage` where `decode` returns None."""
        message = cls.decode(data, max_entries=max_entries)
        if message is None:
            raise InvalidSdsMessage(_fault(data))
        return message

    @classmethod
    def read(cls, data: bytes) -> SdsMessage:
        """Read a message that was accepted before. Raises `ValueError` for other bytes."""
        try:
            return cls._of(_parsed(data))
        except DecodeError as error:
            raise ValueError("not an SDS message") from error

    @classmethod
    def _of(cls, wire: Any) -> SdsMessage:
        return cls(
            wire.sender_id,
            wire.message_id,
            wire.channel_id,
            wire.lamport_timestamp if wire.HasField("lamport_timestamp") else None,
            tuple([_entry(entry) for entry in wire.causal_history]),
            wire.bloom_filter if wire.HasField("bloom_filter") else None,
            tuple([_entry(entry) for entry in wire.repair_request]),
            wire.content if wire.HasField("content") else None,
            wire.receipts if wire.HasField("receipts") else None,
        )


def _decode(data: bytes, max_entries: int) -> SdsMessage | None:
    try:
        wire = _parsed(data)
    except DecodeError:
        return None
    if len(wire.causal_history) > max_entries or len(wire.repair_request) > max_entries:
        return None
    return SdsMessage._of(wire)


def _fault(data: bytes) -> SdsFault:
    try:
        _parsed(data)
    except DecodeError:
        return SdsFault.UNDECODABLE
    return SdsFault.TOO_MANY_ENTRIES


@functools.lru_cache(_MAX_REMEMBERED)
def _decode_small(data: bytes, max_entries: int) -> tuple[SdsMessage | None, bool]:
    message = _decode(data, max_entries)
    return message, _is_usable(message)


def _is_small(data: bytes) -> bool:
    return len(data) <= _MAX_REMEMBERED_BYTES and isinstance(data, bytes)


def _is_usable(message: SdsMessage | None) -> bool:
    return message is not None and message.kind is not None and message.has_usable_ids


def _parsed(data: bytes) -> Any:
    wire = _Message()
    wire.ParseFromString(data)
    return wire


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


def message_id(sender_id: str, now_ns: int, content: bytes) -> str:
    """Hex Keccak-256 of sender, wrapping time and content: each wrapping has its own id (C-098, A-109)."""
    digest = keccak.new(digest_bits=256)
    digest.update(f"{sender_id}{now_ns}".encode() + content)
    return digest.hexdigest()


def person_of(sender_id: str) -> str:
    """The person whose device a sender is: the DID of `did:…#device`; any other sender is its own person."""
    return sender_id.partition("#")[0] if sender_id.startswith("did:") else sender_id


def is_usable_id(text: str) -> bool:
    """Whether an id is neither empty nor too long to keep (C-302)."""
    # No character takes more than four bytes.
    length = len(text)
    return 0 < length <= MAX_ID_BYTES // 4 or 0 < len(text.encode()) <= MAX_ID_BYTES


def check_id(name: str, text: str) -> str:
    """Return one of our ids. Raises `ValueError` if it is empty, too long, or not Unicode text (C-002)."""
    if not 0 < len(text.encode()) <= MAX_ID_BYTES:
        raise ValueError(f"{name} must have 1 to {MAX_ID_BYTES} bytes")
    return text


_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "strata.sds"


def _add(message: descriptor_pb2.DescriptorProto, name: str, number: int, type_: Any, kind: str = "") -> None:
    field = message.field.add(name=name, number=number, type=type_, label=_Field.LABEL_OPTIONAL)
    if kind == "repeated":
        field.label = _Field.LABEL_REPEATED
        field.type_name = f".{_PACKAGE}.HistoryEntry"
    elif kind == "optional":
        # Presence in proto3 is a oneof with one member; the compiler writes it the same way.
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
    _add(message, "receipts", 1001, _Field.TYPE_BYTES, "optional")  # our addition: others skip it
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Message")),
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.HistoryEntry")),
    )


_Message, _HistoryEntry = _classes()
