"""A messaging node from one configuration: `create_node` of the documents (C-259, C-267, C-268)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Unpack

from strata.channels.closing import close_after
from strata.channels.connecting import Pool, connect_pool
from strata.channels.messaging.relay_node import RelayNode
from strata.channels.reliable.channel import ReliableChannel
from strata.channels.reliable.client import close_channels, open_channel
from strata.channels.reliable.config import ReliableChannelConfig
from strata.channels.reliable.options import ChannelOptions
from strata.protocol.ids import Signer
from strata.relays.bootstrap import KnownRelay
from strata.relays.pool import PoolOptions

__all__ = ["Node", "NodeConfig", "create_node", "parse_size"]

_SIZE = re.compile(r"\s*([0-9]+)\s*(KiB|KB|B)?\s*")
_UNITS = {"KiB": 1024, "KB": 1000, "B": 1, None: 1}


def parse_size(text: str | int) -> int:
    """The bytes that "150 KiB", "150 KB", "150 B" or a number stands for (C-267); else `ValueError`."""
    if isinstance(text, int):
        size = text
    else:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError(f"not a size: {text!r}; one looks like '150 KiB'")
        size = int(match[1]) * _UNITS[match[2]]
    if size < 1:
        raise ValueError("a size must be at least 1 byte")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The configuration of a node. Raises `ValueError` for an invalid size."""

    relays: tuple[str | KnownRelay, ...]
    identity: Signer
    pool: PoolOptions = field(default_factory=PoolOptions)
    channel: ReliableChannelConfig | None = None
    """The defaults of every channel on the node (C-031)."""
    max_message_size: str | int | None = None
    """The longest payload to send, such as "150 KiB", if packets do not set a lower limit."""

    def __post_init__(self) -> None:
        if self.max_message_size is not None:
            parse_size(self.max_message_size)


class Node(RelayNode):
    """A messaging node with its own pool. Made by `create_node`; use `async with`, or call `close`."""

    def __init__(self, config: NodeConfig, pool: Pool) -> None:
        limit = config.max_message_size
        super().__init__(
            pool,
            identity=config.identity,
            defaults=config.channel,
            max_payload=None if limit is None else parse_size(limit),
            is_genuine=pool._is_genuine,
        )
        self._config = config
        self._pool = pool

    async def close(self) -> None:
        """Close the channels, the node and every connection, as `Relay.close` does. Idempotent."""
        try:
            await close_channels(self)
        finally:
            try:
                await super().close()
            finally:
                await self._pool.close()

    async def __aexit__(self, *exception: object) -> None:
        raised = exception[1]
        await close_after(raised if isinstance(raised, BaseException) else None, self.close())

    def channel(
        self, channel_id: str, *, topic: str, sender_id: str | None = None, **options: Unpack[ChannelOptions]
    ) -> ReliableChannel:
        """Return a reliable channel over this node, as `Relay.channel` does. Open it with `async with`."""
        return open_channel(self, channel_id, topic, sender_id, **options)

    def info(self) -> Mapping[str, object]:
        """The identity and status of the node, as JSON values (C-268)."""
        return {
            "identity": self.transport_identity,
            "status": str(self.connection_status),
            "topics": {topic: str(self.topic_health(topic)) for topic in self.topics},
            "relays": [
                {"url": view.url, "connected": view.connected, "standing": str(view.standing)}
                for view in self._pool.relays
            ],
        }

    def config(self) -> Mapping[str, object]:
        """The settings in force, without keys, as JSON values (C-268)."""
        return {
            "max_message_size": self._config.max_message_size,
            "pool": {
                each.name: _plain(getattr(self._config.pool, each.name)) for each in fields(PoolOptions)
            },
        }


async def create_node(config: NodeConfig) -> Node:
    """Connect to relays and return a messaging node over them (C-259).

    Raises `ConnectionFailed` if no relay can be reached, and what `connect_pool` raises. Cancelling closes
    all connections.
    """
    pool = connect_pool(config.relays, identity=config.identity, options=config.pool)
    await pool.open()
    return Node(config, pool)


def _plain(value: object) -> int | float | str | None:
    return value if isinstance(value, int | float | str | None) else str(value)
