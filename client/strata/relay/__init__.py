"""Connections to RFC-0004 relays: publish until acknowledged, read each packet once and in order.

`client` is the asyncio shell and `subscription` what a program iterates over; everything they rest on has no
I/O: `connection` joins `publishing` and `subscribing`, `inspection` verifies what arrives, `backoff` says how
long to wait. `dialing` and `discovery` open the socket.
"""

from __future__ import annotations

from strata.relay.client import Relay, connect
from strata.relay.notice import WHAT_RELAYS_SEE
from strata.relay.options import Options
from strata.relay.subscription import Subscription
from strata.relay.values import Announced, Delivery, Published, Query, Statistics

__all__ = [
    "WHAT_RELAYS_SEE",
    "Announced",
    "Delivery",
    "Options",
    "Published",
    "Query",
    "Relay",
    "Statistics",
    "Subscription",
    "connect",
]
