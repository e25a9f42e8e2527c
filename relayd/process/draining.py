"""A process that stops closes its connections in waves, with time for the answers to their publishes."""

from __future__ import annotations

import asyncio
from typing import Final

from relayd import failpoints
from relayd.config import Settings
from relayd.logs import get_logger
from relayd.relay import Relay
from relayd.sessions.registry import Registry

__all__ = ["drain"]

_log = get_logger("relayd.server")

_GOING_AWAY: Final = "the relay is going away; resume by cursor"
_WAVE_SECONDS: Final = 0.5
_CLOSED_PER_SECOND: Final = 100
_CLOSE_TIMEOUT: Final = 5.0


async def drain(relay: Relay, settings: Settings) -> None:
    """Close every connection, some at a time.

    A connection whose turn has come is read no further, and is closed half a second later; the last wave
    waits until all publishes are answered, `drain_timeout` at most. Until their turn connections are served
    as ever, but nobody new is. Clients resume elsewhere by cursor, and repeat publishes without an answer.
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
    """All but the last wave, which is whoever is left."""
    sockets = list(registry.sockets)
    waves = int(min(spread, len(sockets) / _CLOSED_PER_SECOND) / _WAVE_SECONDS)
    for wave in range(waves):
        part = sockets[wave::waves]
        registry.each(part, lambda socket: socket.stop_reading())
        # What was read is mostly answered by then; a publisher that hears nothing publishes again.
        await asyncio.sleep(_WAVE_SECONDS)
        registry.each(part, lambda socket: socket.close(1001, _GOING_AWAY))
