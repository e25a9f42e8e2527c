"""How the peers stand, for an operator, and what an operator may do about one.

All of it works on the table that the running relay looks at each second: no connection to that relay is
needed. The embedded PostgreSQL is up for as long as its relay is.
"""

from __future__ import annotations

import time

from relayd.config import ConfigurationError, Settings
from relayd.federation.peers_file import read_peers
from relayd.postgres import EmbeddedPostgres
from relayd.store.peers import PeerStore

__all__ = ["change_peer", "peer_line", "peer_rows"]


async def peer_rows(settings: Settings) -> list[dict[str, object]]:
    """Each relay that is or was read from. Raises `StoreError`, `ConfigurationError`."""
    named = {peer.relay_id for peer in read_peers(settings.peers_file)}
    table = _table(settings)
    try:
        rows = await table.rows()
    finally:
        await table.close()
    now = time.time()
    return [
        {
            "relay_id": row.relay_id,
            "url": row.url,
            "state": _state(row.state, row.paused, row.barred_until > now, row.relay_id in named),
            "problem": row.problem,
            "offences": row.offences,
            "barred_until": row.barred_until if row.barred_until > now else None,
            "last_witness": row.last_witness,
            "skipped": row.skipped,
        }
        for row in rows
    ]


def _state(state: str, paused: bool, is_barred: bool, is_named: bool) -> str:
    if not is_named:
        return "not in peers_file"
    if paused:
        return "paused"
    return "barred" if is_barred else state


def peer_line(row: dict[str, object]) -> str:
    """One peer for a terminal."""
    line = f"{row['relay_id']}  {row['state']}  {row['url']}"
    if row["last_witness"] is not None:
        line += f"  up to {row['last_witness']}, {row['skipped']} refused"
    return f"{line}  ({row['problem']})" if row["problem"] else line


def _table(settings: Settings) -> PeerStore:
    return PeerStore(settings.database_url or EmbeddedPostgres(settings.data_dir).url)


async def change_peer(settings: Settings, name: str, action: str) -> str:
    """Do what an operator asks for the one peer whose DID begins so; returns that DID.

    Raises `ConfigurationError` where no peer or several are named, and `StoreError`.
    """
    table = _table(settings)
    try:
        found = [row.relay_id for row in await table.rows() if row.relay_id.startswith(name)]
        if len(found) != 1:
            raise ConfigurationError([f"{name} names {len(found) or 'no'} peers: see `relayd peers list`"])
        match action:
            case "pause" | "resume":
                await table.pause(found[0], action == "pause")
            case "forgive":
                await table.forgive(found[0])
            case _:
                await table.reset_cursor(found[0])
        return found[0]
    finally:
        await table.close()
