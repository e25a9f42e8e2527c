"""A process that stops closes its connections in waves, with time to answer their publishes."""

from __future__ import annotations

import asyncio
from typing import Final

from relayd import failpoints
from relayd.config import Settings
from relayd.logs import get_logger
from relayd.relay import RunningRelay
from relayd.sessions.registry import Registry

__all__ = ["drain"]

_log = get_logger("relayd.server")

_GOING_AWAY: Final = "the relay is going away; resume by cursor"
_WAVE_SECONDS: Final = 0.5
_CLOSED_PER_SECOND: Final = 100
_CLOSE_TIMEOUT: Final = 5.0


async def drain(relay: RunningRelay, settings: Settings) -> None:
    """Close every connection, some at a time.

    A connection whose turn has come is no longer read, and is closed half a second later. The last wave
    waits until all publishes are answered, `drain_timeout` at most. Until their turn, connections are served
    as usual, but no new ones are. Clients resume elsewhere by cursor, and repeat unanswered publishes.
    """
    admission, registry = relay.admission, relay.registry
    registry.draining = True
    if failpoints.ARMED:
        await failpoints.reached("server.drain")
    _log.info("draining", connections=len(registry), publishes=admission.pending)
    await _close_in_waves(registry, settings.drain_spread)
    registry.stop_reading()
    await registry.settle(lambda: not admission.pending, settings.drain_timeout)
    registry.close_all(1001, _GOING_AWAY)
    await registry.settle(lambda: not registry, _CLOSE_TIMEOUT)
    _log.info("drained", unanswered=admission.pending, unclosed=len(registry))


async def _close_in_waves(registry: Registry, spread: float) -> None:
    """Close all but the last wave, which is the connections that are left."""
    sockets = list(registry.sockets)
    waves = int(min(spread, len(sockets) / _CLOSED_PER_SECOND) / _WAVE_SECONDS)
    for wave in range(waves):
        part = sockets[wave::waves]
        registry.each(part, lambda socket: socket.stop_reading())
        # By then most of what was read is answered; a publisher that gets no answer publishes again.
        await asyncio.sleep(_WAVE_SECONDS)
        registry.each(part, lambda socket: socket.close(1001, _GOING_AWAY))
