"""Waiting for what nothing announces: a condition is asked again until it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["until", "wait_until"]

INTERVAL = 0.005


async def until(
    condition: Callable[[], object], what: str = "the condition holds", timeout: float = 60.0
) -> None:
    """Wait until `condition` holds. Raises `AssertionError` after `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            while not condition():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(INTERVAL)
    except TimeoutError:
        raise AssertionError(f"not in {timeout:g} s: {what}") from None


def wait_until(
    condition: Callable[[], object], what: str = "the condition holds", timeout: float = 60.0
) -> None:
    """As `until`, where there is no event loop. Raises `AssertionError` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {timeout:g} s: {what}")
        time.sleep(INTERVAL)
