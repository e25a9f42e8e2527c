"""The database's records of peers: their identities, how far each was read, and their standing.

They use one connection, held while a process reads from peers: the advisory lock on it shows which process
that is. A process that loses the connection has lost the lock, and `fence` makes what it writes afterwards
ineffective.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import asyncpg

from relayd.store.connection import close_quietly, connect, connected, deadline
from relayd.store.skips import REASONS, SKIP, TRIM, Skip
from relayd.store.types import StoreError, StoreUnavailable

__all__ = [
    "MOST_PROBLEM",
    "PeerComparison",
    "PeerPlace",
    "PeerRow",
    "PeerStore",
    "printable",
    "register_peers",
    "register_peers_over",
]

MOST_PROBLEM: Final = 500
"""The most characters kept of a peer's problem."""
_LOCK: Final = 0x72656C6179_0001
"""The key of the advisory lock under which one process reads from peers."""

_IS_LED: Final = """
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (classid::bigint << 32 | objid::bigint) = $1 AND objsubid = 1)
"""
_ROWS: Final = """
SELECT p.peer_id, p.relay_id, p.url, p.paused, p.fence, p.offences, p.bars, p.barred_until, p.state,
    p.state_at, p.problem, c.last_witness,
    CASE WHEN $1 THEN (SELECT count(*) FROM peer_skips s WHERE s.peer_id = p.peer_id) ELSE 0 END,
    p.conduct IS NOT NULL
FROM peers p LEFT JOIN LATERAL
    (SELECT max(last_witness) AS last_witness FROM peer_cursors WHERE peer_id = p.peer_id) AS c ON true
ORDER BY p.peer_id
"""
_COMPARISONS: Final = (
    "SELECT peer_id, asked, done, asked_since, is_running, found::text, equal_at FROM peer_comparisons"
)
_ASK_COMPARISON: Final = """
INSERT INTO peer_comparisons AS old (peer_id, asked, asked_since)
SELECT peer_id, 1, $2::bigint FROM peers WHERE relay_id = $1
ON CONFLICT (peer_id) DO UPDATE SET asked = old.asked + 1,
    asked_since = CASE WHEN old.asked <= old.done THEN excluded.asked_since
        WHEN old.asked_since IS NULL OR excluded.asked_since IS NULL THEN NULL
        ELSE least(old.asked_since, excluded.asked_since) END
RETURNING asked
"""
"""One comparison may answer several requests, so it begins where the earliest of them asks."""
_COMPARED: Final = """
INSERT INTO peer_comparisons AS old (peer_id, found, is_running, done, equal_at)
VALUES ($1, $2::text::jsonb, $3::bigint IS NULL, coalesce($3, 0), $4::bigint)
ON CONFLICT (peer_id) DO UPDATE SET found = excluded.found, is_running = excluded.is_running,
    done = greatest(old.done, excluded.done), equal_at = coalesce(excluded.equal_at, old.equal_at)
"""


_LONGEST: Final = 30.0
"""Seconds that a statement may take: if the server has vanished, the lead is lost with it."""


class PeerRow(NamedTuple):
    """One relay that is, or was, read from."""

    peer_id: int
    relay_id: str
    url: str
    paused: bool
    fence: int
    offences: int
    bars: int
    barred_until: int
    state: str
    state_at: int
    problem: str | None
    last_witness: int | None
    """The latest time at which a packet that was read here was first received anywhere."""
    skipped: int
    """Packets of this peer that were refused and are remembered; 0 if they were not counted."""
    has_conduct: bool
    """Whether a record of its conduct is kept: see `PeerStore.conduct`."""


class PeerComparison(NamedTuple):
    """The last comparison of sets with a peer, and the requests for one."""

    peer_id: int
    asked: int
    """Requests of operators so far."""
    done: int
    """How many of them have been met."""
    asked_since: int | None
    """The time from which to compare for the requests that wait; None for all that may count."""
    is_running: bool
    found: dict[str, object] | None
    """What the last or the current comparison has found so far: the members of a `ComparisonResult`."""
    equal_at: int | None
    """The last time at which nothing of the peer's was missing here."""


class PeerPlace(NamedTuple):
    """How far a peer was read."""

    cursor: str | None
    last_witness: int | None


async def register_peers(
    url: str, peers: Sequence[tuple[str, str]], *, connect_timeout: float = 5.0
) -> dict[str, int]:
    """Give each of `peers`, a DID and a URL, its number. Returns the numbers of all peers ever read from.

    Raises `StoreUnavailable`.
    """
    async with connected(url, "relayd peers", connect_timeout, longest=_LONGEST) as connection:
        return await register_peers_over(connection, peers)


async def register_peers_over(
    connection: asyncpg.Connection, peers: Sequence[tuple[str, str]]
) -> dict[str, int]:
    """Like `register_peers`, over an existing connection."""
    for relay_id, address in peers:
        await connection.execute(
            "INSERT INTO peers (relay_id, url) VALUES ($1, $2)"
            " ON CONFLICT (relay_id) DO UPDATE SET url = excluded.url",
            relay_id,
            address,
        )
    rows = await connection.fetch("SELECT relay_id, peer_id FROM peers")
    return dict(map(tuple, rows))


class PeerStore:
    """The tables of peers, over one connection.

    Every method raises `StoreUnavailable` if the connection is lost, or the database does not answer within
    `answer_timeout` seconds. From then on all methods raise it until `close`: the lead is lost with the
    connection.
    """

    def __init__(self, url: str, *, connect_timeout: float = 5.0, answer_timeout: float = _LONGEST) -> None:
        self._url = url
        self._connect_timeout = connect_timeout
        self._answer_timeout = answer_timeout
        self._connection: asyncpg.Connection | None = None
        self._turn = asyncio.Lock()

    async def take_lead(self) -> bool:
        """Become the process that reads from peers, with a new fence; False while another process is that
        one. The lead is lost with the connection, and by `close`."""
        async with self._connected() as connection:
            if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", _LOCK):
                return False
            await connection.execute("UPDATE peers SET fence = fence + 1")
        return True

    async def is_led(self) -> bool:
        """Whether any process reads from peers."""
        return bool((await self._run("fetch", _IS_LED, _LOCK))[0][0])

    async def rows(self, *, counted: bool = False) -> list[PeerRow]:
        """All peers ever read from. With `counted`, the refused packets of each are counted, which takes the
        database some ten milliseconds for a peer with many."""
        return [PeerRow._make(row) for row in await self._run("fetch", _ROWS, counted)]

    async def place(self, peer_id: int, stream: str) -> PeerPlace:
        """How far this selection of a peer's packets was read."""
        found = await self._run(
            "fetch",
            "SELECT cursor, last_witness FROM peer_cursors WHERE peer_id = $1 AND stream = $2",
            peer_id,
            stream,
        )
        return PeerPlace._make(found[0]) if found else PeerPlace(None, None)

    async def report(self, peer_id: int, state: str, problem: str | None, now: int) -> None:
        """Record the state of the link, for people."""
        await self._run(
            "execute",
            "UPDATE peers SET state = $2, problem = $3, state_at = $4 WHERE peer_id = $1",
            peer_id,
            state,
            None if problem is None else printable(problem[:MOST_PROBLEM]),
            now,
        )

    async def conduct(self, peer_id: int) -> str | None:
        """The record of a peer's conduct, as JSON; None if there is none, or it was forgiven."""
        found = await self._run("fetch", "SELECT conduct::text FROM peers WHERE peer_id = $1", peer_id)
        return found[0][0] if found else None

    async def keep_conduct(
        self,
        peer_id: int,
        offences: int,
        bars: int,
        barred_until: int,
        conduct: str | None,
        *,
        follows: bool,
    ) -> bool:
        """Record a peer's standing, unless it was forgiven meanwhile: then False.

        `follows` says that this continues a record that was kept before.
        """
        return await self._changed(
            "UPDATE peers SET offences = $2, bars = $3, barred_until = $4, conduct = $5::text::jsonb"
            " WHERE peer_id = $1 AND (conduct IS NOT NULL) = $6",
            peer_id,
            offences,
            bars,
            barred_until,
            conduct,
            follows,
        )

    async def skip(self, peer_id: int, skips: Sequence[Skip], most: int) -> None:
        """Remember refused packets of a peer, each once; the newest `most` are kept."""
        columns = [list(column) for column in zip(*skips, strict=True)] or [[], [], []]
        await self._run("execute", SKIP, peer_id, *columns)
        await self._run("execute", TRIM, peer_id, most)

    async def pause(self, relay_id: str, paused: bool) -> bool:
        """Stop or resume reading from a peer. Returns whether there is such a peer."""
        return await self._changed("UPDATE peers SET paused = $2 WHERE relay_id = $1", relay_id, paused)

    async def forgive(self, relay_id: str) -> bool:
        """Forget what is held against a peer. Returns whether there is such a peer."""
        return await self._changed(
            "UPDATE peers SET offences = 0, bars = 0, barred_until = 0, conduct = NULL WHERE relay_id = $1",
            relay_id,
        )

    async def reset_cursor(self, relay_id: str) -> bool:
        """Have all of a peer's log read again. Returns whether there is such a peer.

        Packets that were read before are known. The current link loses its place and starts over.
        """
        return await self._changed(
            "WITH gone AS (DELETE FROM peer_cursors c USING peers p"
            " WHERE p.peer_id = c.peer_id AND p.relay_id = $1)"
            " UPDATE peers SET fence = fence + 1, state = 'reset' WHERE relay_id = $1",
            relay_id,
        )

    async def comparisons(self) -> dict[int, PeerComparison]:
        """The comparisons with all peers that were ever compared with, or are going to be."""
        rows = await self._run("fetch", _COMPARISONS)
        made = [
            PeerComparison._make((*row[:5], None if row[5] is None else json.loads(row[5]), row[6]))
            for row in map(tuple, rows)
        ]
        return {each.peer_id: each for each in made}

    async def ask_comparison(self, relay_id: str, since: int | None) -> int | None:
        """Have the process that reads from this peer compare sets with it. Returns the number of this
        request, which is met once `done` is as high; None if there is no such peer."""
        found = await self._run("fetch", _ASK_COMPARISON, relay_id, since)
        return found[0][0] if found else None

    async def compared(
        self, peer_id: int, found: Mapping[str, object], *, done: int | None, equal_at: int | None
    ) -> None:
        """Record the state of a comparison; with `done`, that it has ended and how many requests are met."""
        plain = {name: printable(value) if type(value) is str else value for name, value in found.items()}
        await self._run("execute", _COMPARED, peer_id, json.dumps(plain), done, equal_at)

    async def skip_reasons(self, peer_id: int) -> dict[str, int]:
        """The reasons of this peer's remembered refusals, with the number of packets for each."""
        return dict(map(tuple, await self._run("fetch", REASONS, peer_id)))

    async def identity_seed(self) -> bytes:
        """The seed of the relay's DID in the database. Raises `StoreError` if no relay has used it yet."""
        rows = await self._run("fetch", "SELECT identity_seed FROM relay_secrets")
        if not rows:
            raise StoreError("no relay has served on this database yet: it has no DID that a peer could know")
        return bytes(rows[0][0])

    async def close(self) -> None:
        """End the connection, and the lead with it. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await close_quietly(connection)

    async def _changed(self, statement: str, *arguments: object) -> bool:
        return not str(await self._run("execute", statement, *arguments)).endswith(" 0")

    async def _run(self, how: str, statement: str, *arguments: object) -> Any:
        async with self._connected() as connection:
            return await getattr(connection, how)(statement, *arguments)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[asyncpg.Connection]:
        """The connection, for one caller at a time. A lost connection is not replaced: a new one would not
        have the lead, and the caller that notices the loss may not be the one that must know."""
        async with self._turn:
            if self._connection is None:
                self._connection = await connect(
                    self._url, name="relayd peers", connect_timeout=self._connect_timeout
                )
            connection = self._connection
            if connection.is_closed():
                raise StoreUnavailable("the connection for peers was lost")
            try:
                async with deadline(connection, self._answer_timeout):
                    yield connection
            except StoreUnavailable:
                connection.terminate()
                raise


def printable(text: str) -> str:
    """A text that may come from a peer, made fit for PostgreSQL and an operator's terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
