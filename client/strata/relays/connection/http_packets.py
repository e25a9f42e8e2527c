"""Fetching packets by id over HTTP, from a relay that announces this (`http_packets`; A-048, C-285)."""

from __future__ import annotations

import asyncio
import ssl as ssl_module

import msgspec

from strata.relays.connection.discovery import http_get
from strata.relays.connection.queue import QueuedEvent, possible_time
from strata.relays.peer_timeout import PeerTimeout

__all__ = ["fetch_packet"]

_ENVELOPE_BYTES = 64 * 1024


class _Found(msgspec.Struct):
    packet: msgspec.Raw
    received_at: int
    relay_annotations: dict[str, object] | None = None


_DECODER = msgspec.json.Decoder(_Found, float_hook=float)


async def fetch_packet(
    url: str, packet_id: str, *, ssl: ssl_module.SSLContext | None, max_bytes: int, timeout: float
) -> QueuedEvent | None:
    """The relay's answer to `GET /packets/{id}`, unchecked; None if it is malformed or has no packet.

    `url` is the relay's ws or wss URL. Raises `OSError` and `TimeoutError` if there is no answer. Cancelling
    closes the socket.
    """
    try:
        async with PeerTimeout(timeout):
            body = await http_get(
                url, f"/packets/{packet_id}", ssl=ssl, max_bytes=3 * max_bytes + _ENVELOPE_BYTES
            )
        found = _DECODER.decode(body)
    except (ValueError, EOFError, RecursionError, msgspec.MsgspecError, asyncio.LimitOverrunError):
        return None
    arrived_at = asyncio.get_running_loop().time()
    received_at, annotations = possible_time(found.received_at), found.relay_annotations
    return QueuedEvent(found.packet, received_at, None, None, annotations, arrived_at)
