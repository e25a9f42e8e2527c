"""What an operator asks about one peer: whether it is there, what it grants, how far this relay is behind,
and what a comparison finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TypedDict

from strata.protocol.errors import StrataError
from strata.protocol.ids import Identity
from strata.relays.conduct import Conduct
from strata.relays.reconciling import PeerSession

from relayd.config import ConfigurationError, Settings
from relayd.federation.overview import conduct_kept, one_peer, open_table, shown
from relayd.federation.peers_file import Upstream, read_peers
from relayd.federation.selection import query_for
from relayd.store.peers import PeerRow, PeerStore, printable

__all__ = ["PeerCheck", "ask_comparison", "check_peers", "peer_details"]

_CHECK_TIMEOUT = 15.0
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0


class PeerCheck(TypedDict):
    """What `check_peers` reports of one peer."""

    relay_id: str
    url: str
    reached: bool
    grants: list[str]
    extensions: list[str]
    clock_ahead: int | None
    newest: int | None
    read_up_to: int | None
    behind_seconds: int | None
    problem: str | None


async def check_peers(settings: Settings, name: str | None = None) -> list[PeerCheck]:
    """Reach each relay of `peers_file`, or the one whose DID begins with `name`, and report its state.

    Raises `StoreError` and `ConfigurationError`; a problem with a peer is in its `problem`.
    """
    named = read_peers(settings.peers_file)
    peers = [each for each in named if each.relay_id.startswith(name or "")]
    if not peers:
        raise ConfigurationError([f"peers_file names no peer {name or ''}".rstrip()])
    async with open_table(settings) as table:
        seed = settings.identity_seed
        own = Identity.from_seed(
            bytes.fromhex(seed.removeprefix("0x")) if seed else await table.identity_seed()
        )
        rows = {row.relay_id: row for row in await table.rows()}
    return await asyncio.gather(*(_check(peer, own, rows.get(peer.relay_id), named) for peer in peers))


async def _check(peer: Upstream, own: Identity, row: PeerRow | None, named: Sequence[Upstream]) -> PeerCheck:
    found: PeerCheck = {
        "relay_id": peer.relay_id,
        "url": peer.url,
        "reached": False,
        "grants": [],
        "extensions": [],
        "clock_ahead": None,
        "newest": None,
        "read_up_to": None if row is None else row.last_witness,
        "behind_seconds": None,
        "problem": None,
    }
    try:
        async with PeerSession(peer.url, own, relay_id=peer.relay_id, timeout=_CHECK_TIMEOUT) as session:
            found["reached"] = True
            found["grants"] = sorted(session.granted)
            found["extensions"] = sorted(session.extensions)
            found["clock_ahead"] = session.clock_ahead
            if "replicate" not in session.granted:
                found["problem"] = "the peer does not name this relay in its replication_peers"
            # Of what is read from it: what came from this relay, or from its group, is not.
            others = [each.relay_id for each in named if each != peer and each.group == peer.group != ""]
            query = query_for(peer, None, [own.did, *others], last_witness=None)
            found["newest"] = newest = await session.newest(
                types=query.types, authors=query.authors, not_via=query.not_via
            )
            if newest is not None and row is not None and row.last_witness is not None:
                found["behind_seconds"] = max(0, newest - row.last_witness)
    except StrataError as error:
        found["problem"] = printable(str(error))
    return found


async def peer_details(settings: Settings, name: str) -> dict[str, object]:
    """All that is known of one peer, by the start of its DID. Raises `StoreError`, `ConfigurationError`."""
    peers = {each.relay_id: each for each in read_peers(settings.peers_file)}
    async with open_table(settings) as table:
        row, now = await one_peer(table, name), time.time()
        conduct = await conduct_kept(table, row, now)
        compared = (await table.comparisons()).get(row.peer_id)
        reasons = await table.skip_reasons(row.peer_id)
    peer = peers.get(row.relay_id)
    return {
        **shown(row, set(peers), conduct, now),
        "group": peer.group if peer else None,
        "types": list(peer.types) if peer else None,
        "authors": list(peer.authors) if peer else None,
        "trust_received_at": peer.trust_received_at if peer else None,
        "bars": row.bars,
        "noted": _noted(conduct),
        "state_at": row.state_at,
        "refused": reasons,
        "compared": compared.found if compared else None,
        "equal_at": compared.equal_at if compared else None,
    }


def _noted(conduct: Conduct) -> dict[str, str]:
    """The counts for and against the peer, over the last week."""
    totals: dict[str, tuple[int, int]] = {}
    for each in conduct.counts:
        good, bad = totals.get(each.kind.value, (0, 0))
        totals[each.kind.value] = (good + each.good, bad + each.bad)
    return {kind: f"{good} good, {bad} bad" for kind, (good, bad) in sorted(totals.items())}


async def ask_comparison(
    settings: Settings, name: str, since: int | None
) -> AsyncIterator[dict[str, object]]:
    """Have the running relay compare sets with a peer; yield the state, the last time when it is done.

    Raises `StoreError`, and `ConfigurationError` if this relay reads from no such peer. Closing it early
    changes nothing: the relay goes on.
    """
    async with open_table(settings) as table:
        row = await one_peer(table, name)
        number = await table.ask_comparison(row.relay_id, since)
        heard_at, before = time.monotonic(), None
        while True:
            each = (await table.comparisons()).get(row.peer_id)
            if each is not None and number is not None and each.done >= number:
                yield {"relay_id": row.relay_id, "done": True, **(each.found or {})}
                return
            if each is not None and each.is_running and each.found != before:
                heard_at, before = time.monotonic(), each.found
                yield {"relay_id": row.relay_id, "done": False, **(each.found or {})}
            if time.monotonic() - heard_at > _PATIENCE_SECONDS:
                await _check_read(table, row.relay_id)
                heard_at = time.monotonic()
            await asyncio.sleep(_POLL_SECONDS)


async def _check_read(table: PeerStore, relay_id: str) -> None:
    row = await one_peer(table, relay_id)
    if row.state != "connected":
        why = f": {row.problem}" if row.problem else ""
        problem = f"{relay_id} is not read from now{why}; the comparison comes once it is"
        raise ConfigurationError([problem])
