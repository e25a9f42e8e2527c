"""Many relays as one: publish to several, read from several, and know which ones to rely on.

Programs use `pool` and `subscription`. They are asyncio shells, as are their parts: `relays` (which relays
are connected), `link` (one connection), `publisher`, `reading` (feeds a subscription), `checks` (pings,
probes, presence) and `scorekeeper` (scores of relays, kept in `score_file`). `older_ids` keeps packet ids on
disk.

The modules beneath them have no I/O: `membership` decides which relays to use, `publish_plan` where a packet
goes, `merging` what is delivered, `presence` and `sweeping` what to look for, `probes` what to ask at random,
`reputation` how to rate the answers, and `profiles` how much to reveal to relays.
"""

from __future__ import annotations

from strata.relays.conduct import Standing
from strata.relays.pool.options import PoolOptions
from strata.relays.pool.pool import PacketPool
from strata.relays.pool.profiles import PROFILE_NOTICE, EffectiveProfile, Profile
from strata.relays.pool.subscription import PoolSubscription
from strata.relays.pool.values import (
    Copy,
    PoolFetchOptions,
    PoolPublished,
    PoolStatistics,
    PoolSubscribeOptions,
    Position,
    RelayView,
)

__all__ = [
    "PROFILE_NOTICE",
    "Copy",
    "EffectiveProfile",
    "PacketPool",
    "PoolFetchOptions",
    "PoolOptions",
    "PoolPublished",
    "PoolStatistics",
    "PoolSubscribeOptions",
    "PoolSubscription",
    "Position",
    "Profile",
    "RelayView",
    "Standing",
]
