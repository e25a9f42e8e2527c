"""Waiting for conditions that nothing announces, by checking them repeatedly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["until", "wait_until"]

INTERVAL = 0.005
LONGEST_INTERVAL = 0.05
_SHARE = 0.05
"""A late condition is checked less often: the check is often a scrape, which costs a relay milliseconds."""


def _pause(waited: float) -> float:
    """How long to wait until the next check, after waiting `waited` seconds so far."""
    return min(max(INTERVAL, _SHARE * waited), LONGEST_INTERVAL)


async def until(
    condition: Callable[[], object], what: str = "the condition holds", timeout: float = 60.0
) -> None:
    """Wait until `condition` holds. Raises `AssertionError` after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    begun_at = loop.time()
    try:
        async with asyncio.timeout(timeout):
            while not condition():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(_pause(loop.time() - begun_at))
    except TimeoutError:
        raise AssertionError(f"not in {timeout:g} s: {what}") from None


def wait_until(
    condition: Callable[[], object], what: str = "the condition holds", timeout: float = 60.0
) -> None:
    """As `until`, without an event loop. Raises `AssertionError` after `timeout` seconds."""
    begun_at = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun_at
        if waited > timeout:
            raise AssertionError(f"not in {timeout:g} s: {what}")
        time.sleep(_pause(waited))
