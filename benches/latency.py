"""From PUBLISH to OK, on one connection with one publish at a time."""

from __future__ import annotations

from benches.bare import SignatureCost, echo_seconds, round_trips
from benches.daemon import RelayProcess
from benches.load import make_load
from benches.measures import Measure, Plan, Progress, percentile
from benches.peer import Publisher, connect_peers

__all__ = ["measure"]

_TARGET_MS = 0.7


async def measure(
    relay: RelayProcess, plan: Plan, progress: Progress, signature: SignatureCost
) -> list[Measure]:
    """The median with its target, and the 99th percentile."""
    count, warm = plan.latency_packets, plan.latency_packets // 10
    load = make_load(count + warm, progress)
    [peer] = await connect_peers(relay.ws_url, 1, Publisher)
    await round_trips(peer, load.frames[:warm])
    times = await round_trips(peer, load.frames[warm:])
    peer.close()
    echo = await echo_seconds(count)
    progress(f"latency: {percentile(times, 0.5) * 1e3:.2f} ms")
    details = {"echo + signature ms": (percentile(echo, 0.5) + signature.seconds) * 1e3}
    return [
        Measure(
            "latency",
            f"PUBLISH to OK, p{share}",
            percentile(times, share / 100) * 1e3,
            "ms",
            _TARGET_MS if share == 50 else None,
            at_most=True,
            limit=percentile(echo, share / 100) * 1e3,
            limit_name="echo alone",
            details=details if share == 50 else {"worst ms": times[-1] * 1e3},
        )
        for share in (50, 99)
    ]
