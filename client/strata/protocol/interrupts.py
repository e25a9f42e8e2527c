"""Ctrl-C while a program is still being loaded."""

from __future__ import annotations

import signal
from types import TracebackType

__all__ = ["EndsAtOnce"]


class EndsAtOnce:
    """A context in which Ctrl-C ends the process by the system's default action, without a message.

    It covers what a program does before it knows its command, above all imports: during an import a
    KeyboardInterrupt may print a traceback, be swallowed, or crash a C module that is half initialised. If
    Ctrl-C is ignored or has another handler already, nothing changes.
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
