"""Whether the database is there and takes packets, checked every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from relayd.faults import FaultLog
from relayd.logs import get_logger, problem_of
from relayd.store.types import StoreError

__all__ = ["watch_database"]

_log = get_logger("relayd.server")

_INTERVAL: Final = 2.0
_LONGEST_SILENCE: Final = 10.0
"""The most seconds that an answer may take: how long a publish waits for the database by default. A database
that answers late still serves, and may be on a busy machine."""


async def watch_database(
    ping: Callable[[], Awaitable[None]],
    found: Callable[[bool], None],
    faults: FaultLog,
    *,
    interval: float = _INTERVAL,
    longest_silence: float = _LONGEST_SILENCE,
) -> None:
    """Ping the database, and call `found(whether it is there)` after each answer, until cancelled.

    A database that refuses counts as lost at once; a silent one, once `longest_silence` seconds have passed.
    """
    was_there = True
    while True:
        problem: str | None = None
        try:
            async with asyncio.timeout(longest_silence):
                await ping()
        except StoreError as error:
            problem = problem_of(error)
        except TimeoutError:
            problem = f"no answer in {longest_silence:g} s"
        except Exception as error:
            problem = type(error).__name__
            faults.caught("background", error)
        if problem is not None and was_there:
            _log.error("database_lost", problem=problem)
        elif problem is None and not was_there:
            _log.info("database_back")
        was_there = problem is None
        found(was_there)
        await asyncio.sleep(interval)
