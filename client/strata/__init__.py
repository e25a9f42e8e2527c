"""strata: signed packets and connections to Strata relays.

    async with strata.connect("ws://127.0.0.1:7447/strata", identity=strata.Identity.generate()) as relay:
        await relay.post({"type": "POST", "text": "hello"})
        async for delivery in relay.subscribe(types=["POST"]):
            print(delivery.packet.content)

Each name below is loaded at its first use, so importing one part does not load the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.channels.connecting import Pool, Relay, connect, connect_pool
    from strata.channels.nodes import NodeConfig, create_node
    from strata.channels.reliable import (
        ReliableChannel,
        ReliableChannelConfig,
        ReliableClient,
        ReliableEnvelope,
        create_reliable_channel,
    )
    from strata.protocol.documents import DidDocument
    from strata.protocol.errors import (
        Closed,
        ConnectionFailed,
        ErrorCode,
        IdentityError,
        InvalidInput,
        InvalidMessage,
        InvalidPacket,
        MissingCapability,
        RequestRefused,
        RequestTimeout,
        Retry,
        StrataError,
        retry_advice,
    )
    from strata.protocol.ids import Identity
    from strata.protocol.keys import KeyChain, KeyRules, KeyState
    from strata.protocol.packets import Packet
    from strata.relays.connection import (
        WHAT_RELAYS_SEE,
        Anchors,
        Announced,
        Authenticated,
        Delivery,
        FetchOptions,
        LogReset,
        Options,
        Published,
        Query,
        Statistics,
        SubscribeOptions,
        Subscription,
    )
    from strata.relays.pool import (
        PoolFetchOptions,
        PoolOptions,
        PoolPublished,
        PoolSubscribeOptions,
        PoolSubscription,
        Profile,
    )

__all__ = [
    "WHAT_RELAYS_SEE",
    "Anchors",
    "Announced",
    "Authenticated",
    "Closed",
    "ConnectionFailed",
    "Delivery",
    "DidDocument",
    "ErrorCode",
    "FetchOptions",
    "Identity",
    "IdentityError",
    "InvalidInput",
    "InvalidMessage",
    "InvalidPacket",
    "KeyChain",
    "KeyRules",
    "KeyState",
    "LogReset",
    "MissingCapability",
    "NodeConfig",
    "Options",
    "Packet",
    "Pool",
    "PoolFetchOptions",
    "PoolOptions",
    "PoolPublished",
    "PoolSubscribeOptions",
    "PoolSubscription",
    "Profile",
    "Published",
    "Query",
    "Relay",
    "ReliableChannel",
    "ReliableChannelConfig",
    "ReliableClient",
    "ReliableEnvelope",
    "RequestRefused",
    "RequestTimeout",
    "Retry",
    "Statistics",
    "StrataError",
    "SubscribeOptions",
    "Subscription",
    "connect",
    "connect_pool",
    "create_node",
    "create_reliable_channel",
    "retry_advice",
]

_HOMES = {
    "strata.channels.connecting": ("Pool", "Relay", "connect", "connect_pool"),
    "strata.protocol.documents": ("DidDocument",),
    "strata.protocol.errors": (
        "Closed",
        "ConnectionFailed",
        "ErrorCode",
        "IdentityError",
        "InvalidInput",
        "InvalidMessage",
        "InvalidPacket",
        "MissingCapability",
        "RequestRefused",
        "RequestTimeout",
        "Retry",
        "StrataError",
        "retry_advice",
    ),
    "strata.protocol.ids": ("Identity",),
    "strata.protocol.keys": ("KeyChain", "KeyRules", "KeyState"),
    "strata.channels.nodes": ("NodeConfig", "create_node"),
    "strata.protocol.packets": ("Packet",),
    "strata.channels.reliable": (
        "ReliableChannel",
        "ReliableChannelConfig",
        "ReliableClient",
        "ReliableEnvelope",
        "create_reliable_channel",
    ),
    "strata.relays.pool": (
        "PoolFetchOptions",
        "PoolOptions",
        "PoolPublished",
        "PoolSubscribeOptions",
        "PoolSubscription",
        "Profile",
    ),
    "strata.relays.connection": (
        "WHAT_RELAYS_SEE",
        "Anchors",
        "Announced",
        "Authenticated",
        "Delivery",
        "FetchOptions",
        "LogReset",
        "Options",
        "Published",
        "Query",
        "Statistics",
        "SubscribeOptions",
        "Subscription",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # otherwise a type checker would accept a misspelt name, as Any

    def __getattr__(name: str) -> Any:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(home), name)
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
