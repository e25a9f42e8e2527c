"""The table of bans and the log of its changes (`relayd.moderation`).

Every change is one transaction: it takes its turn, writes the row, and records what it did in
`moderation_log`, under a number one higher than the last. So the last line identifies the state that a
process has read, and a process that reads that line once a second needs nothing else: a notification only
makes it look sooner. The whole line matters and not only its number: if a failover has lost rulings, the next
ones reuse their numbers.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple, TypeVar

import asyncpg
import msgspec

from relayd.moderation import SESSION, Act, Ban, ClosedSession, LastRuling, Ruled, RulingsRead, SubjectKind
from relayd.roll import OpenSession
from relayd.store.connection import ConnectionPool, connected

__all__ = ["MODERATION_CHANNEL", "Moderation", "Ruling"]

_Name = TypeVar("_Name", bound=enum.StrEnum)

MODERATION_CHANNEL: Final = "relayd_moderation"
"""The LISTEN/NOTIFY channel; the payload is the number of the last ruling."""

_COLUMNS: Final = "kind, subject, reason, actor, expires_at, created_at"

_LAST: Final = "SELECT coalesce(max(number), 0) FROM moderation_log"
_DIGEST: Final = "sha256(convert_to(line::text, 'UTF8'))"
_LAST_LINE: Final = f"SELECT number, {_DIGEST} FROM moderation_log AS line ORDER BY number DESC LIMIT 1"
_HOLDS: Final = f"SELECT EXISTS (SELECT FROM moderation_log AS line WHERE number = $1 AND {_DIGEST} = $2)"
_ALL: Final = f"SELECT {_COLUMNS} FROM moderation"
_ERASED_SINCE: Final = f"SELECT EXISTS (SELECT FROM moderation_log WHERE number > $1 AND act = '{Act.ERASE}')"
_CLOSED_SINCE: Final = f"SELECT subject FROM moderation_log WHERE number > $1 AND act = '{Act.CLOSE}'"
_PAGE: Final = (
    f"SELECT {_COLUMNS} FROM moderation WHERE (expires_at IS NULL OR expires_at >= $1)"
    " AND ($2::text IS NULL OR kind = $2) AND (kind, subject) > ($3, $4)"
    " ORDER BY kind, subject LIMIT $5"
)
_ONE: Final = f"SELECT {_COLUMNS} FROM moderation WHERE kind = $1 AND subject = $2"
_OVER: Final = f"DELETE FROM moderation WHERE expires_at < $1 RETURNING {_COLUMNS}"
_LOG: Final = (
    "SELECT number, at, actor, via, act, kind, subject, reason, before, after FROM moderation_log"
    " WHERE ($1::bigint IS NULL OR number < $1) AND ($2::text IS NULL OR subject = $2)"
    " ORDER BY number DESC LIMIT $3"
)
_WRITE: Final = (
    "INSERT INTO moderation_log (number, at, actor, via, act, kind, subject, reason, before, after)"
    f" SELECT ({_LAST}) + 1, $1, $2, $3, $4, $5, $6, $7, $8, $9"
)
_WRITE_ALL: Final = (
    "INSERT INTO moderation_log (number, at, actor, via, act, kind, subject, reason)"
    f" SELECT ({_LAST}) + n, $1, $2, $3, $4, $5, each, $6"
    " FROM unnest($7::text[]) WITH ORDINALITY AS subjects (each, n)"
)
# One at a time, so that numbers become visible in order; readers are not blocked.
_TURN: Final = "LOCK TABLE moderation_log IN SHARE ROW EXCLUSIVE MODE"
_TURN_TIMEOUT: Final = "10s"
_LONGEST_RULING: Final = 30.0
"""Seconds, including the wait for a turn."""


class Ruling(NamedTuple):
    """An operator's request: a ban of this subject, or no ban of it (`bans` False)."""

    kind: SubjectKind
    subject: str
    """In the form that `relayd.moderation.subject_of` returns."""
    bans: bool
    reason: str
    actor: str
    via: str
    expires_at: int | None = None


class Moderation:
    """Reads over the pool of short look-ups; each change opens its own connection.

    Every method raises `StoreUnavailable`. Cancelling a change leaves either all of it done or none.
    """

    def __init__(self, url: str, lookups: ConnectionPool, *, connect_timeout: float) -> None:
        self._url = url
        self._lookups = lookups
        self._connect_timeout = connect_timeout

    async def last(self) -> LastRuling:
        """The last ruling."""
        async with self._lookups.lease() as connection:
            return await _last(connection)

    async def read(self, since: LastRuling) -> RulingsRead:
        """The state after the last ruling, and what was done after the ruling `since`. If the log does not
        hold `since`, that is everything ever done, because nothing shows which of it is new."""
        async with self._lookups.lease() as connection:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                last = await _last(connection)
                rows = await connection.fetch(_ALL)
                after = since.number if await connection.fetchval(_HOLDS, *since) else -1
                erased = await connection.fetchval(_ERASED_SINCE, after)
                closed = await connection.fetch(_CLOSED_SINCE, after)
        return RulingsRead(last, [_ban(row) for row in rows], erased, [subject for (subject,) in closed])

    async def bans(
        self,
        now: int,
        *,
        kind: SubjectKind | None = None,
        after: tuple[str, str] = ("", ""),
        limit: int = 1000,
    ) -> list[Ban]:
        """Bans in force at `now`, ordered by kind and subject, beginning after `after`."""
        async with self._lookups.lease() as connection:
            return [_ban(row) for row in await connection.fetch(_PAGE, now, kind, *after, limit)]

    async def log(
        self, *, before: int | None = None, subject: str | None = None, limit: int = 100
    ) -> list[Ruled]:
        """Rulings, the newest first; `before` is a number to continue from, `subject` the only one wanted."""
        async with self._lookups.lease() as connection:
            return [_ruled(row) for row in await connection.fetch(_LOG, before, subject, limit)]

    async def rule(self, rulings: Sequence[Ruling], now: int) -> list[bool]:
        """Put these rulings into effect, all or none. Returns for each whether it changed anything.

        An existing ban is replaced. Expired bans are removed at the same time.
        """
        async with self._turn() as connection:
            for row in await connection.fetch(_OVER, now):
                await _write_over(connection, _ban(row), now)
            return [await _apply(connection, ruling, now) for ruling in rulings]

    async def close(self, session: OpenSession, *, reason: str, actor: str, via: str, now: int) -> None:
        """Make the process that holds this session end it."""
        was = _json(ClosedSession(session.identity, session.opened_at))
        async with self._turn() as connection:
            await connection.execute(
                _WRITE, now, actor, via, Act.CLOSE, SESSION, session.id, reason, was, None
            )

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[asyncpg.Connection]:
        """A transaction for rulings; every process looks once it is committed."""
        opened = connected(self._url, "relayd moderation", self._connect_timeout, longest=_LONGEST_RULING)
        async with opened as connection, connection.transaction():
            await take_turn(connection)
            yield connection
            await ring(connection)


async def _last(connection: asyncpg.Connection) -> LastRuling:
    line = await connection.fetchrow(_LAST_LINE)
    return LastRuling(0, b"") if line is None else LastRuling(*line)


async def take_turn(connection: asyncpg.Connection) -> None:
    """Lock the moderation log for this transaction until it ends."""
    await connection.execute(f"SET LOCAL lock_timeout = '{_TURN_TIMEOUT}'")
    await connection.execute(_TURN)


async def ring(connection: asyncpg.Connection) -> None:
    """Make every process look, once this transaction is committed."""
    await connection.execute(f"SELECT pg_notify('{MODERATION_CHANNEL}', ({_LAST})::text)")


async def write(connection: asyncpg.Connection, ruling: Ruling, act: Act, now: int) -> None:
    """Write a line to the moderation log that changes no ban."""
    await _write(connection, ruling, act, now, None, None)


async def write_all(
    connection: asyncpg.Connection, ruling: Ruling, subjects: Sequence[str], act: Act, now: int
) -> None:
    """Write such a line about each of these subjects in place of the ruling's, in this order."""
    _, _, _, reason, actor, via, _ = ruling
    await connection.execute(_WRITE_ALL, now, actor, via, act, ruling.kind, reason, list(subjects))


async def _apply(connection: asyncpg.Connection, ruling: Ruling, now: int) -> bool:
    row = await connection.fetchrow(_ONE, ruling.kind, ruling.subject)
    before = None if row is None else _ban(row)
    if not ruling.bans:
        if before is None:
            return False
        await connection.execute(
            "DELETE FROM moderation WHERE kind = $1 AND subject = $2", ruling.kind, ruling.subject
        )
        await _write(connection, ruling, Act.UNBAN, now, before, None)
        return True
    after = Ban(ruling.kind, ruling.subject, ruling.reason, ruling.actor, ruling.expires_at, now)
    if before is not None and before._replace(created_at=now) == after:
        return False
    await connection.execute(
        f"INSERT INTO moderation ({_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6)"
        " ON CONFLICT (kind, subject) DO UPDATE SET reason = excluded.reason, actor = excluded.actor,"
        " expires_at = excluded.expires_at, created_at = excluded.created_at",
        *after,
    )
    await _write(connection, ruling, Act.BAN, now, before, after)
    return True


async def _write_over(connection: asyncpg.Connection, ban: Ban, now: int) -> None:
    ended = Ruling(ban.kind, ban.subject, False, "its time was over", ban.actor, "relay")
    await _write(connection, ended, Act.EXPIRE, now, ban, None)


async def _write(
    connection: asyncpg.Connection,
    ruling: Ruling,
    act: Act,
    now: int,
    before: Ban | None,
    after: Ban | None,
) -> None:
    await connection.execute(
        _WRITE,
        now,
        ruling.actor,
        ruling.via,
        act,
        ruling.kind,
        ruling.subject,
        ruling.reason,
        _json(before),
        _json(after),
    )


def _json(was: Ban | ClosedSession | None) -> str | None:
    return None if was is None else msgspec.json.encode(was._asdict()).decode()


def _ban(row: asyncpg.Record) -> Ban:
    return Ban(SubjectKind(row[0]), *row[1:])


def _ruled(row: asyncpg.Record) -> Ruled:
    """A line of the log. A kind of line unknown to this program is returned without `before` and `after`."""
    number, at, actor, via, act, kind, subject, reason, before, after = row
    line = Ruled(
        number, at, actor, via, _known(Act, act), _known(SubjectKind, kind), subject, reason, None, None
    )
    if line.act is Act.CLOSE:
        return line._replace(before=ClosedSession(**msgspec.json.decode(before)))
    if not isinstance(line.act, Act) or not isinstance(line.kind, SubjectKind):
        return line
    return line._replace(before=_from_json(before), after=_from_json(after))


def _known(names: type[_Name], text: str) -> _Name | str:
    try:
        return names(text)
    except ValueError:
        return text


def _from_json(text: str | None) -> Ban | None:
    if text is None:
        return None
    members = msgspec.json.decode(text)
    return Ban(SubjectKind(members["kind"]), *(members[name] for name in Ban._fields[1:]))
