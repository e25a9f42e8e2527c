"""Further keywords for functions whose parameters have other names in the documents."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from strata.channels.spelling import further_names, under_own_names

__all__ = ["named_too"]

P = ParamSpec("P")
T = TypeVar("T")


def named_too(**aliases: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that it also takes keywords in camel case, and those of `aliases`.

    A call that gives one parameter under two names raises `TypeError`.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        names = further_names(inspect.signature(function).parameters, aliases)

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            return function(*args, **under_own_names(given, names))

        @functools.wraps(function)
        async def call_asynchronous(*args: Any, **given: Any) -> Any:
            awaited: Any = call(*args, **given)
            return await awaited

        made: Any = call_asynchronous if inspect.iscoroutinefunction(function) else call
        return cast("Callable[P, T]", made)

    return decorate
