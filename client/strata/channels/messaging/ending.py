"""Ending a node's tasks, which may be requested by a handler that one of these tasks has called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from strata.channels.messaging.emitter import callers

__all__ = ["ending"]


@asynccontextmanager
async def ending(tasks: Collection[asyncio.Task[object]]) -> AsyncIterator[None]:
    """Cancel tasks; in the block they have ended. The current task, if among them, ends at its next wait.

    The current task must not wait for itself, and its handler must complete the block. The same holds for a
    task whose handler runs this in another task: it must end by itself, once its handler has ended.
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
