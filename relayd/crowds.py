"""Work for each of a crowd that comes due at once, done for some at a time (decision 49).

When the database goes away, thousands of requests fail in one step; when there is room again, thousands of
publishers may be read from. Doing all of that in one step takes longer than anything else may wait for the
loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from relayd.faults import FaultLog
from relayd.slices import Slices

__all__ = ["CrowdWork"]

M = TypeVar("M")


class CrowdWork(Generic[M]):
    """Calls `work(member)` for each of its `members`, once and in order: some now, some in later turns of the
    loop, as long as `may_go_on`. After each few, `after` is called. A fault leaves nobody behind.
    """

    def __init__(
        self,
        slices: Slices,
        work: Callable[[M], None],
        faults: FaultLog,
        *,
        may_go_on: Callable[[], bool] = lambda: True,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._slices = slices
        self._work = work
        self._faults = faults
        self._may_go_on = may_go_on
        self._after = after
        self._is_going_on = False
        self.members: dict[M, None] = {}
        """Those that wait. Whoever adds one, or lets them go on, calls `go_on`."""

    def go_on(self) -> None:
        """Work for the members, if they may go on. Never raises."""
        if not self._is_going_on:
            self._do_some()

    def _do_some(self) -> None:
        self._is_going_on = True
        is_later = False
        try:
            while self.members and self._may_go_on():
                self._do_first()
                if self._slices.is_over():
                    self._slices.later(self._do_some)
                    is_later = True
                    break
            self._after()
        except Exception as error:
            self._faults.caught("background", error)
            while self.members and not is_later:  # perhaps nobody comes again who would go on with them
                self._do_first()
        finally:
            self._is_going_on = is_later

    def _do_first(self) -> None:
        member = next(iter(self.members))
        del self.members[member]
        try:
            self._work(member)
        except Exception as error:
            self._faults.caught("background", error)
