"""Ctrl-C and SIGTERM while a program is still being loaded."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

__all__ = ["EndsAtOnce"]


class EndsAtOnce:
    """A context in which Ctrl-C ends the process by the system's default action, without a message.

    It covers what a program does before it knows its command, above all imports: during an import a
    KeyboardInterrupt may print a traceback, be swallowed, or crash a C module that is half initialised. If
    Ctrl-C is ignored or has another handler already, nothing changes.

    The first process of a container has no default actions: the kernel drops its signals. There a handler
    ends the process, also for SIGTERM, and stays in place for SIGTERM until the program sets its own.
    """

    def __enter__(self) -> None:
        is_first = os.getpid() == 1
        self._is_due = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_due:
            signal.signal(signal.SIGINT, _end if is_first else signal.SIG_DFL)
        if is_first and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_due:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
