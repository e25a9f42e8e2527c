"""Connections to RFC-0004 relays: publish until acknowledged, read each packet once and in order.

Programs use `relay` and `subscription`. `driver` is the asyncio shell around `core`, and `feed` is one
subscription's access to both. `core` has no I/O; it joins `authenticating`, `publishing` and one `stream`,
with its `queue`, for each subscription. `inspection` verifies what arrives, `keyring` holds authors' keys,
and `keyfetch` asks the relay for them. `dialing` opens the socket, `discovery` reads the relay's manifest,
`http_packets` fetches packets by id, and `pins` remembers which relay was met at which address. `dialogue` is
a separate kind of session, which makes one request at a time.
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
