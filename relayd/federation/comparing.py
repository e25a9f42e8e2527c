"""Comparing what this relay has with what a peer serves, and bringing what is missing (A-171, decision 68).

Key events, approvals and DID documents of all times come first, then the packets of a range of time. Where
there are too many for one comparison, on either side, the range is halved. Ids that the peer alone has are
fetched by the link, and judged as all its packets are. What this relay had once is not asked for: the
duplicate index knows what was erased, banned or has expired here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from strata.protocol.errors import RequestRefused, StrataError
from strata.protocol.ids import Signer
from strata.protocol.keys import IDENTITY_TYPES
from strata.relays.reconciling import Differences, PeerSession, TooManyPackets

from relayd.federation.peers_file import Upstream
from relayd.item_sets import TooManyItems, gather
from relayd.store import Store
from relayd.store.items import ItemRange

__all__ = ["RECENT_SECONDS", "SETTLED_SECONDS", "CompareParts", "Compared", "compare"]

RECENT_SECONDS: Final = 86_400
SETTLED_SECONDS: Final = 120
"""Packets younger than this may be on their way."""
_MARGIN_SECONDS: Final = 300
"""Packets that expire so soon are left out: both clocks may differ by that."""
_MOST_PARTS: Final = 2000
_MOST_NEEDED: Final = 50_000
_FETCHED_AT_ONCE: Final = 200
_PATIENCE: Final = 8
_LONGEST_WAIT: Final = 300
_IDS_AT_ONCE: Final = 5000

Fetch = Callable[[Sequence[bytes]], Awaitable[set[bytes]]]
"""Has the peer send these packets and waits for their verdicts; the ids of those that it sent."""


class Compared(msgspec.Struct, omit_defaults=False):
    """What a comparison has found, so far while it runs."""

    since: int
    until: int
    at: int = 0
    """When it ended."""
    parts: int = 0
    """Comparisons that it took."""
    items: int = 0
    """Packets that were here."""
    have: int = 0
    """Packets that are here and not there, or that the peer does not serve."""
    need: int = 0
    """Packets that are there and were not here."""
    brought: int = 0
    known: int = 0
    """Packets that the peer serves and this relay had once: erased, banned or just arrived."""
    refused: int = 0
    """Packets that were fetched and that this relay would not take."""
    withheld: int = 0
    """Packets that the peer said it had and did not send."""
    rounds: int = 0
    bytes: int = 0
    is_cut: bool = False
    """There is more that is missing: the next comparison goes on."""
    problem: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether nothing of the peer's was missing here that could have been taken."""
        return self.problem is None and not (self.is_cut or self.brought or self.withheld)


@dataclass(frozen=True, slots=True)
class CompareParts:
    """What a comparison works with."""

    peer: Upstream
    peer_id: int
    signer: Signer
    store: Store
    fetch: Fetch
    max_items: int
    clock: Callable[[], int]


async def compare(work: CompareParts, since: int, told: Callable[[Compared], Awaitable[None]]) -> Compared:
    """Compare all packets since a time, by their own `timestamp`, and bring what is missing.

    `told` is awaited after each part. Problems of the peer end in `problem`; raises `StoreError` and what
    `fetch` raises. Cancelling ends it; what was brought stays.
    """
    now = work.clock()
    found = Compared(since, now - SETTLED_SECONDS)
    try:
        async with PeerSession(work.peer.url, work.signer, relay_id=work.peer.relay_id) as session:
            if "reconcile" not in session.extensions:
                found.problem = "the peer compares no sets"
            elif "replicate" not in session.granted:
                found.problem = "the peer does not name this relay in its replication_peers"
            else:
                keys = tuple(sorted(IDENTITY_TYPES))
                await _all_parts(work, session, found, (0, found.until, keys), told)
                await _all_parts(work, session, found, (since, found.until, work.peer.types), told)
    except StrataError as error:
        found.problem = str(error)[:300]
    found.at = work.clock()
    return found


async def _all_parts(
    work: CompareParts,
    session: PeerSession,
    found: Compared,
    whole: tuple[int, int, tuple[str, ...]],
    told: Callable[[Compared], Awaitable[None]],
) -> None:
    since, until, types = whole
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
            differences, count = await _one_part(work, session, span)
        except (TooManyItems, TooManyPackets):
            if since == until:
                found.problem = f"more packets of the second {since} than one comparison may hold"
                continue
            middle = (since + until) // 2
            parts += [(middle + 1, until), (since, middle)]
            continue
        found.items += count
        found.have += len(differences.have)
        found.rounds += differences.rounds
        found.bytes += differences.bytes
        found.is_cut |= differences.is_cut
        await _bring(work, found, sorted(differences.need))
        await told(found)


async def _one_part(work: CompareParts, session: PeerSession, span: ItemRange) -> tuple[Differences, int]:
    """Where the peer is busy, it is asked again when it says."""
    # Declined packets count here: they are known, and not wanted.
    items = await gather(
        work.store, span, max_items=work.max_items, skips_of=work.peer_id, with_declined=True
    )
    for attempt in range(_PATIENCE):
        try:
            found = await session.compare(
                items,
                since=span.since,
                until=span.until,
                unexpired_at=span.unexpired_at,
                types=span.types,
                authors=span.authors,
                most_needed=_MOST_NEEDED,
            )
            return found, len(items)
        except TooManyPackets:
            raise
        except RequestRefused as error:
            if error.retry_after is None or attempt == _PATIENCE - 1:
                raise
            await asyncio.sleep(min(error.retry_after, _LONGEST_WAIT))
    raise AssertionError("the last attempt returns or raises")


async def _bring(work: CompareParts, found: Compared, need: Sequence[bytes]) -> None:
    known = await _known(work.store, need)
    found.known += len(known)
    wanted = [packet_id for packet_id in need if packet_id not in known]
    found.need += len(wanted)
    for start in range(0, len(wanted), _FETCHED_AT_ONCE):
        some = wanted[start : start + _FETCHED_AT_ONCE]
        sent = await work.fetch(some)
        brought = await _known(work.store, some)
        found.brought += len(brought)
        found.refused += len((sent & set(some)) - brought)
        found.withheld += len(set(some) - sent - brought)


async def _known(store: Store, ids: Sequence[bytes]) -> set[bytes]:
    found: set[bytes] = set()
    for start in range(0, len(ids), _IDS_AT_ONCE):
        found.update(await store.find(ids[start : start + _IDS_AT_ONCE]))
    return found
