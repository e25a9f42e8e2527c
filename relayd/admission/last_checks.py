"""The checks that may have to wait for something: the budgets of check 12, and an operator's plug-ins.

They come last, and once for each packet, so that no wait or charge is spent on a packet that is refused
anyway. An unproven origin (check 13) is reported after the budgets and before the plug-ins, which may wait.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from strata.protocol.errors import InvalidPacket

from relayd.admission.budgets import BUDGETED_TYPES, TrustBudgets
from relayd.admission.refusals import UNAVAILABLE
from relayd.admission.request import PublishRequest, PublishVerdict
from relayd.faults import FaultLog
from relayd.policy import Plugins
from relayd.store.types import StoreError

__all__ = ["LastChecks"]


class LastChecks:
    """Gives requests that passed the checks of the threads their verdict, at once or after a wait.

    `done(request)`, which must not raise, is called for each request that has waited, and `lost` for
    unexpected errors. `on_flush` is called after either.
    """

    def __init__(
        self,
        budgets: TrustBudgets,
        plugins: Plugins,
        *,
        done: Callable[[PublishRequest], None],
        lost: Callable[[PublishRequest, BaseException], None],
        on_flush: Callable[[], None],
        faults: FaultLog,
    ) -> None:
        self._budgets = budgets
        self._plugins = plugins
        self._done = done
        self._lost = lost
        self._on_flush = on_flush
        self._faults = faults
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: PublishRequest) -> None:
        """Give the request its verdict, or begin to wait for it; the verdict is pending meanwhile."""
        waits = request.packet.content_type in BUDGETED_TYPES or self._asks_plugins(request)
        if waits and not request.is_finished:
            request.verdict = PublishVerdict.PENDING
            task = asyncio.create_task(self._wait(request), name="publish-finish")
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._ended, request))
        else:
            _decide(request)
        request.is_finished = True

    def recount(self, request: PublishRequest) -> None:
        """Count the packet again, right before it is appended. Raises `InvalidPacket`."""
        if request.is_charged:
            self._budgets.recount(request.packet, request.witness)

    def settled(self, request: PublishRequest, stored_at: int | None = None) -> None:
        """Count what the packet was charged from `stored_at` on, or give it back. Never raises."""
        if request.is_charged:
            try:
                self._budgets.settled(request.packet, stored_at)
            except Exception as error:
                self._faults.caught("publish", error)

    async def close(self) -> None:
        """End the waits; their requests get no verdict."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._budgets.close(), *self._tasks, return_exceptions=True)

    def _asks_plugins(self, request: PublishRequest) -> bool:
        return bool(self._plugins) and request.origin_refusal is None

    async def _wait(self, request: PublishRequest) -> None:
        packet = request.packet
        try:
            if packet.content_type in BUDGETED_TYPES:
                await self._budgets.take(packet, request.witness, request.lane.publisher.payer)
                request.is_charged = True
            if self._asks_plugins(request):
                await self._plugins.check(packet, request.identity)
            _decide(request)
        except InvalidPacket as error:
            request.refuse(error)
        except StoreError:
            request.refuse(UNAVAILABLE)

    def _ended(self, request: PublishRequest, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return  # closed
        if (error := task.exception()) is not None:
            self._lost(request, error)
        elif request.is_ended:
            self.settled(request)
        else:
            self._done(request)
        self._on_flush()


def _decide(request: PublishRequest) -> None:
    if request.origin_refusal is not None:
        request.refuse(request.origin_refusal)
    else:
        request.verdict = PublishVerdict.PASSED
