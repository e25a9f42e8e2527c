"""The relays of one pool, as its parts see them: which are connected, and how each is judged.

`PacketPool` is what a program uses; its readers, publisher and checks work with this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
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

    `tasks` is where the pool's tasks run. `came` is called with the URL of a relay that has just connected.
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
        """Some packets, and which relays have them."""
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

    # Who is there.

    @property
    def urls(self) -> list[str]:
        """Every relay, in the order added."""
        return self._membership.urls

    def add(self, url: str) -> None:
        """Make another relay known. Idempotent."""
        self._membership.add(url)
        self.wake()

    def remove(self, url: str) -> None:
        """Leave a relay and forget its score, in the scores file too: it would come back from there."""
        self._membership.remove(url)
        self._scores.forget(url)
        self.known.forget(url)
        self.wake()

    def relay(self, url: str) -> PoolRelay | None:
        """The connection at this seat, whether up or down."""
        link = self._links.get(url)
        return None if link is None else link.relay

    def connected(self) -> list[str]:
        """The relays that are connected just now."""
        return [url for url in self._links if self._membership.is_connected(url)]

    def readers(self, current: Sequence[str]) -> list[str]:
        """Which relays a subscription that reads from `current` should read from (R-404)."""
        return self._membership.readers(max(self._options.readers, self.profile.min_relays), current)

    def views(self) -> list[RelayView]:
        """What is known about every relay, best first."""
        views = [self._scores.view(url, connected=self._membership.is_connected(url)) for url in self.urls]
        order = list(Standing)
        return sorted(views, key=lambda view: (order.index(view.standing), -view.score))

    # What is seen of them.

    def observe(
        self, url: str, kind: Aspect, good: int = 0, bad: int = 0, value: float | None = None
    ) -> None:
        """Take note of something seen of a relay. What is still seen of one that was removed is forgotten."""
        if url not in self._membership:
            return
        self._scores.observe(url, kind, good, bad, value)
        if bad:
            self.wake()  # it may have been one offence too many

    def served(self, delivery: Delivery, url: str) -> None:
        """A relay gave this packet, so the relay has it."""
        self.known.seen(delivery.packet, url, self._wall())

    def ping_result(self, url: str, *, answered: bool) -> None:
        """A relay gave a sign of life, or did not."""
        if answered:
            self._membership.ping_answered(url)
        else:
            self._membership.ping_missed(url)
            self.wake()

    def link_changed(self, url: str, *, connected: bool) -> None:
        """A connection came or went."""
        if connected:
            self._membership.connected(url)
            self._came(url)
        else:
            self._membership.disconnected(url, asyncio.get_running_loop().time())
        self.targets = self._membership.targets()
        self.wake()

    # What is done about it.

    async def load(self, path: Path) -> None:
        """Go on from a scores file; the relays known to the file alone are added (R-340).

        Raises `OSError` for a file that cannot be used.
        """
        for url in await self._scores.load(path, lambda: self.urls):
            self._membership.add(url)

    async def write_scores(self) -> None:
        """Write what is observed to the scores file, if there is one, until cancelled."""
        await self._scores.run()

    def close_scores(self) -> None:
        """Close the file if `write_scores` has not begun, which closes it otherwise. Idempotent."""
        self._scores.close()

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """A task that ends with the pool at the latest."""
        return self.tasks.create_task(work, name=name)

    def wake(self) -> None:
        """Have everything looked after soon."""
        self._woken.set()

    async def woken(self) -> None:
        """Wait until somebody calls `wake`, or has called it since `arrange`."""
        await self._woken.wait()

    def arrange(self, now: float) -> None:
        """Judge every relay, and bring seats and links in step."""
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
                # It has lost its seat and got it again since we last looked, so its connection was kept.
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
