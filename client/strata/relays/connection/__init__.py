"""Connections to RFC-0004 relays: publish until acknowledged, read each packet once and in order.

A program uses `relay` and `subscription`. `driver` is the asyncio shell around `core`, and `feed` is one
subscription's access to both. `core` has no I/O; it joins `authenticating`, `publishing` and one `stream`
for each subscription, with its `queue`. `inspection` verifies what arrives, `keyring` knows authors' keys,
`keyfetch` asks the relay for them. `dialing` opens the socket, `discovery` reads the relay's manifest,
`http_packets` fetches packets by id, `pins` remembers which relay was met at which address. `dialogue` is a
session beside all that, which asks one thing at a time.
"""

from __future__ import annotations

from strata.relays.connection.keyring import Anchors
from strata.relays.connection.notice import WHAT_RELAYS_SEE
from strata.relays.connection.options import Options
from strata.relays.connection.relay import PacketRelay
from strata.relays.connection.subscription import Subscription
from strata.relays.connection.values import (
    Announced,
    Authenticated,
    Delivery,
    FetchOptions,
    LogReset,
    Published,
    Query,
    Statistics,
    SubscribeOptions,
)

__all__ = [
    "WHAT_RELAYS_SEE",
    "Anchors",
    "Announced",
    "Authenticated",
    "Delivery",
    "FetchOptions",
    "LogReset",
    "Options",
    "PacketRelay",
    "Published",
    "Query",
    "Statistics",
    "SubscribeOptions",
    "Subscription",
]
