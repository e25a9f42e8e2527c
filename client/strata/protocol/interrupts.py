"""Ctrl-C while a program is still being loaded."""

from __future__ import annotations

import signal
from types import TracebackType

__all__ = ["EndsAtOnce"]


class EndsAtOnce:
    """A context in which Ctrl-C ends the process as the system ends any, without a word.

    For what a program does before it knows its command, imports above all: amid them a KeyboardInterrupt
    comes out as a traceback, or is swallowed, or brings down a module in C that is half made. Where Ctrl-C
    is ignored, or means something else already, it stays so.
    """

    def __enter__(self) -> None:
        self._is_due = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_due:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_due:
            signal.signal(signal.SIGINT, signal.default_int_handler)
