"""The end of a node's tasks, which a handler may ask for that one of these tasks has called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from strata.channels.messaging.emitter import callers

__all__ = ["ending"]


@asynccontextmanager
async def ending(tasks: Collection[asyncio.Task[Any]]) -> AsyncIterator[None]:
    """Cancel tasks; in the block they have ended. The one that runs this ends at its next wait.

    It must not wait for itself, and what its handler does in the block is to be done in full. So it is for
    one whose handler runs this in another task: it has to end by itself, once its handler has.
    """
    own = asyncio.current_task()
    callers_too = {own, *callers()}
    others = [task for task in tasks if task not in callers_too]
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
    try:
        yield
    finally:
        if own is not None and own in tasks:
            own.cancel()
