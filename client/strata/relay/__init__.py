"""Connections to RFC-0004 relays: publish until acknowledged, read each packet once and in order.

`client` and `subscription` are what a program uses, `driver` is the asyncio shell; what they rest on has no
I/O: `connection` joins `authenticating`, `publishing` and `subscribing`, `inspection` verifies what arrives,
`keyring` knows authors' keys, which `keyfetch` asks for, `backoff` says how long to wait. `dialing` and
`discovery` open the socket, `pins` remembers which relay was met where.
"""

from __future__ import annotations

from strata.relay.client import Relay, connect
from strata.relay.keyring import Anchors
from strata.relay.notice import WHAT_RELAYS_SEE
from strata.relay.options import Options
from strata.relay.subscription import Subscription
from strata.relay.values import Announced, Authenticated, Delivery, Published, Query, Statistics

__all__ = [
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
]
