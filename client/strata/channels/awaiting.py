"""How tasks wait: for an alarm, and for the stores, hooks and nodes that a program supplies."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import ParamSpec

__all__ = ["Alarm", "answer_of", "end_of"]

P = ParamSpec("P")


class Alarm:
    """An event for one waiting task, with a deadline that costs less than a timeout that cancels."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the task now, or as soon as it waits."""
        self._is_set = True
        if self._waiter is not None:
            _end(self._waiter)

    def clear(self) -> None:
        """Reset the alarm."""
        self._is_set = False

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until the alarm is set, for at most `seconds`. Cancelling changes nothing."""
        if self._is_set:
            return
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _end, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


async def answer_of(function: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> object:
    """Call a plain function or a coroutine function, and return its result. Cancelling cancels the call.

    Raises what the function raises. If something that the function awaited was cancelled, but the calling
    task was not, raises `RuntimeError`: a `CancelledError` would end the calling task.
    """
    try:
        answer = function(*arguments, **named)
        return await answer if inspect.isawaitable(answer) else answer
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("something that it waited for was cancelled") from error


def end_of(task: asyncio.Task[None]) -> BaseException | None:
    """The error that ended a task; None if the task returned.

    It is a `CancelledError` if the task itself was cancelled, as `asyncio.run` does at the end.
    """
    if not task.cancelled():
        return task.exception()
    if task.cancelling():
        return asyncio.CancelledError()
    return RuntimeError("something that it waited for was cancelled")


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
