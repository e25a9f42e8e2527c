"""Requests that fail together are answered some at a time (decision 49).

When the database goes away, thousands of requests fail in one step: to answer them all takes longer than
anything else may wait for the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from strata.protocol.errors import InvalidPacket

from relayd.admission.request import PublishRequest
from relayd.slices import Slices

__all__ = ["FailingTogether"]


class FailingTogether:
    """Passes each request to `failed(request, error)`, which must not raise: at once while this turn of the
    loop has time, else in one of the next turns, in order. `on_flush` is called after each few."""

    def __init__(
        self,
        slices: Slices,
        failed: Callable[[PublishRequest, InvalidPacket], None],
        on_flush: Callable[[], None],
    ) -> None:
        self._slices = slices
        self._failed = failed
        self._on_flush = on_flush
        self._waiting: deque[tuple[PublishRequest, InvalidPacket]] = deque()

    def put(self, request: PublishRequest, error: InvalidPacket) -> None:
        """Answer this request now or soon. Until then it holds what it held."""
        self._waiting.append((request, error))
        if len(self._waiting) > 1:
            return
        if self._slices.is_over():
            self._slices.later(self._answer_some)
        else:
            self._answer_some()

    def _answer_some(self) -> None:
        try:
            self._failed(*self._waiting.popleft())
            while self._waiting and not self._slices.is_over():
                self._failed(*self._waiting.popleft())
            self._on_flush()
        finally:
            if self._waiting:
                self._slices.later(self._answer_some)
