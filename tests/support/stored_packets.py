"""Packets as the writer hands them to the log."""

from __future__ import annotations

from strata.protocol.packets import Packet

from relayd.store import NewPacket

__all__ = ["as_stored"]


def as_stored(packet: Packet) -> NewPacket:
    """The row of a packet without an expiry."""
    return NewPacket(
        packet.digest, packet.author_id, packet.content_type, packet.timestamp, None, packet.canonical
    )
