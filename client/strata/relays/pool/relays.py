"""The relays of one pool, as its parts see them: which are connected, and how each is judged.

Programs use `PacketPool`; its readers, publisher and checks use this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Coroutine, Iterable, Sequence
from pathlib import Path

from strata.relays.conduct import Aspect, Standing
from strata.relays.connection.dialing import shown
from strata.relays.connection.values import Delivery
from strata.relays.pool.link import Link, MakeRelay, PoolRelay
from strata.relays.pool.membership import Membership
from strata.relays.pool.options import PoolOptions
from strata.relays.pool.probes import KnownPackets
from strata.relays.pool.profiles import EffectiveProfile, effective_profile
from strata.relays.pool.scorekeeper import Scorekeeper
from strata.relays.pool.values import PoolStatistics, RelayView

__all__ = ["Relays"]

_log = logging.getLogger("strata.pool")


class Relays:
    """Every relay of a pool: seats and links, scores, and the packets each is known to have.

    The pool's tasks run in `tasks`. `came` is called with the URL of a relay that has just connected.
    """

    def __init__(
        self,
        urls: Iterable[str],
        options: PoolOptions,
        *,
        make: MakeRelay,
        came: Callable[[str], None],
        wall: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        self.statistics = PoolStatistics()
        self.known = KnownPackets(random=random)
        """A sample of packets, and the relays that have them."""
        self.tasks = asyncio.TaskGroup()
        self.targets: Sequence[str] = ()
        """Where to publish, best first."""
        self._options = options
        self._make = make
        self._came = came
        self._wall = wall
        self._random = random
        self._scores = Scorekeeper(wall)
        self._membership = Membership(
            urls,
            options,
            standing=self._scores.standing,
            score=self._scores.score,
            random=random,
        )
        self._links: dict[str, Link] = {}
        self._link_tasks: dict[str, asyncio.Task[None]] = {}
        self._woken = asyncio.Event()
        self.profile = self._effective_profile()
        """The privacy profile in force."""

    # Members.

    @property
    def urls(self) -> list[str]:
        """Every relay, in the order added."""
        return self._membership.urls

    def add(self, url: str) -> None:
        """Add a relay to the pool. Idempotent."""
        self._membership.add(url)
        self.wake()

    def remove(self, url: str) -> None:
        """Remove a relay and forget its score, in the scores file too: else it would come back from there."""
        self._membership.remove(url)
        self._scores.forget(url)
        self.known.forget(url)
        self.wake()

    def relay(self, url: str) -> PoolRelay | None:
        """The connection to this relay, whether it is up or down; None if the relay has none."""
        link = self._links.get(url)
        return None if link is None else link.relay

    def connected(self) -> list[str]:
        """The relays that are connected now."""
        return [url for url in self._links if self._membership.is_connected(url)]

    def readers(self, current: Sequence[str], without: Container[str] = ()) -> list[str]:
        """The relays that a subscription now reading from `current` should read from, none of `without`
        (R-404)."""
        wanted = max(self._options.readers, self.profile.min_relays)
        return self._membership.readers(wanted, current, without)

    def views(self) -> list[RelayView]:
        """What is known about every relay, best first."""
        views = [self._scores.view(url, connected=self._membership.is_connected(url)) for url in self.urls]
        order = list(Standing)
        return sorted(views, key=lambda view: (order.index(view.standing), -view.score))

    # Observations.

    def observe(
        self, url: str, kind: Aspect, good: int = 0, bad: int = 0, value: float | None = None
    ) -> None:
        """Record an observation of a relay; ignored if the relay has been removed."""
        if url not in self._membership:
            return
        self._scores.observe(url, kind, good, bad, value)
        if bad:
            self.wake()  # this may change its standing

    def served(self, delivery: Delivery, url: str, *, named: bool) -> None:
        """Note that a relay sent this packet, so it has it. `named`: for a query that named its author."""
        self.known.seen(delivery.packet, url, self._wall(), named=named)

    def ping_result(self, url: str, *, answered: bool) -> None:
        """Note the result of a ping."""
        if answered:
            self._membership.ping_answered(url)
        else:
            self._membership.ping_missed(url)
            self.wake()

    def link_changed(self, url: str, *, connected: bool) -> None:
        """Note that a connection was made or lost."""
        if connected:
            self._membership.connected(url)
            self._came(url)
        else:
            self._membership.disconnected(url, asyncio.get_running_loop().time())
        self.targets = self._membership.targets()
        self.wake()

    # Actions.

    async def load(self, path: Path) -> None:
        """Load a scores file; relays that only the file knows are added (R-340).

        Raises `OSError` for a file that cannot be used.
        """
        for url in await self._scores.load(path, lambda: self.urls):
            self._membership.add(url)

    async def write_scores(self) -> None:
        """Write observations to the scores file, if there is one, until cancelled."""
        await self._scores.run()

    def close_scores(self) -> None:
        """Close the file unless `write_scores` has begun, which closes it itself. Idempotent."""
        self._scores.close()

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Start a task that ends with the pool at the latest."""
        return self.tasks.create_task(work, name=name)

    def wake(self) -> None:
        """Have the housekeeper run soon."""
        self._woken.set()

    async def woken(self) -> None:
        """Wait until `wake` is called, or return at once if it was called since `arrange`."""
        await self._woken.wait()

    def arrange(self, now: float) -> None:
        """Judge every relay, reassign the seats, and start and end links to match them."""
        self._woken.clear()
        for link in self._links.values():
            link.report()
        self.statistics.relays_blacklisted += self._scores.judge(self.urls)
        tried = self._membership.sample(now)
        if tried is not None:
            self.statistics.relays_sampled += 1
            _log.info("trying %s", shown(tried))
        seats = self._membership.seats(now)
        for url in [url for url in self._links if url not in seats]:
            del self._links[url]
            self._link_tasks.pop(url).cancel()
        for url in seats:
            kept = self._links.get(url)
            if kept is None:
                link = Link(url, self._make, self._options, self, random=self._random)
                self._links[url] = link
                self._link_tasks[url] = self.spawn(link.run(), f"strata-pool-link {shown(url)}")
            elif kept.is_connected and not self._membership.is_connected(url):
                # It has lost its seat and regained it since the last call, so its connection was kept.
                self._membership.connected(url)
        self.targets = self._membership.targets()
        self._update_profile()
        self.statistics.scores_lost = self._scores.lost

    def _update_profile(self) -> None:
        profile = self._effective_profile()
        if profile != self.profile:
            for warning in set(profile.warnings) - set(self.profile.warnings):
                _log.warning("%s", warning)
            self.profile = profile

    def _effective_profile(self) -> EffectiveProfile:
        return effective_profile(
            self._options.profile,
            relays=len(self._membership.usable()),
            has_proxy=self._options.relay.proxy is not None,
        )
