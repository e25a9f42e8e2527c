"""The asyncio shell of publishing: copies are tasks, which continue in the background once confirmed."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from strata.protocol.errors import ConnectionFailed, RequestTimeout, StrataError
from strata.protocol.packets import Packet
from strata.relays.conduct import Aspect
from strata.relays.connection.dialing import shown
from strata.relays.peer_timeout import PeerTimeout
from strata.relays.pool.checks import Checks
from strata.relays.pool.options import PoolOptions
from strata.relays.pool.profiles import publish_delay
from strata.relays.pool.publish_plan import PublishPlan
from strata.relays.pool.relays import Relays
from strata.relays.pool.values import PoolPublished

__all__ = ["Publisher"]

_LEAST_SECONDS = 1.0
"""What a copy has at least. If less is left, the program may have paused, and the caller is still waiting."""


class _Publication:
    """One publish while any of its copies is under way."""

    def __init__(
        self,
        packet: Packet,
        plan: PublishPlan,
        waiter: asyncio.Future[None],
        on_stored: Callable[[], None] | None,
    ) -> None:
        self.packet = packet
        self._on_stored = on_stored
        self.error: Exception | None = None
        """The error that `on_stored` raised."""
        self.plan = plan
        self.waiter = waiter
        self.timer: asyncio.TimerHandle | None = None
        self.under_way: dict[str, asyncio.Task[None]] = {}
        self.is_abandoned = False

    def stored(self) -> None:
        """Note that a relay has said OK; the first time, call `on_stored`."""
        if self._on_stored is not None:
            tell, self._on_stored = self._on_stored, None
            try:
                tell()
            except Exception as error:  # the caller's error: raised to the caller, and no copy fails
                self.error = error

    def settle(self) -> None:
        """Wake the caller: enough relays have said OK, or no more answers matter."""
        if not self.waiter.done():
            self.waiter.set_result(None)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left to do."""
        return self.waiter.done() and self.timer is None and not self.under_way

    def abandon(self) -> None:
        """Stop sending, and stop waiting for answers."""
        self.is_abandoned = True
        self.stop_timer()
        for task in self.under_way.values():
            task.cancel()


class Publisher:
    """Every publish of one pool. At most `max_in_flight` publishes wait for confirmation; up to
    `max_background` copies are under way, and beyond that the oldest confirmed publish is abandoned."""

    def __init__(
        self, relays: Relays, checks: Checks, options: PoolOptions, *, random: Callable[[], float]
    ) -> None:
        self._relays = relays
        self._checks = checks
        self._options = options
        self._random = random
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(options.max_in_flight)
        self._background: OrderedDict[asyncio.Task[None], _Publication] = OrderedDict()
        self._publications: set[_Publication] = set()
        """All publishes that a caller waits for, or that wait for an answer or for their timer."""
        self._failure: StrataError | None = None

    def __len__(self) -> int:
        """The number of copies under way."""
        return len(self._background)

    async def publish(
        self, packet: Packet, timeout: float, on_stored: Callable[[], None] | None = None
    ) -> PoolPublished:
        """See `PacketPool.publish`."""
        deadline = self._loop.time() + timeout
        try:
            async with PeerTimeout(timeout), self._slots:
                await self._checks.wait_for_room()
                return await self._publish(packet, deadline, on_stored)
        except TimeoutError:
            self._relays.statistics.publish_failures += 1
            raise RequestTimeout(f"PUBLISH {packet.packet_id}", timeout) from None

    def fail(self, error: StrataError) -> None:
        """End every publish permanently: waiting calls receive the error."""
        self._failure = error
        for publication in list(self._publications):
            publication.stop_timer()
            publication.settle()
            self._let_go(publication)

    async def _publish(
        self, packet: Packet, deadline: float, on_stored: Callable[[], None] | None
    ) -> PoolPublished:
        if self._failure is not None:
            raise self._failure
        options, statistics = self._options, self._relays.statistics
        plan = PublishPlan(
            packet.packet_id,
            copies=max(options.copies, self._relays.profile.min_relays),
            confirmations=options.confirmations,
            retry_interval=options.retry_interval,
            retry_cap=options.retry_cap,
            deadline=deadline,
        )
        publication = _Publication(packet, plan, self._loop.create_future(), on_stored)
        self._publications.add(publication)
        self._send(publication, plan.start(self._relays.targets, self._loop.time()))
        try:
            await publication.waiter
        finally:
            if not plan.is_confirmed:
                publication.abandon()
            self._let_go(publication)
        if plan.is_confirmed:
            statistics.published += 1
            if publication.error is not None:
                raise publication.error
            return plan.result()
        statistics.publish_failures += 1
        raise self._failure or plan.last_error

    def _send(self, publication: _Publication, urls: Sequence[str]) -> None:
        """Start copies to these relays, and the timer for further ones."""
        plan = publication.plan
        for url in urls:
            self._relays.statistics.copies_sent += 1
            task = self._relays.spawn(self._copy(publication, url), f"strata-pool-copy {shown(url)}")
            publication.under_way[url] = task
            self._background[task] = publication
            task.add_done_callback(self._ended)
        publication.stop_timer()
        # Unless it is confirmed, the caller's patience ends it.
        if plan.get_timer() < (plan.deadline if plan.is_confirmed else math.inf):
            publication.timer = self._loop.call_at(plan.get_timer(), self._on_timer, publication)

    def _on_timer(self, publication: _Publication) -> None:
        publication.timer = None
        self._send(publication, publication.plan.handle_timer(self._relays.targets, self._loop.time()))
        self._let_go(publication)

    async def _copy(self, publication: _Publication, url: str) -> None:
        """Send one copy to one relay, after the profile's delay (R-405, R-406)."""
        plan, statistics = publication.plan, self._relays.statistics
        if delay := publish_delay(self._relays.profile, random=self._random):
            await asyncio.sleep(delay)
        began_at = self._loop.time()
        relay = self._relays.relay(url)
        try:
            if relay is None:
                raise ConnectionFailed(f"no connection to {shown(url)}")
            answer = await relay.publish(
                publication.packet, timeout=max(plan.deadline - began_at, _LEAST_SECONDS)
            )
        except StrataError as error:
            statistics.copies_failed += 1
            if self._failure is None:
                self._send(publication, plan.failed(url, error, self._relays.targets))
                if plan.refusal is not None:
                    publication.settle()
            return
        statistics.copies_stored += 1
        self._relays.observe(url, Aspect.PUBLISH, good=1, value=self._loop.time() - began_at)
        plan.stored(url, answer)
        publication.stored()
        self._checks.stored(publication.packet, url, answer)
        if plan.is_confirmed:
            publication.settle()
        if plan.get_timer() == math.inf:
            publication.stop_timer()

    def _ended(self, task: asyncio.Task[None]) -> None:
        publication = self._background.pop(task)
        for url in [url for url, copy in publication.under_way.items() if copy is task]:
            del publication.under_way[url]
        self._let_go(publication)
        if len(self._background) > self._options.max_background:
            self._trim()

    def _let_go(self, publication: _Publication) -> None:
        if publication.is_over:
            self._publications.discard(publication)

    def _trim(self) -> None:
        """Abandon the oldest publish that is confirmed; the presence check may still send its copies."""
        for publication in self._background.values():
            if publication.plan.is_confirmed and not publication.is_abandoned:
                self._relays.statistics.copies_abandoned += 1
                publication.abandon()
                return
