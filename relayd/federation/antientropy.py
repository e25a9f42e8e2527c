"""Standing comparisons with the peers: `comparing` says how, and `rounds` says when.

Peers are compared with at the same time, each when it has its turn (`comparison_turns`).

An operator requests a comparison in the table of peers, from any process, and reads its state there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
from strata.relays.conduct import Aspect

from relayd.faults import FaultLog
from relayd.federation.comparing import (
    MOST_REFUSED,
    RECENT_SECONDS,
    Comparable,
    CompareParts,
    ComparisonResult,
    Fetched,
    compare,
)
from relayd.federation.comparison_turns import ComparisonTurns
from relayd.federation.link_parts import LinkEnded
from relayd.federation.peers_file import Upstream
from relayd.federation.rounds import Rounds
from relayd.federation.withholding import Withholding
from relayd.logs import get_logger
from relayd.metrics import Metrics
from relayd.store import Store
from relayd.store.peers import PeerComparison
from relayd.store.types import StoreError

__all__ = ["DIFFERENCES", "AntiEntropy"]

_log = get_logger("relayd.federation")

_EDGE_SECONDS = 3600
"""Packets that are nearly too old to be taken are left out: they would be too old on arrival."""


class ReadLink(Protocol):
    """The link by which a comparison fetches packets: `link.Link`."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def has_read_all(self) -> bool: ...

    async def fetch(self, ids: Sequence[bytes]) -> Fetched: ...


class ComparisonTable(Protocol):
    """The table to which results are written: `store.peers.PeerStore`."""

    async def compared(
        self, peer_id: int, found: dict[str, object], *, done: int | None, equal_at: int | None
    ) -> None: ...


DIFFERENCES: Final = ("brought", "known", "refused", "withheld", "have")
"""The counts of a comparison, by their names in `ComparisonResult` and in the metric."""


@dataclass(slots=True)
class _Spell:
    """What one comparison has been through."""

    waited: float = 0.0
    """For how many seconds it has waited for its turns."""
    has_read_all: bool = True
    """Whether the whole log of the peer had been read at each turn."""


class AntiEntropy:
    """Compares sets with each peer whose link is up."""

    def __init__(
        self,
        *,
        connect: Callable[[Upstream], AbstractAsyncContextManager[Comparable]],
        store: Store,
        table: ComparisonTable,
        metrics: Metrics,
        faults: FaultLog,
        clock: Callable[[], int],
        interval: float,
        max_items: int,
        max_backfill_seconds: int,
        noted: Callable[[Upstream, int, Aspect, bool], None],
    ) -> None:
        """`noted` is called with a peer, its number, an aspect of its conduct, and whether that is good."""
        self._connect = connect
        self._store = store
        self._table = table
        self._metrics = metrics
        self._faults = faults
        self._clock = clock
        self._interval = interval
        self._max_items = max_items
        self._max_backfill_seconds = max_backfill_seconds
        self._noted = noted
        self._withholding: dict[int, Withholding] = {}
        self._lacking: dict[int, dict[bytes, None]] = {}
        self._rounds: dict[int, Rounds] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turns = ComparisonTurns()

    def doubt(self, peer_id: int) -> None:
        """Cursors of this peer may have skipped packets that are missing here: compare everything soon."""
        now = time.monotonic()
        self._rounds_of(peer_id, now).doubt(now)

    def _rounds_of(self, peer_id: int, now: float) -> Rounds:
        if peer_id not in self._rounds:
            self._rounds[peer_id] = Rounds(self._interval, now, random.random, most_refused=MOST_REFUSED)
        return self._rounds[peer_id]

    def look_after(
        self, peer: Upstream, peer_id: int, link: ReadLink | None, asked: PeerComparison | None
    ) -> None:
        """Begin a comparison if one is due or requested, and the link is up."""
        now = time.monotonic()
        rounds = self._rounds_of(peer_id, now)
        if asked is not None and asked.equal_at is not None:
            self._metrics.peer_equal_at.labels(peer.relay_id).set(asked.equal_at)
        task = self._tasks.get(peer_id)
        if link is None or not link.is_connected or (task is not None and not task.done()):
            return
        is_asked = asked is not None and asked.asked > asked.done
        is_due = rounds.is_due(now)
        if not is_asked and not is_due:
            return
        whole = rounds.begin(now, whole=is_asked and (asked is None or asked.asked_since is None))
        oldest = self._clock() - self._max_backfill_seconds + _EDGE_SECONDS
        since = oldest if whole else max(oldest, self._clock() - RECENT_SECONDS)
        if is_asked and asked is not None and asked.asked_since is not None:
            # If a regular comparison is due as well, this one replaces it.
            since = max(oldest, min(asked.asked_since, since) if whole or is_due else asked.asked_since)
        self._tasks[peer_id] = asyncio.create_task(
            self._run(peer, peer_id, link, max(0, since), rounds, asked.asked if asked else 0),
            name=f"compare {peer.relay_id}",
        )

    async def stop(self, peer_id: int) -> None:
        """Stop comparing with this peer for now."""
        task = self._tasks.pop(peer_id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def stop_all(self) -> None:
        """Stop all comparisons."""
        for peer_id in list(self._tasks):
            await self.stop(peer_id)

    async def _run(
        self, peer: Upstream, peer_id: int, link: ReadLink, since: int, rounds: Rounds, asked: int
    ) -> None:
        withholding = self._withholding.setdefault(peer_id, Withholding())
        began, spell = time.monotonic(), _Spell()
        try:
            found = await self._compared(peer, peer_id, link, since, withholding, rounds.most_refused, spell)
        except (LinkEnded, StoreError) as error:
            found = ComparisonResult(since, since, problem=str(error)[:300])
            _log.info("comparison_ended", peer=peer.relay_id, problem=found.problem)
        except Exception as error:
            found = ComparisonResult(since, since, problem="this relay failed on it")
            self._faults.caught("background", error)
        # The request is answered in any case, or it would be tried again each second.
        now = time.monotonic()
        rounds.ended(
            now,
            now - began - spell.waited,
            is_whole=found.is_whole,
            has_brought=found.brought > 0,
            has_unfetched=found.unfetched > 0,
        )
        self._count(peer, found)
        equal_at = found.at if found.is_equal else None
        try:
            await self._table.compared(peer_id, msgspec.to_builtins(found), done=asked, equal_at=equal_at)
        except StoreError as error:
            _log.info("comparison_not_written", peer=peer.relay_id, problem=str(error))
        # What a peer of a group had from another one, that one should have sent.
        may_blame = spell.has_read_all and not peer.group
        self._note(peer, peer_id, found, contradicts=withholding.round_ended(), may_blame=may_blame)

    def _note(
        self, peer: Upstream, peer_id: int, found: ComparisonResult, *, contradicts: bool, may_blame: bool
    ) -> None:
        """One note for a comparison, of any size: packets held back must not earn a peer a good record.

        `may_blame`: reading this peer should have brought what the comparison brought.
        """
        if contradicts:
            self._noted(peer, peer_id, Aspect.PRESENCE, False)
        elif found.brought and not found.withheld:
            self._noted(peer, peer_id, Aspect.PRESENCE, True)
        if found.brought and may_blame:
            self._noted(peer, peer_id, Aspect.CONSISTENCY, False)
        elif found.is_equal:
            self._noted(peer, peer_id, Aspect.CONSISTENCY, True)

    async def _compared(
        self,
        peer: Upstream,
        peer_id: int,
        link: ReadLink,
        since: int,
        withholding: Withholding,
        most_refused: int,
        spell: _Spell,
    ) -> ComparisonResult:
        async def told(found: ComparisonResult) -> None:
            await self._table.compared(peer_id, msgspec.to_builtins(found), done=None, equal_at=None)

        @asynccontextmanager
        async def turn() -> AsyncIterator[float]:
            async with self._turns.turn(peer_id) as waited:
                spell.waited += waited
                spell.has_read_all &= link.has_read_all
                yield waited

        parts = CompareParts(
            peer,
            peer_id,
            lambda: self._connect(peer),
            self._store,
            link.fetch,
            self._max_items,
            self._clock,
            turn,
            most_refused,
            self._lacking.setdefault(peer_id, {}),
        )
        return await compare(parts, since, told, withholding.withheld)

    def _count(self, peer: Upstream, found: ComparisonResult) -> None:
        did, metrics = peer.relay_id, self._metrics
        outcome = "problem" if found.problem else "equal" if found.is_equal else "different"
        metrics.peer_comparisons.labels(did, outcome).inc()
        for name in DIFFERENCES:
            metrics.peer_differences.labels(did, name).inc(getattr(found, name))
        metrics.peer_comparison_bytes.labels(did).inc(found.bytes)
        if found.problem or found.brought or found.withheld:
            _log.info("compared", peer=did, **msgspec.to_builtins(found))
