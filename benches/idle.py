"""Memory of the relay per idle connection, bare and with one live subscription."""

from __future__ import annotations

import asyncio

from strata.protocol.wire import Filters, Subscribe, encode

from benches.bare import bytes_per_socket
from benches.daemon import RelayProcess
from benches.load import client_frame
from benches.measures import Measure, Plan, Progress
from benches.peer import Peer, connect_peers

__all__ = ["measure"]

_TARGET_KIB = 16.0
_WARM = 100
_SUBSCRIBED_AT_ONCE = 100


async def measure(relay: RelayProcess, plan: Plan, progress: Progress) -> list[Measure]:
    """Open many connections on a fresh relay and measure its growth."""
    count = plan.idle_connections
    peers = await connect_peers(relay.ws_url, _WARM)
    await _subscribe(peers)
    before = relay.resident_bytes()
    idle = await connect_peers(relay.ws_url, count)
    opened = relay.resident_bytes()
    progress(f"idle: {(opened - before) / count / 1024:.1f} KiB")
    await _subscribe(idle)
    subscribed = relay.resident_bytes()
    for peer in [*peers, *idle]:
        peer.close()
    alone = await bytes_per_socket(count) / 1024
    name = "a bare uvloop connection"
    return [
        Measure(
            "idle",
            f"a connection, of {count}",
            (opened - before) / count / 1024,
            "KiB",
            _TARGET_KIB,
            at_most=True,
            limit=alone,
            limit_name=name,
        ),
        Measure(
            "idle",
            "the same with a live subscription",
            (subscribed - before) / count / 1024,
            "KiB",
            at_most=True,
            limit=alone,
            limit_name=name,
        ),
    ]


async def _subscribe(peers: list[Peer]) -> None:
    for first in range(0, len(peers), _SUBSCRIBED_AT_ONCE):
        group = peers[first : first + _SUBSCRIBED_AT_ONCE]
        waiting = [peer.expect(1) for peer in group]
        for number, peer in enumerate(group, first):
            message = Subscribe(
                subscription_id=f"feed-{number}",
                filters=Filters(types=["NEVER_PUBLISHED"], limit=0),
                history_marker=True,
            )
            peer.send(client_frame(encode(message)))
        await asyncio.gather(*waiting)
