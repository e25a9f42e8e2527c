"""Comparing what this relay has with what a peer serves, and bringing what is missing (A-171, decision 68).

Key events, approvals and DID documents of all times come first, then the packets of a range of time. If
there are too many for one comparison, on either side, the range is halved. Packets that only the peer has
are fetched by the link, and judged as all its packets are. Packets that this relay had once are not
requested: the duplicate index knows what was erased or banned, or has expired, here.

A peer that is silent, slow or busy, or that names more than it sends, costs an hour at most, and nothing
that was brought is lost: the next comparison finds what is left. It holds up no other peer: a set is held for
one part at a time, in the peer's turn (`comparison_turns`), and not while packets are fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import msgspec
from strata.protocol.errors import RequestRefused, StrataError
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.negentropy import ItemSet
from strata.relays.reconciling import Differences, TooManyPackets

from relayd.federation.peers_file import Upstream
from relayd.item_sets import TooManyItems, gather
from relayd.store import Store
from relayd.store.items import ItemRange
from relayd.store.payers import Unbilled

__all__ = [
    "LONGEST_SECONDS",
    "MOST_REFUSED",
    "MOST_SKIPS",
    "MOST_WITHHELD",
    "RECENT_SECONDS",
    "SETTLED_SECONDS",
    "Comparable",
    "CompareParts",
    "ComparisonResult",
    "Fetched",
    "compare",
]

RECENT_SECONDS: Final = 86_400
SETTLED_SECONDS: Final = 120
"""Packets younger than this, in seconds, may still be on their way."""
LONGEST_SECONDS: Final = 3600.0
"""The most seconds for one comparison, whatever the peer does, besides those of waiting for its turns."""
MOST_WITHHELD: Final = 1000
"""The packets that a peer may name and not send before no more are requested from it."""
MOST_SKIPS: Final = 100_000
"""The refused packets that are remembered for each peer."""
MOST_REFUSED: Final = 5000
"""The packets that a comparison requests in vain, because this relay refuses them, before it stops: a
stranger can publish any number of such packets at a peer, more than are remembered."""
_MARGIN_SECONDS: Final = 300
"""Packets that expire within this many seconds are left out: the two clocks may differ by as much."""
_MOST_PARTS: Final = 2000
_MOST_NEEDED: Final = 50_000
_FETCHED_AT_ONCE: Final = 200
_PATIENCE: Final = 8
_LONGEST_WAIT: Final = 300
_IDS_AT_ONCE: Final = 5000


class Fetched(NamedTuple):
    """The result of requesting packets from a peer by id."""

    sent: set[bytes]
    is_whole: bool
    """Whether the peer has answered to the end: it does not serve what it has not sent."""


Fetch = Callable[[Sequence[bytes]], Awaitable[Fetched]]
"""Has the peer send these packets, and waits for their verdicts."""


class Comparable(Protocol):
    """An open session with a peer: see `strata.relays.reconciling.PeerSession`."""

    @property
    def granted(self) -> Sequence[str]: ...

    @property
    def extensions(self) -> frozenset[str]: ...

    async def compare(
        self,
        items: ItemSet,
        *,
        since: int,
        until: int,
        unexpired_at: int,
        types: tuple[str, ...] = (),
        authors: tuple[str, ...] = (),
        most_needed: int = ...,
    ) -> Differences: ...


class ComparisonResult(msgspec.Struct, omit_defaults=False):
    """The result of a comparison, or the result so far while it runs."""

    since: int
    until: int
    at: int = 0
    """When it ended, in Unix seconds."""
    parts: int = 0
    """The number of single comparisons that it took."""
    items: int = 0
    """The packets that were here, without those that the peer is known not to serve."""
    have: int = 0
    """Packets that are here and that the peer does not serve, as no earlier comparison has found."""
    need: int = 0
    """Packets that are there and were not here."""
    brought: int = 0
    known: int = 0
    """Packets that the peer serves and this relay had once: erased, banned, or just arrived on either
    side."""
    refused: int = 0
    """Packets that were fetched but not accepted by this relay."""
    withheld: int = 0
    """Packets that the peer named but did not send."""
    unfetched: int = 0
    """Packets that were not requested, because many others were requested and refused. Which ones are
    requested is left to chance, so that a later comparison requests these."""
    rounds: int = 0
    bytes: int = 0
    is_cut: bool = False
    """Whether more is missing: the next comparison goes on."""
    crowded: int | None = None
    """A second with more packets than one comparison may hold, if that alone is the problem."""
    problem: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all was compared, but for seconds that are too full: the next time will not be better. Nor
        does it wait because packets were left `unfetched`: a stranger could make comparisons rare."""
        return not self.is_cut and (self.problem is None or self.crowded is not None)

    @property
    def is_equal(self) -> bool:
        """Whether nothing was missing here that could have been brought from the peer."""
        is_rest = self.is_cut or self.unfetched
        return self.problem is None and not (is_rest or self.brought or self.withheld)


@dataclass(frozen=True, slots=True)
class CompareParts:
    """What a comparison works with."""

    peer: Upstream
    peer_id: int
    connect: Callable[[], AbstractAsyncContextManager[Comparable]]
    store: Store
    fetch: Fetch
    max_items: int
    clock: Callable[[], int]
    turn: Callable[[], AbstractAsyncContextManager[float]]
    """A turn for one part: see `ComparisonTurns.turn`."""
    most_refused: int = MOST_REFUSED
    lacking: dict[bytes, None] = field(default_factory=dict)
    """Packets that are here and that the peer did not serve when they were last compared: the last
    `MOST_SKIPS`. It may have refused any number, and each costs some hundred bytes if it is compared."""


async def compare(
    work: CompareParts,
    since: int,
    told: Callable[[ComparisonResult], Awaitable[None]],
    withheld: Callable[[set[bytes]], None] = lambda ids: None,
) -> ComparisonResult:
    """Compare all packets since a time, by their own `timestamp`, and bring what is missing.

    `told` is awaited after each part. `withheld` is called with packets that the peer named but did not
    send, though it answered to the end. Ends after `LONGEST_SECONDS`. Problems of the peer end up in
    `problem`; raises `StoreError` and what `fetch` raises. Cancelling it ends the comparison; packets
    brought so far stay.
    """
    now = work.clock()
    found = ComparisonResult(since, now - SETTLED_SECONDS)
    try:
        async with asyncio.timeout(LONGEST_SECONDS) as limit, work.connect() as session:
            whole = _Whole(work, found, told, withheld, limit)
            if "reconcile" not in session.extensions:
                found.problem = "the peer compares no sets"
            elif "replicate" not in session.granted:
                found.problem = "the peer does not name this relay in its replication_peers"
            else:
                keys = tuple(sorted(IDENTITY_TYPES))
                await whole.compare(session, 0, found.until, keys)
                await whole.compare(session, since, found.until, work.peer.types)
    except TimeoutError:
        found.problem = f"it took longer than {LONGEST_SECONDS:.0f} seconds"
    except StrataError as error:
        found.problem = str(error)[:300]
    found.at = work.clock()
    if found.problem is not None:
        found.crowded = None
    elif found.crowded is not None:
        found.problem = f"more packets of the second {found.crowded} than one comparison may hold"
    return found


class _Withheld(StrataError):
    """The peer names packets that it does not send."""


class _Whole:
    """One comparison, part by part."""

    def __init__(
        self,
        work: CompareParts,
        found: ComparisonResult,
        told: Callable[[ComparisonResult], Awaitable[None]],
        withheld: Callable[[set[bytes]], None],
        limit: asyncio.Timeout,
    ) -> None:
        self._work = work
        self._found = found
        self._told = told
        self._withheld = withheld
        self._limit = limit
        self._ends_at = asyncio.get_running_loop().time() + LONGEST_SECONDS
        self._asker = Unbilled()
        self._refused_before = 0

    async def compare(self, session: Comparable, since: int, until: int, types: tuple[str, ...]) -> None:
        """Compare a range of time; halve it if it is too large."""
        work, found = self._work, self._found
        self._refused_before = found.refused
        parts = [(since, until)]
        while parts:
            since, until = parts.pop()
            if until < since:
                continue
            found.parts += 1
            if found.parts > _MOST_PARTS:
                found.problem = "too many parts: raise reconcile_max_items, here or at the peer"
                return
            span = ItemRange(since, until, work.clock() + _MARGIN_SECONDS, types, work.peer.authors)
            try:
                await self._bring(await self._part(session, span))
            except (TooManyItems, TooManyPackets):
                if since == until:
                    found.crowded = since
                    continue
                middle = (since + until) // 2
                halves = [(middle + 1, until), (since, middle)]
                random.shuffle(halves)  # no half must come last each time: see `ComparisonResult.unfetched`
                parts += halves
                continue
            await self._told(found)

    async def _part(self, session: Comparable, span: ItemRange) -> list[bytes]:
        """Compare one range; return the ids that only the peer has. If it is busy, try again at the time that
        it gives."""
        for attempt in range(_PATIENCE):
            try:
                async with self._turn():
                    return await self._compared(session, span)
            except TooManyPackets:
                raise
            except RequestRefused as error:
                if error.retry_after is None or attempt == _PATIENCE - 1:
                    raise
                wait = max(1, min(error.retry_after, _LONGEST_WAIT))
            await asyncio.sleep(wait)  # without a set, so that it holds up no other peer
        raise AssertionError  # the last attempt returns or raises

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """A turn of the peer. Waiting for it takes nothing of the comparison's time."""
        self._limit.reschedule(None)
        async with self._work.turn() as waited:
            self._ends_at += waited
            self._limit.reschedule(self._ends_at)
            yield

    async def _compared(self, session: Comparable, span: ItemRange) -> list[bytes]:
        work, found = self._work, self._found
        # Declined packets are included: they are known, and not wanted.
        items = await gather(
            work.store,
            span,
            max_items=work.max_items,
            skips_of=work.peer_id,
            with_declined=True,
            without=work.lacking,
            asker=self._asker,
        )
        differences = await session.compare(
            items,
            since=span.since,
            until=span.until,
            unexpired_at=span.unexpired_at,
            types=span.types,
            authors=span.authors,
            most_needed=_MOST_NEEDED + len(work.lacking),
        )
        need = differences.need
        self._learn(need, differences.have)
        if need:  # a set of certain types or authors lacks the refused packets
            refused = await work.store.skips(work.peer_id, span, MOST_SKIPS, self._asker)
            need.difference_update(packet_id for _, packet_id in refused)
        found.items += len(items)
        found.have += len(differences.have)
        found.rounds += differences.rounds
        found.bytes += differences.bytes
        found.is_cut |= differences.is_cut
        return sorted(need)

    def _learn(self, there: set[bytes], not_there: set[bytes]) -> None:
        lacking = self._work.lacking
        for packet_id in there:
            lacking.pop(packet_id, None)
        lacking.update(dict.fromkeys(not_there))
        while len(lacking) > MOST_SKIPS:
            del lacking[next(iter(lacking))]

    async def _bring(self, need: Sequence[bytes]) -> None:
        work, found = self._work, self._found
        known = await self._known(need)
        found.known += len(known)
        wanted = [packet_id for packet_id in need if packet_id not in known]
        found.need += len(wanted)
        if len(wanted) > work.most_refused:
            random.shuffle(wanted)
        for start in range(0, len(wanted), _FETCHED_AT_ONCE):
            if found.refused - self._refused_before >= work.most_refused:
                found.unfetched += len(wanted) - start
                return
            some = set(wanted[start : start + _FETCHED_AT_ONCE])
            fetched = await work.fetch(sorted(some))
            brought = await self._known(sorted(some))
            found.brought += len(brought)
            found.refused += len((fetched.sent & some) - brought)
            withheld = some - fetched.sent - brought
            found.withheld += len(withheld)
            if withheld and fetched.is_whole:
                self._withheld(withheld)
            if found.withheld >= MOST_WITHHELD:
                found.is_cut = True
                raise _Withheld("the peer names many packets that it does not send")

    async def _known(self, ids: Sequence[bytes]) -> set[bytes]:
        found: set[bytes] = set()
        for start in range(0, len(ids), _IDS_AT_ONCE):
            found.update(await self._work.store.find(ids[start : start + _IDS_AT_ONCE], self._asker))
        return found
