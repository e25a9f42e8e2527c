"""EVENT frames, encoded once for each packet (RFC-0004 §3.3).

An EVENT is `head` + `tail`. The head holds the subscription id and is made once for each subscription; the
tail holds the packet, `received_at` and the cursor, which are the same for every subscriber. Only the frame
header differs for each delivery, and not even that if two subscriptions share an id.

A packet goes out as the bytes that were stored. The one exception is a packet with an annotation, whose
claim about its origin did not hold: subscribers get it in the relay's `Form` with `relay_annotations` beside
it, and replication sessions get it as it was signed.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from strata.protocol.provenance import Downgrade, served

from relayd.cursor import CursorCodec
from relayd.frames import text_frame_header

__all__ = ["Form", "annotated_tail", "event_end", "event_frames", "event_head", "event_tail", "row_frames"]

Form = Literal["rewrite", "annotate", "signed"]
"""How an annotated packet is served: with its origin replaced (R-206), as signed beside the annotation
(R-210), or as signed without the annotation, which is for peers that judge it themselves (R-211)."""


def event_head(subscription_id: str) -> bytes:
    """The first half of every EVENT of one subscription."""
    return b'{"type":"EVENT","subscription_id":' + msgspec.json.encode(subscription_id) + b',"packet":'


def event_tail(body: bytes, received_at: int, cursor: bytes | None) -> bytes:
    """The second half of an EVENT: the packet as stored, unchanged (R-171), and its members."""
    return body + event_end(received_at, cursor)


def event_end(received_at: int, cursor: bytes | None) -> bytes:
    """The part of an EVENT that follows the packet."""
    if cursor is None:
        return b',"received_at":%d}' % received_at
    return b',"received_at":%d,"cursor":"%b"}' % (received_at, cursor)


def annotated_tail(
    body: bytes, annotation: bytes, received_at: int, cursor: bytes | None, form: Form
) -> bytes:
    """`event_tail` for a packet that has an annotation, with its `relay_annotations` (R-208, R-209)."""
    if form == "signed":
        return event_tail(body, received_at, cursor)
    packet, annotations = served(body, Downgrade.decode(annotation), mode=form)
    return b'%b,"relay_annotations":%b}' % (event_tail(packet, received_at, cursor)[:-1], annotations)


def event_frames(head: bytes, tails: Iterable[bytes]) -> bytes:
    """Whole text frames, one for each tail, joined for one write."""
    parts: list[bytes] = []
    head_length = len(head)
    for tail in tails:
        parts += (text_frame_header(head_length + len(tail)), head, tail)
    return b"".join(parts)


def row_frames(
    head: bytes,
    rows: Iterable[tuple[int, int, bytes, bytes | None]],
    cursors: CursorCodec | None,
    *,
    ascending: bool,
    form: Form,
) -> bytes:
    """Frames for rows of the log, each with its cursor (R-153), or without one if `cursors` is None (R-160).

    One pass, because history is read in pages of hundreds. A stored body is copied once, into the answer.
    """
    parts: list[bytes] = []
    head_length = len(head)
    starts: dict[int, bytes] = {}  # many packets of a page have the same length
    for sequence, received_at, body, annotation in rows:
        cursor = None if cursors is None else cursors.encode_bytes(sequence, ascending=ascending)
        if annotation is None:
            end = event_end(received_at, cursor)
        else:
            body, end = annotated_tail(body, annotation, received_at, cursor, form), b""
        length = head_length + len(body) + len(end)
        start = starts.get(length)
        if start is None:
            start = starts[length] = text_frame_header(length) + head
        parts += (start, body, end)
    return b"".join(parts)
