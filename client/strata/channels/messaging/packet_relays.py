"""The part of a relay or a pool that a messaging node uses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Literal, Protocol

from strata.protocol.packets import Packet

__all__ = ["DeliveredPacket", "PacketRelays", "PacketStream"]


class DeliveredPacket(Protocol):
    """A verified packet, delivered by a relay."""

    @property
    def packet(self) -> Packet: ...


class PacketStream(Protocol):
    """A subscription: an asynchronous iterator of deliveries that can be closed."""

    def __aiter__(self) -> AsyncIterator[DeliveredPacket]: ...

    async def aclose(self) -> None: ...


class PacketRelays(Protocol):
    """The part of a relay or pool that a node uses; `strata.Relay` and `strata.Pool` have it."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def seats(self) -> tuple[int, int]:
        """The number of relays that are connected, and the number that should be."""
        ...

    @property
    def max_packet_bytes(self) -> int | None:
        """The smallest limit that a connected relay has reported."""
        ...

    async def publish(
        self, packet: Packet, *, timeout: float | None = None, on_stored: Callable[[], None] | None = None
    ) -> object: ...

    def subscribe(
        self,
        *,
        authors: tuple[str, ...] = (),
        types: str = "",
        since: int | None = None,
        until: int | None = None,
        received_since: int | None = None,
        live: bool = True,
        order: Literal["asc", "desc"] = "asc",
        limit: int | None = None,
    ) -> PacketStream: ...

    def find(
        self, packet_ids: Sequence[str], *, types: str, since: int
    ) -> AsyncGenerator[DeliveredPacket, None]: ...
