"""Conversion of packets to columns and back.

author_id and content_type are keys (`columns.string_key`): UTF-8, or a hash if the string is too long
to be indexed; then the string itself is in the body.
"""

from __future__ import annotations

from typing import Any

import msgspec
from strata.protocol.columns import HASHED, string_key, string_keys

from relayd.store.types import LogEntry, NewPacket

__all__ = ["entry", "is_storable", "string_key", "string_keys"]

_INT64 = range(-(2**63), 2**63)


class _Content(msgspec.Struct):
    type: str = ""


class _View(msgspec.Struct):
    author_id: str
    content: _Content


_VIEW_DECODER = msgspec.json.Decoder(_View)


def is_storable(packet: NewPacket) -> bool:
    """Whether the values fit their columns, so that one packet cannot fail its batch."""
    try:
        string_key(packet.author_id)
        string_key(packet.content_type)
    except UnicodeEncodeError:
        return False
    expires_at = packet.expires_at
    return packet.timestamp in _INT64 and (expires_at is None or expires_at in _INT64)


def entry(row: tuple[Any, ...]) -> LogEntry:
    """The entry of a row of sequence, received_at, packet_id, author_id, content_type, timestamp, expires_at,
    body, annotation, and perhaps witnessed_at and ingest_peer."""
    sequence, received_at, packet_id, author, content_type, timestamp, expires_at, body, annotation = row[:9]
    witnessed_at, ingest_peer = row[9:] or (None, None)
    if author.startswith(HASHED) or content_type.startswith(HASHED):
        view = _VIEW_DECODER.decode(body)
        author_id, type_ = view.author_id, view.content.type
    else:
        author_id, type_ = author.decode(), content_type.decode()
    packet = NewPacket(
        packet_id,
        author_id,
        type_,
        timestamp,
        expires_at,
        body,
        annotation=annotation,
        witnessed_at=witnessed_at,
        ingest_peer=ingest_peer,
    )
    return LogEntry(sequence, received_at, packet)
