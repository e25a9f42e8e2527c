"""Calling what a program gave: its handlers, store, hook, node. Something in there may be cancelled."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

__all__ = ["answer_of"]

P = ParamSpec("P")


async def answer_of(function: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> Any:
    """What a plain function or a coroutine function returns. Cancelling cancels it.

    Raises what it raises, and `RuntimeError` where something that it waited for was cancelled, and not the
    task that waits here: such a `CancelledError` is a failure like others, and must not end that task.
    """
    try:
        answer = function(*arguments, **named)
        return await answer if inspect.isawaitable(answer) else answer
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("something that it waited for was cancelled") from error
