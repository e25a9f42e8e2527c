"""What the reading from peers tells before it has read."""

from __future__ import annotations

from typing import Any

from strata.protocol.ids import Identity

from relayd.federation.peers_file import Upstream
from relayd.federation.service import Federation
from relayd.metrics import Metrics


def test_what_comparisons_find_is_counted_from_zero():
    """The first packets that a peer withholds are growth to the alert RelayPeerWithholds."""
    metrics = Metrics()
    nothing: Any = None
    Federation(
        [Upstream("wss://peer", "did:strata:zPeer")],
        {"did:strata:zPeer": 1},
        url="postgresql://",
        identity=Identity.generate(),
        store=nothing,
        admission=nothing,
        metrics=metrics,
        faults=nothing,
        clock=lambda: 0,
        max_backfill_seconds=0,
        reconcile_interval=0,
        reconcile_max_items=1,
    )
    line = b'relayd_peer_differences_total{kind="withheld",peer="did:strata:zPeer"} 0.0'
    assert line in metrics.render()[1]
