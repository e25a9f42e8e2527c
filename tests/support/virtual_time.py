"""Tests on a virtual clock: hours cost nothing, and waiting for ever fails."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import pytest
from strata_testkit.sim import run_virtually

__all__ = ["START", "virtually", "wall", "without_threads"]

P = ParamSpec("P")

START = 1_760_000_000
"""The second at which the wall clock of a world begins."""


def virtually(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test on a virtual clock."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtually(lambda: test(*args, **kwargs))

    return run


def wall() -> float:
    """The wall clock of the world."""
    return START + asyncio.get_running_loop().time()


def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do at once what a thread would do: a loop in virtual time has no threads."""

    async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
