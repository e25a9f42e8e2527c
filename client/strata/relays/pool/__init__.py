"""Many relays as one: publish to several, read from several, and know which ones to rely on.

A program uses `pool` and `subscription`. They are asyncio shells, as are their parts: `relays` (who is
connected), `link` (one connection), `publisher`, `reading` (what feeds a subscription), `checks` (pings,
probes, presence) and `scorekeeper` (what is thought of relays, kept in `score_file`). `older_ids` keeps
packet ids on disk.

What they rest on has no I/O: `membership` says which relays to use, `publish_plan` where a packet goes,
`merging` what is handed on, `presence` and `sweeping` what to look for, `probes` what to ask at random,
`reputation` what to think of the answers, `profiles` how much to show of oneself.
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
