"""A process that is killed at a chosen system call that changes files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from strata_pipeline.lake import files

__all__ = ["Calls", "Killed", "counted"]

CHANGING = (
    "mkdir",
    "rmdir",
    "unlink",
    "remove",
    "rename",
    "replace",
    "link",
    "symlink",
    "open",
    "write",
    "fsync",
)


class Killed(BaseException):
    """Nothing in the product catches this, as nothing catches SIGKILL."""


class Calls:
    """Counts the calls and ends the process at one of them: further calls change nothing."""

    def __init__(self, last: int | None) -> None:
        self.names: list[str] = []
        """The names of the calls, in order."""
        self._last = last

    def through(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """The call, wrapped so that it is counted."""

        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not _writes(arguments, options):
                return real(*arguments, **options)
            if self._last is not None and len(self.names) >= self._last:
                if name == "write" and len(self.names) == self._last:
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])  # torn
                self.names.append(name)
                raise Killed
            self.names.append(name)
            return real(*arguments, **options)

        return call


@contextmanager
def counted(last: int | None = None, *, at_once: bool = True) -> Iterator[Calls]:
    """Let the process make `last` calls that change files, and kill it at the next; None never kills it.

    `at_once` is whether the file system can exchange two folders in one step.
    """
    calls = Calls(last)
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGING:
            patch.setattr(os, name, calls.through(name, getattr(os, name)))
        exchange = files._exchange_at_once
        patch.setattr(
            files,
            "_exchange_at_once",
            calls.through("exchange", exchange) if at_once else lambda one, other: False,
        )
        yield calls


def _writes(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    flags = options.get("flags", arguments[1] if len(arguments) > 1 else 0)
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
