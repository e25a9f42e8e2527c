"""Our own faults: unexpected exceptions raised while a request is handled.

The code that catches a fault answers the request and continues; this module counts and logs the fault. A
stranger may have found a way to cause it with every frame, so each place in the code gets one log line in ten
seconds. The line names the exception and where it came from, and never its text, which may quote a packet
(R-328).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from relayd.logs import get_logger

__all__ = ["FAULT_PLACES", "FaultLog"]

FAULT_PLACES: Final = (
    "publish",
    "commit",
    "writer",
    "identity",
    "feed",
    "message",
    "auth",
    "backlog",
    "http",
    "write",
    "tracing",
    "background",
)
"""The places where faults are caught; the label values of their metric."""

_LOG_INTERVAL: Final = 10.0
_MAX_REMEMBERED: Final = 256
_FRAMES: Final = 6

_log = get_logger("relayd.faults")


class FaultLog:
    """Counts and logs faults; `on_fault(place)` counts one. Use it on the event loop."""

    def __init__(
        self,
        on_fault: Callable[[str], None] = lambda place: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_fault = on_fault
        self._clock = clock
        self._next_line_at: dict[tuple[str, str, str], float] = {}
        self._unsaid: dict[tuple[str, str, str], int] = {}

    def caught(self, place: str, error: BaseException) -> None:
        """Count this fault, and log it unless the same was logged just now. Never raises."""
        try:
            self._on_fault(place)
            self._tell(place, error)
        except Exception:
            _log.critical("fault_not_told", place=place)

    def _tell(self, place: str, error: BaseException) -> None:
        came_from = _came_from(error.__traceback__)
        fault = place, type(error).__name__, came_from
        now = self._clock()
        if now < self._next_line_at.get(fault, 0.0):
            self._unsaid[fault] = self._unsaid.get(fault, 0) + 1
            return
        if len(self._next_line_at) >= _MAX_REMEMBERED:
            self._next_line_at.clear()
            self._unsaid.clear()
        self._next_line_at[fault] = now + _LOG_INTERVAL
        more = self._unsaid.pop(fault, 0)
        _log.error("fault", place=place, error=fault[1], came_from=came_from, more=more)


def _came_from(trace: TracebackType | None) -> str:
    """The innermost calls of a traceback, outermost first."""
    frames: list[str] = []
    while trace is not None:
        frames.append(f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ".join(frames[-_FRAMES:])
