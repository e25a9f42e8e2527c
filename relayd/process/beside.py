"""Calls that may hang, such as reading a file or looking up a name, beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from relayd.config import ConfigurationError

__all__ = ["beside"]

T = TypeVar("T")


async def beside(call: Callable[..., T], *arguments: object, seconds: float | None = None) -> T:
    """Call in a thread, and wait for the result; after `seconds` raise `ConfigurationError` instead.

    A call that hangs is left behind when this is cancelled, and does not keep the process from ending, as a
    thread of `asyncio.to_thread` would.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="beside", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(result)
    except TimeoutError:
        if result.done():  # it is the call's own
            raise
        problem = f"a file or a name did not answer within {seconds:g} s"
        raise ConfigurationError([problem]) from None
