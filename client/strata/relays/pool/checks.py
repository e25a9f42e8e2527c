"""The checks that a pool makes in the background: pings, random packets, presence (C-274, C-277, R-343)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence

from strata.protocol.equivalence import equivalence_key
from strata.protocol.errors import RequestRefused, RequestTimeout, StrataError
from strata.protocol.packets import Packet
from strata.relays.conduct import Aspect, Evidence, Suspicion
from strata.relays.connection.dialing import shown
from strata.relays.connection.values import Published, SubscribeOptions
from strata.relays.peer_timeout import PeerTimeout
from strata.relays.pool.link import PoolRelay
from strata.relays.pool.options import PoolOptions
from strata.relays.pool.presence import Answer, Lookup, PresenceWatch, Resend
from strata.relays.pool.relays import Relays

__all__ = ["Checks"]

_FIRST_PING_AFTER = 1.0
_MIN_LIFE_SECONDS = 600
"""A packet that expires sooner is not checked, because a relay may rightly have dropped it."""


class Checks:
    """Runs every check when it is due. Each request has a deadline; at most one ping and one probe are under
    way for each relay."""

    def __init__(
        self,
        relays: Relays,
        options: PoolOptions,
        *,
        copies: int,
        random: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._relays = relays
        self._options = options
        self._random = random
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        delay = options.presence_delay
        self._watch = PresenceWatch(
            copies=copies,
            delay=math.inf if delay is None else delay,
            attempts=options.presence_attempts,
            capacity=options.presence_packets,
        )
        self._room = asyncio.Event()
        self._ended = False
        self._ping_at: dict[str, float] = {}
        self._probe_at = math.inf
        self._busy: set[tuple[str, str]] = set()

    # Presence.

    async def wait_for_room(self) -> None:
        """Wait until another packet can be watched: publishing is no faster than checking.

        After `end` this returns at once.
        """
        while self._options.presence_delay is not None and self._watch.is_full and not self._ended:
            self._room.clear()
            await self._room.wait()

    def end(self) -> None:
        """Note that no further check will be made: `wait_for_room` no longer waits. Idempotent."""
        self._ended = True
        self._room.set()

    def stored(self, packet: Packet, url: str, answer: Published) -> None:
        """Note that a relay said OK to this packet, or QUEUED (R-190): it will be asked for the packet."""
        now = self._wall()
        if answer.duplicate_of is not None and equivalence_key(packet) is not None:
            self._watch.repeats(packet, url)  # the relay has another packet in its place
            return
        if not answer.queued:
            self._relays.known.seen(packet, url, now, acknowledged=not answer.duplicate)
        if self._options.presence_delay is None:
            return
        if packet.expires_at is None or packet.expires_at > now + _MIN_LIFE_SECONDS:
            excused = answer.queued or answer.duplicate
            self._watch.claimed(packet, url, self._loop.time(), excused=excused)

    @property
    def unsettled(self) -> int:
        """The number of packets whose presence is still being checked."""
        return len(self._watch)

    # What is due.

    def run_due(self) -> None:
        """Start the checks that are due."""
        now = self._loop.time()
        connected = self._relays.connected()
        if self._options.presence_delay is not None:
            for lookup in self._watch.due(now, set(connected)):
                self._relays.spawn(self._look(lookup), f"strata-pool-presence {shown(lookup.url)}")
            self._settle()
        if self._options.ping_interval is not None:
            for url in connected:
                due_at = self._ping_at.setdefault(url, now + _FIRST_PING_AFTER * self._random())
                if now >= due_at:
                    self._ping_at[url] = now + self._options.ping_interval
                    self._once("ping", url, self._ping(url))
            for url in self._ping_at.keys() - set(connected):
                del self._ping_at[url]
        interval = self._options.probe_interval
        if interval is not None:
            if self._probe_at == math.inf:
                self._probe_at = now + interval * self._random()
            if now >= self._probe_at:
                self._probe_at = now + interval * (0.5 + self._random())
                if connected:
                    url = connected[min(int(self._random() * len(connected)), len(connected) - 1)]
                    self._once("probe", url, self._probe(url))

    def get_timer(self) -> float:
        """When `run_due` has something to do."""
        presence = math.inf if self._options.presence_delay is None else self._watch.get_timer()
        return min(presence, self._probe_at, *self._ping_at.values(), math.inf)

    def _once(self, check: str, url: str, work: Coroutine[object, object, None]) -> None:
        if (check, url) in self._busy:
            work.close()
            return
        self._busy.add((check, url))
        task = self._relays.spawn(work, f"strata-pool-{check} {shown(url)}")
        task.add_done_callback(lambda _: self._busy.discard((check, url)))

    # Pings (C-277).

    async def _ping(self, url: str) -> None:
        """Ping with a query whose answer is empty: no packet has timestamp 0."""
        relay = self._relays.relay(url)
        if relay is None:
            return
        began_at = self._loop.time()
        try:
            async with PeerTimeout(self._options.ping_timeout):
                async with relay.subscribe(since=0, until=0, limit=1, live=False) as answer:
                    async for _ in answer:
                        pass
        except RequestRefused:
            pass  # a refusal is a sign of life
        except (StrataError, TimeoutError):
            self._relays.statistics.pings_failed += 1
            self._relays.observe(url, Aspect.PING, bad=1)
            self._relays.ping_result(url, answered=False)
            return
        took = self._loop.time() - began_at
        self._relays.observe(url, Aspect.PING, good=1, value=took if _marks_history(relay) else None)
        self._relays.ping_result(url, answered=True)

    # Looking for packets.

    async def _find(self, url: str, packets: Sequence[Packet], found: set[str]) -> Answer:
        """Add the ids that the relay has to `found`; return what its answer says about the others."""
        relay = self._relays.relay(url)
        if relay is None:
            return Answer.BROKEN
        circumstances = _circumstances(relay)
        times = [packet.timestamp for packet in packets]
        # Author and time narrow the search for a relay that cannot look up packets by id.
        query: SubscribeOptions = {
            "packet_ids": [packet.packet_id for packet in packets],
            "authors": {packet.author_id for packet in packets},
            "since": min(times),
            "until": max(times),
            "limit": len(packets),
            "live": False,
        }
        try:
            async with PeerTimeout(self._options.request_timeout):
                async with relay.subscribe(**query) as answer:
                    async for delivery in answer:
                        found.add(delivery.packet.packet_id)
        except (RequestTimeout, TimeoutError):
            if relay.is_connected and _circumstances(relay) == circumstances:
                self._relays.observe(url, Aspect.PING, bad=1)  # it is there, and does not answer
            return Answer.BROKEN
        except StrataError:
            return Answer.BROKEN
        is_clear = _marks_history(relay) and _circumstances(relay) == circumstances
        return Answer.DENIAL if is_clear else Answer.SILENCE

    async def _probe(self, url: str) -> None:
        now = self._wall()
        probe = self._relays.known.choose(url, now)
        if probe is None:
            return
        self._relays.statistics.probes += 1
        found: set[str] = set()
        answer = await self._find(url, [probe.packet], found)
        if answer is Answer.BROKEN:
            return
        if not found:
            self._relays.statistics.probes_missed += 1
            self._relays.known.lacked(probe.packet, url)
        is_plain = found or probe.kind is Aspect.CONSISTENCY
        self._relays.observe(url, probe.kind if is_plain else _offence(answer), len(found), 1 - len(found))

    async def _look(self, lookup: Lookup) -> None:
        found: set[str] = set()
        answer = await self._find(lookup.url, lookup.packets, found)
        if found:
            self._relays.observe(lookup.url, Aspect.PRESENCE, good=len(found))
        missing = len(lookup.packets) - len(found)
        if missing and answer is not Answer.BROKEN:
            self._relays.statistics.presence_missing += missing
            offence = Aspect.CONSISTENCY if lookup.excused else _offence(answer)
            self._relays.observe(lookup.url, offence, bad=missing)
            for packet in lookup.packets:
                if packet.packet_id not in found:
                    self._relays.known.lacked(packet, lookup.url)
        self._watch.answered(lookup, found, answer)
        self._settle()

    def _settle(self) -> None:
        statistics = self._relays.statistics
        for resend in self._watch.settle(self._loop.time(), self._relays.targets):
            statistics.presence_resent += 1
            self._relays.spawn(self._resend(resend), f"strata-pool-resend {shown(resend.url)}")
        statistics.presence_given_up, statistics.presence_thin = self._watch.given_up, self._watch.thin
        if not self._watch.is_full:
            self._room.set()

    async def _resend(self, resend: Resend) -> None:
        relay = self._relays.relay(resend.url)
        if relay is None:
            return
        try:
            answer = await relay.publish(resend.packet, timeout=self._options.request_timeout)
        except StrataError:
            return  # the next round of the check decides again
        self.stored(resend.packet, resend.url, answer)


def _offence(answer: Answer) -> Evidence | Suspicion:
    """The offence of lacking a packet that the relay had acknowledged: only a denial is a lie."""
    return Aspect.PRESENCE if answer is Answer.DENIAL else Aspect.CONSISTENCY


def _circumstances(relay: PoolRelay) -> tuple[int, ...]:
    """Counters that stay the same if an answer came over one connection and none of it was dropped here."""
    counts = relay.statistics
    return (
        counts.connections,
        counts.connections_lost,
        counts.events_invalid,
        counts.events_tampered,
        counts.events_expired,
        counts.messages_invalid,
    )


def _marks_history(relay: PoolRelay) -> bool:
    """Whether the relay marks the end of its answers; without that, the time to an answer is no latency."""
    return relay.announced is not None and "history_marker" in relay.announced.extensions
