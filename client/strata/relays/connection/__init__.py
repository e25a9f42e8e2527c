"""Connections to RFC-0004 relays: publish until acknowledged, read each packet once and in order.

`client` and `subscription` are what a program uses, `driver` is the asyncio shell; what they rest on has no
I/O: `connection` joins `authenticating`, `publishing` and `subscribing`, `inspection` verifies what arrives,
`keyring` knows authors' keys, which `keyfetch` asks for, `backoff` says how long to wait. `dialing` and
`discovery` open the socket, `pins` remembers which relay was met where.
"""

from __future__ import annotations

from strata.relays.connection.client import PacketRelay
from strata.relays.connection.keyring import Anchors
from strata.relays.connection.notice import WHAT_RELAYS_SEE
from strata.relays.connection.options import Options
from strata.relays.connection.subscription import Subscription
from strata.relays.connection.values import Announced, Authenticated, Delivery, Published, Query, Statistics

__all__ = [
    "WHAT_RELAYS_SEE",
    "Anchors",
    "Announced",
    "Authenticated",
    "Delivery",
    "Options",
    "PacketRelay",
    "Published",
    "Query",
    "Statistics",
    "Subscription",
]
