"""Publishers that are not read from until there is room for their packets.

There may be thousands, and reading again takes each of them a little of the loop. So they are told of room
some at a time (decision 49): those first who have waited longest, and no more of them than find it.
"""

from __future__ import annotations

from collections.abc import Callable

from relayd.admission.request import Publisher
from relayd.faults import Faults
from relayd.slices import Slices

__all__ = ["HeldPublishers"]


class HeldPublishers:
    """Tells each publisher once, by `room_again`, when `is_full` says that there is room."""

    def __init__(self, slices: Slices, is_full: Callable[[], bool], faults: Faults) -> None:
        self._slices = slices
        self._is_full = is_full
        self._faults = faults
        self._publishers: dict[Publisher, None] = {}
        self._is_telling = False

    def __len__(self) -> int:
        return len(self._publishers)

    def add(self, publisher: Publisher) -> None:
        """Tell this publisher when there is room."""
        self._publishers[publisher] = None

    def discard(self, publisher: Publisher) -> None:
        """Do not tell this publisher."""
        self._publishers.pop(publisher, None)

    def tell(self) -> None:
        """There may be room: tell them while there is, some in later turns of the loop. Never raises."""
        if self._publishers and not self._is_telling:
            self._tell_some()

    def _tell_some(self) -> None:
        self._is_telling = True
        while self._publishers and not self._is_full():
            publisher = next(iter(self._publishers))
            self.discard(publisher)
            try:
                publisher.room_again()
            except Exception as error:
                self._faults.caught("publish", error)
            if self._slices.is_over():
                self._slices.later(self._tell_some)
                return
        self._is_telling = False
