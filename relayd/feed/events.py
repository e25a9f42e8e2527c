"""EVENT frames, encoded once for each packet (RFC-0004 §3.3).

An EVENT is `head` + `tail`: the head holds the subscription id and is made once for each subscription; the
tail holds the packet, `received_at` and the cursor, which are the same for every subscriber. What differs
for each delivery is only the frame header, and not even that where two subscriptions share an id.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from relayd.cursor import CursorCodec
from relayd.frames import text_frame_header

__all__ = ["event_frames", "event_head", "event_tail", "row_frames"]


def event_head(subscription_id: str) -> bytes:
    """The first half of every EVENT of one subscription."""
    return b'{"type":"EVENT","subscription_id":' + msgspec.json.encode(subscription_id) + b',"packet":'


def event_tail(body: bytes, received_at: int, cursor: bytes | None) -> bytes:
    """The second half of an EVENT: the packet as stored, unchanged (R-171), and what goes with it."""
    if cursor is None:
        return b'%b,"received_at":%d}' % (body, received_at)
    return b'%b,"received_at":%d,"cursor":"%b"}' % (body, received_at, cursor)


def event_frames(head: bytes, tails: Iterable[bytes]) -> bytes:
    """Whole text frames, one for each tail, joined for one write."""
    parts: list[bytes] = []
    head_length = len(head)
    for tail in tails:
        parts += (text_frame_header(head_length + len(tail)), head, tail)
    return b"".join(parts)


def row_frames(
    head: bytes, rows: Iterable[tuple[int, int, bytes]], cursors: CursorCodec | None, *, ascending: bool
) -> bytes:
    """Frames for rows of the log, each with its cursor (R-153), or without where `cursors` is None (R-160).

    In one pass, for history is read in pages of hundreds.
    """
    parts: list[bytes] = []
    head_length = len(head)
    for sequence, received_at, body in rows:
        cursor = None if cursors is None else cursors.encode_bytes(sequence, ascending=ascending)
        tail = event_tail(body, received_at, cursor)
        parts += (text_frame_header(head_length + len(tail)), head, tail)
    return b"".join(parts)
