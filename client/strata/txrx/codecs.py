"""Messages as bytes: a body, and parts that travel beside it uncopied (T-002, T-080, T-083, T-084; A-153).

    bytes                               as they are
    msgspec Structs, dataclasses, …     MessagePack; byte fields from 16 KiB on become parts

`codec_for(type)` makes the codec of a type; any object with the same two methods can be used instead.
No codec here can run code chosen by a peer.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import datetime
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from strata.txrx.errors import CodecError
from strata.txrx.multipart import MAX_PARTS

__all__ = ["PART_BYTES", "BytesCodec", "MessageCodec", "MsgpackCodec", "codec_for"]

T = TypeVar("T")

PART_BYTES = 16 * 1024
"""Bytes of this size and more travel beside the body."""
_PART_CODE = 1
"""The extension type that replaces a part in the body; its data is the part's number."""
_BYTES = (bytes, bytearray, memoryview)
_KEPT = (*_BYTES, datetime.datetime)
"""The types that are not converted before MessagePack encodes them: it has its own bytes and times."""


class MessageCodec(Protocol[T]):
    """Turns messages into bytes, and bytes into messages."""

    def encode(self, message: T) -> tuple[bytes, Sequence[bytes]]:
        """Return body and parts. Raises `CodecError` for a value that is not a message of this type."""

    def decode(self, body: bytes, parts: Sequence[bytes]) -> T:
        """Return the message. Raises `CodecError` for bytes that are not a message of this type."""


def codec_for(message_type: type[T] | MessageCodec[T]) -> MessageCodec[T]:
    """The codec for a type, or the given codec. Raises `CodecError` for a type that cannot be sent."""
    if message_type is bytes:
        return typing.cast("MessageCodec[T]", BytesCodec())
    if not isinstance(message_type, type) and hasattr(message_type, "encode"):
        return message_type
    return MsgpackCodec(typing.cast("type[T]", message_type))


class BytesCodec:
    """The codec for plain bytes. A value that could change after it was posted is copied."""

    __slots__ = ()

    def encode(self, message: bytes) -> tuple[bytes, Sequence[bytes]]:
        """Return the bytes as the body, or as a part from 16 KiB on."""
        if type(message) is not bytes:
            if not isinstance(message, _BYTES):
                raise CodecError(f"a Tx of bytes cannot send {_name(type(message))}")
            message = bytes(message)
        return (message, ()) if len(message) < PART_BYTES else (b"", (message,))

    def decode(self, body: bytes, parts: Sequence[bytes]) -> bytes:
        """Return the same bytes."""
        if not parts:
            return body
        if body or len(parts) > 1:
            raise CodecError("a message of bytes has a body or one part")
        return parts[0]


class MsgpackCodec(Generic[T]):
    """The codec for everything that msgspec can encode: MessagePack, checked against the type at both ends.

    A message is checked before it is sent, by decoding it again, so that a message with a wrong field returns
    to its sender and does not end the session at the other end. `validate=False` omits this check.
    """

    __slots__ = ("_byte_fields", "_decode", "_encode", "_type", "_validate")

    def __init__(self, message_type: type[T], *, validate: bool = True) -> None:
        try:
            self._decode: Callable[[bytes], T] = msgspec.msgpack.Decoder(message_type).decode
            self._byte_fields = _byte_fields(message_type)
        except TypeError as error:
            raise CodecError(f"{_name(message_type)} cannot be sent: {error}") from None
        self._type = message_type
        self._validate = validate
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, message: T) -> tuple[bytes, Sequence[bytes]]:
        """Return the MessagePack, and the large byte fields in the order of the fields."""
        try:
            for name in self._byte_fields:
                value = getattr(message, name, None)
                if isinstance(value, _BYTES) and len(value) >= PART_BYTES:
                    return self._with_parts(message)
            body = self._encode(message)
            if len(body) >= PART_BYTES:
                return self._with_parts(message, body)
            if self._validate:
                self._decode(body)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CodecError(f"{_name(type(message))} cannot be sent: {error}") from None
        return body, ()

    def decode(self, body: bytes, parts: Sequence[bytes]) -> T:
        """Return the message, with the parts in their places."""
        try:
            if not parts:
                return self._decode(body)
            tree = msgspec.msgpack.decode(body, ext_hook=functools.partial(_part, parts))
            return msgspec.convert(tree, self._type, builtin_types=_BYTES)
        except Exception as error:  # text that is not UTF-8, keys that do not hash, a `__post_init__`
            raise CodecError(f"no {_name(self._type)}: {error}") from None

    def _with_parts(self, message: T, body: bytes | None = None) -> tuple[bytes, Sequence[bytes]]:
        parts: list[bytes] = []
        small: Any = None
        try:
            tree = msgspec.to_builtins(message, builtin_types=_KEPT)
        except TypeError:  # it contains `Raw` or `Ext`, which only MessagePack has
            body = self._encode(message)
        else:
            small = _take_parts(tree, parts)
        if not parts and body is not None:
            if self._validate:
                self._decode(body)
            return body, ()
        if self._validate:
            msgspec.convert(tree, self._type, builtin_types=_BYTES)
        return self._encode(small), parts


def _take_parts(value: Any, parts: list[bytes]) -> Any:
    """The same tree with extensions in place of large bytes, which are moved to `parts` up to their limit."""
    if isinstance(value, _BYTES):
        if len(value) < PART_BYTES or len(parts) == MAX_PARTS - 1:
            return value
        parts.append(value if type(value) is bytes else bytes(value))
        return msgspec.msgpack.Ext(_PART_CODE, (len(parts) - 1).to_bytes(4, "big"))
    if isinstance(value, dict):
        return {key: _take_parts(item, parts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_take_parts(item, parts) for item in value]
    return value


def _part(parts: Sequence[bytes], code: int, data: memoryview) -> bytes:
    number = int.from_bytes(data, "big")
    if code != _PART_CODE or len(data) != 4 or number >= len(parts):
        raise msgspec.ValidationError("a reference to a part that is not there")
    return parts[number]


def _byte_fields(message_type: object) -> tuple[str, ...]:
    """The fields of the message itself that may contain bytes."""
    info = msgspec.inspect.type_info(message_type)
    if not isinstance(info, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
        return ()
    return tuple(field.name for field in info.fields if _may_be_bytes(field.type))


def _may_be_bytes(info: msgspec.inspect.Type) -> bool:
    if isinstance(info, msgspec.inspect.UnionType):
        return any(_may_be_bytes(one) for one in info.types)
    kinds = (
        msgspec.inspect.BytesType,
        msgspec.inspect.ByteArrayType,
        msgspec.inspect.MemoryViewType,
        msgspec.inspect.AnyType,
    )
    return isinstance(info, kinds)


def _name(of: object) -> str:
    return getattr(of, "__qualname__", None) or str(of)
