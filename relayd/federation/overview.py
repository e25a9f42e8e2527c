"""The state of the peers, for an operator, and what an operator may do about a peer.

All of this works on the table that the running relay looks at each second: it needs no connection to that
relay, and no running relay.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Container

from strata.relays.conduct import Conduct

from relayd.config import ConfigurationError, Settings
from relayd.database import database_beside
from relayd.federation.peers_file import read_peers
from relayd.federation.standings import KeptConduct, conduct_of
from relayd.store.peers import PeerRow, PeerStore

__all__ = ["change_peer", "conduct_kept", "one_peer", "open_table", "peer_line", "peer_rows", "shown"]


async def peer_rows(settings: Settings) -> list[dict[str, object]]:
    """Each relay that is or was read from. Raises `StoreError`, `ConfigurationError`."""
    named = {peer.relay_id for peer in read_peers(settings.peers_file)}
    async with open_table(settings) as table:
        now = time.time()
        return [shown(row, named, await conduct_kept(table, row, now), now) for row in await _rows(table)]


async def _rows(table: PeerStore) -> list[PeerRow]:
    """The current table, corrected for what a process that ended or died has left in it."""
    rows = await table.rows(counted=True)
    if await table.is_led():
        return rows
    return [row._replace(state="disconnected") if row.state == "connected" else row for row in rows]


async def conduct_kept(table: PeerStore, row: PeerRow, now: float) -> Conduct:
    """What a peer has done, according to the table. Raises `StoreError`."""
    kept = KeptConduct(row.offences, row.bars, row.barred_until, await table.conduct(row.peer_id))
    return conduct_of(kept, now)


def shown(row: PeerRow, named: Container[str], conduct: Conduct, now: float) -> dict[str, object]:
    """A row of the table in readable form; `named` are the relays of `peers_file`."""
    return {
        "relay_id": row.relay_id,
        "url": row.url,
        "state": _state(row.state, row.paused, row.barred_until > now, row.relay_id in named),
        "problem": row.problem,
        "standing": conduct.standing.value,
        "score": round(conduct.score(now).value, 3),
        "offences": row.offences,
        "barred_until": row.barred_until if row.barred_until > now else None,
        "last_witness": row.last_witness,
        "skipped": row.skipped,
    }


def _state(state: str, paused: bool, is_barred: bool, is_named: bool) -> str:
    if not is_named:
        return "not in peers_file"
    if paused:
        return "paused"
    return "barred" if is_barred else state


def peer_line(row: dict[str, object]) -> str:
    """One peer as a line for a terminal."""
    line = f"{row['relay_id']}  {row['state']}  {row['url']}  {row['standing']}, score {row['score']}"
    if row["last_witness"] is not None:
        line += f"  up to {row['last_witness']}, {row['skipped']} refused"
    return f"{line}  ({row['problem']})" if row["problem"] else line


@contextlib.asynccontextmanager
async def open_table(settings: Settings) -> AsyncIterator[PeerStore]:
    """The table of peers, beside a running relay or without one."""
    async with database_beside(settings) as url:
        table = PeerStore(url)
        try:
            yield table
        finally:
            await table.close()


async def change_peer(settings: Settings, name: str, action: str) -> str:
    """Perform the operator's action on the one peer whose DID begins with `name`; return that DID.

    Raises `ConfigurationError` if `name` matches no peer or several, and `StoreError`.
    """
    async with open_table(settings) as table:
        relay_id = (await one_peer(table, name)).relay_id
        match action:
            case "pause" | "resume":
                await table.pause(relay_id, action == "pause")
            case "forgive":
                await table.forgive(relay_id)
            case _:
                await table.reset_cursor(relay_id)
        return relay_id


async def one_peer(table: PeerStore, name: str) -> PeerRow:
    """The one peer whose DID begins with `name`. Raises `ConfigurationError` if there is none, or several."""
    found = [row for row in await _rows(table) if row.relay_id.startswith(name)]
    if len(found) != 1:
        raise ConfigurationError([f"{name} names {len(found) or 'no'} peers: see `relayd peers list`"])
    return found[0]
