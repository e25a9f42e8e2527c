"""strata: signed packets and connections to Strata relays.

    async with strata.connect("ws://127.0.0.1:7447/strata", identity=strata.Identity.generate()) as relay:
        await relay.post({"type": "POST", "text": "hello"})
        async for delivery in relay.subscribe(types=["POST"]):
            print(delivery.packet.content)

The names below are loaded when they are first used, so that importing one part costs no other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.documents import DidDocument
    from strata.errors import (
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
    from strata.ids import Identity
    from strata.keys import KeyChain, KeyRules, KeyState
    from strata.nodes import NodeConfig, create_node
    from strata.packets import Packet
    from strata.pool import Pool, PoolOptions, PoolPublished, PoolSubscription, Profile, connect_pool
    from strata.relay import (
        WHAT_RELAYS_SEE,
        Anchors,
        Announced,
        Authenticated,
        Delivery,
        Options,
        Published,
        Query,
        Relay,
        Statistics,
        Subscription,
        connect,
    )
    from strata.reliable import (
        ReliableChannel,
        ReliableChannelConfig,
        ReliableClient,
        ReliableEnvelope,
        create_reliable_channel,
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
    "Identity",
    "IdentityError",
    "InvalidInput",
    "InvalidMessage",
    "InvalidPacket",
    "KeyChain",
    "KeyRules",
    "KeyState",
    "MissingCapability",
    "NodeConfig",
    "Options",
    "Packet",
    "Pool",
    "PoolOptions",
    "PoolPublished",
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
    "Subscription",
    "connect",
    "connect_pool",
    "create_node",
    "create_reliable_channel",
    "retry_advice",
]

_HOMES = {
    "strata.documents": ("DidDocument",),
    "strata.errors": (
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
    "strata.ids": ("Identity",),
    "strata.keys": ("KeyChain", "KeyRules", "KeyState"),
    "strata.nodes": ("NodeConfig", "create_node"),
    "strata.packets": ("Packet",),
    "strata.reliable": (
        "ReliableChannel",
        "ReliableChannelConfig",
        "ReliableClient",
        "ReliableEnvelope",
        "create_reliable_channel",
    ),
    "strata.pool": ("Pool", "PoolOptions", "PoolPublished", "PoolSubscription", "Profile", "connect_pool"),
    "strata.relay": (
        "WHAT_RELAYS_SEE",
        "Anchors",
        "Announced",
        "Authenticated",
        "Delivery",
        "Options",
        "Published",
        "Query",
        "Relay",
        "Statistics",
        "Subscription",
        "connect",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
