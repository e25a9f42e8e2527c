"""Connections to PostgreSQL: opening them, lending them out, and telling their errors apart."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import asyncpg

from relayd.database_url import each_server, fault_of, trusts_system
from relayd.logs import problem_of
from relayd.store.payers import Payer, line_of
from relayd.store.turns import Turn, Turns
from relayd.store.types import StoreError, StoreTimeout, StoreUnavailable

__all__ = ["ConnectionPool", "close_quietly", "connect", "connected", "deadline", "translate_errors"]

_LOST = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,  # raised by the driver for a connection that is closed or closing
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # shutdown, crash recovery, "cannot connect now"
    asyncpg.TransactionRollbackError,  # a deadlock or, on a replica, a conflict with replay
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
)

_POOLED = (
    asyncpg.ProtocolViolationError,  # from PgBouncer, about the settings that a session begins with
    asyncpg.InvalidSQLStatementNameError,  # our prepared statement is in another session
    asyncpg.DuplicatePreparedStatementError,  # another program's prepared statement is in this one
)

_VANISHED: Final = {
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
"""With these, the server notices within a minute that a machine has vanished. By default it takes two hours,
and during that time keeps what the machine held: the lock of the log, or the lead among readers of peers."""

_OURS: Final = {
    "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "default_transaction_isolation": "read committed",
}
"""Overrides of settings that a role or a database may have for other programs. The relay has its own
deadlines: a general limit would end the writer's session in each quiet hour, and each new session begins a
term; it would fail batches, and interrupt migrations. A transaction that waits for the lock of the log must
see what was appended meanwhile, so transactions are `read committed` unless they choose another level
themselves. `transaction_timeout` belongs here too, but servers before version 17 refuse a session that names
it: it is set afterwards."""
_HAS_TRANSACTION_TIMEOUT: Final = (17,)

_ARRAYS: Final = [
    {
        "oid": oid,
        "ns": "pg_catalog",
        "name": f"_{name}",
        "kind": b"b",
        "basetype": None,
        "elemtype": element,
        "elemtype_name": name,
        "elemdelim": ",",
        "range_subtype": None,
        "attrtypoids": None,
        "attrnames": None,
    }
    for oid, element, name in (
        (1000, 16, "bool"),
        (1001, 17, "bytea"),
        (1005, 21, "int2"),
        (1007, 23, "int4"),
        (1016, 20, "int8"),
    )
]
"""PostgreSQL's built-in types, whose OIDs never change. Otherwise the driver looks them up on each
connection, with a statement that takes the server a hundred times as long as one of ours."""

_LONG: Final = 0.02
"""Seconds. A statement that takes longer is waiting for a disk, and leaves processor and loop to others."""


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Raise the store's errors in place of the driver's. `CancelledError` passes."""
    try:
        yield
    except asyncpg.QueryCanceledError as error:
        raise StoreTimeout("the statement took longer than its limit") from error
    except asyncpg.ReadOnlySQLTransactionError as error:
        # After a failover the old address may lead to a standby: retry until it has been promoted.
        raise StoreUnavailable("the database accepts no writes") from error
    except asyncpg.ClientConfigurationError as error:
        raise StoreError(f"the database URL cannot be used: {_first_line(error)}") from error
    except asyncpg.TooManyConnectionsError as error:
        raise StoreUnavailable(
            f"the database has no connection left: {_first_line(error)}; `relayd doctor` says how many the"
            " relay needs (ALTER ROLE … or ALTER DATABASE … CONNECTION LIMIT, or max_connections)"
        ) from error
    except asyncpg.InsufficientResourcesError as error:  # it may pass, so try again
        raise StoreUnavailable(f"the database lacks disk or memory: {_first_line(error)}") from error
    except _POOLED as error:
        raise StoreUnavailable(
            f"the database keeps no session for the relay: {_first_line(error)}; if a pooler is in between,"
            " connect to PostgreSQL itself"
        ) from error
    except _LOST as error:
        raise StoreUnavailable(f"the database cannot be reached: {_first_line(error)}") from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise StoreError(
            f"the database's role may not do that: {_first_line(error)}; it has to own the database and the"
            " relay's tables (ALTER DATABASE … OWNER TO …, REASSIGN OWNED BY … TO …)"
        ) from error
    except asyncpg.InvalidSchemaNameError as error:
        raise StoreError(
            f"the search_path names no schema of this database: {_first_line(error)}; ALTER ROLE … or"
            " ALTER DATABASE … RESET search_path, or create the schema"
        ) from error
    except asyncpg.PostgresError as error:
        raise StoreError(f"the database refused a statement: {_first_line(error)}") from error


@contextlib.asynccontextmanager
async def deadline(connection: asyncpg.Connection, seconds: float) -> AsyncIterator[None]:
    """Translate errors, and end the connection if its work is not done after `seconds`.

    Raises `StoreUnavailable` then. Cancelling the work would not be enough: a cancelled transaction is first
    rolled back, and a server that has vanished does not answer that either.
    """
    is_late = False

    def end() -> None:
        nonlocal is_late
        is_late = True
        connection.terminate()

    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        with translate_errors():
            yield
    except StoreError:
        if not is_late:
            raise
        raise StoreUnavailable("the database did not answer in time") from None
    finally:
        timer.cancel()


@contextlib.contextmanager
def _too_old(settings: Iterable[str]) -> Iterator[None]:
    """Name the version that is needed if the server does not know one of our `settings` of a session."""
    try:
        yield
    except asyncpg.UndefinedObjectError as error:
        said = _first_line(error)
        ours = any(f'"{name}"' in said for name in settings)
        advice = "PostgreSQL 15 or newer is needed" if ours else "the URL's options ask for it"
        raise StoreError(f"the server refuses the relay's sessions: {said}; {advice}") from error


def _first_line(error: Exception) -> str:
    # Only the message: the detail of a PostgreSQL error may quote stored values.
    return problem_of(error).partition("\n")[0]


async def connect(
    url: str,
    *,
    name: str,
    connect_timeout: float,
    answer_timeout: float | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> asyncpg.Connection:
    """Open a connection that pg_stat_activity shows as `name`, with `settings` for its session.

    If the URL names several servers, the first that answers as wanted is used; each gets its share of the
    time. `answer_timeout` is for each statement, if the total time of all statements is unknown (else see
    `deadline`). Raises `StoreUnavailable`. Cancelling closes what was opened.
    """
    if (fault := fault_of(url)) is not None:
        raise StoreError(f"the database URL cannot be used: {fault}")
    servers = each_server(url)
    session = {"application_name": name, "jit": "off", **_VANISHED, **_OURS, **settings}
    said: list[str] = []
    for server in servers:
        try:
            with translate_errors(), _too_old(session):
                connection = await asyncpg.connect(
                    server,
                    timeout=connect_timeout / len(servers),
                    command_timeout=answer_timeout,
                    ssl=True if trusts_system(server) else None,
                    server_settings=session,
                    max_cached_statement_lifetime=0,
                    # Bodies make the arguments of statements large, never their text; all our statements fit.
                    statement_cache_size=256,
                )
                await _prepare(connection, connect_timeout / len(servers))
                return connection
        except ValueError:  # the driver quotes a part of the URL, which may be part of a password
            raise StoreError("the database URL cannot be used: a host or a port is none") from None
        except StoreUnavailable as error:
            if len(servers) == 1:
                raise
            said.append(str(error))
    raise StoreUnavailable(f"none of {len(servers)} servers: {'; '.join(said)}")


async def _prepare(connection: asyncpg.Connection, timeout: float) -> None:
    try:
        connection.get_settings().register_data_types(_ARRAYS)
        if connection.get_server_version() >= _HAS_TRANSACTION_TIMEOUT:
            async with deadline(connection, timeout):
                await connection.execute("SET transaction_timeout = 0")
    except BaseException:
        connection.terminate()
        raise


class ConnectionPool:
    """At most `size` connections for single statements, opened when first needed.

    Leaner than asyncpg's pool, which spends more time resetting a connection than our statements take: ours
    change no state of a session. While all connections are lent out, `lease` waits: the payer that has used
    least goes first (`Turns`), and callers without a payer share one queue. `turn_timeout` bounds each turn:
    the server ends a slow statement itself, so this is for a server that no longer answers.

    While `gives_way` says that others are in a hurry, one connection is lent at a time. A connection that has
    been lent for long does not count: if the disk is slow, readers do not wait for each other.
    """

    def __init__(
        self,
        url: str,
        size: int,
        *,
        name: str,
        connect_timeout: float,
        turn_timeout: float = 15.0,
        check: Callable[[asyncpg.Connection], Awaitable[object]] | None = None,
        **settings: str,
    ) -> None:
        """`check` looks at each new connection before it is lent, and raises if it must not be."""
        self._check = check
        self._url = url
        self._name = name
        self._connect_timeout = connect_timeout
        self._turn_timeout = turn_timeout
        self._settings = settings
        self._idle: list[asyncpg.Connection] = []
        self._lent: set[asyncpg.Connection] = set()
        self._turns = Turns(size)
        self._waiting: dict[Turn, asyncio.Future[None]] = {}
        self._begun: dict[Turn, float] = {}
        """When each turn in progress began, in order, on the clock of the loop."""
        self._look: asyncio.Handle | None = None
        self._closed = False
        self.gives_way: Callable[[], bool] = lambda: False

    @contextlib.asynccontextmanager
    async def lease(self, payer: Payer | None = None) -> AsyncIterator[asyncpg.Connection]:
        """Lend a connection for `turn_timeout` seconds. In the block the driver's errors become the store's.

        Raises `StoreUnavailable`; cancelling while waiting lends nothing.
        """
        turn = self._turns.ask(line_of(payer))
        self._waiting[turn] = lent = asyncio.get_running_loop().create_future()
        started: float | None = None
        try:
            self._begin()
            await lent
            started = time.perf_counter()
            connection = await self._take()
            self._lent.add(connection)
            try:
                async with deadline(connection, self._turn_timeout):
                    yield connection
            finally:
                self._lent.discard(connection)
                if self._closed:
                    connection.terminate()
                elif not connection.is_closed():
                    self._idle.append(connection)
        finally:
            self._waiting.pop(turn, None)
            self._begun.pop(turn, None)
            seconds = 0.0 if started is None else time.perf_counter() - started
            self._turns.end(turn, seconds)
            if payer is not None:
                payer.used_database(seconds, time.monotonic())
            self._begin()

    def _begin(self) -> None:
        while self._waiting and self._may_begin() and (turn := self._turns.begin()) is not None:
            lent = self._waiting.pop(turn)
            self._begun[turn] = asyncio.get_running_loop().time()
            if not lent.done():  # a waiter that was cancelled in this very step ends its turn itself
                lent.set_result(None)

    def _may_begin(self) -> bool:
        """Whether one more turn may begin; arranges another look if that is only a matter of time."""
        if not self._begun or not self.gives_way():
            return True
        loop = asyncio.get_running_loop()
        young_until = next(reversed(self._begun.values())) + _LONG
        if loop.time() >= young_until:
            return True
        # One look at a time. It may come early, because loops round times, and then arranges another.
        if self._look is None:
            self._look = loop.call_at(young_until, self._look_again)
        return False

    def _look_again(self) -> None:
        self._look = None
        self._begin()

    async def _take(self) -> asyncpg.Connection:
        self._check_is_open()
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        connection = await connect(
            self._url, name=self._name, connect_timeout=self._connect_timeout, settings=self._settings
        )
        try:
            if self._check is not None:
                async with deadline(connection, self._connect_timeout):
                    await self._check(connection)
            self._check_is_open()  # `close` does not see what is being opened
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _check_is_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")

    async def close(self) -> None:
        """End every connection, including those lent out. Idempotent."""
        self._closed = True
        if self._look is not None:
            self._look.cancel()
        while self._idle:
            await close_quietly(self._idle.pop())
        for connection in self._lent:
            connection.terminate()


async def close_quietly(connection: asyncpg.Connection, timeout: float = 2.0) -> None:
    """End a connection cleanly, or by force if the server does not answer."""
    try:
        await connection.close(timeout=timeout)
    except (*_LOST, asyncpg.PostgresError):
        connection.terminate()


@contextlib.asynccontextmanager
async def connected(
    url: str,
    name: str,
    connect_timeout: float,
    *,
    longest: float | None = None,
    answer_timeout: float | None = None,
) -> AsyncIterator[asyncpg.Connection]:
    """A connection for one piece of work, closed afterwards; the driver's errors become the store's.

    The work may take `longest` seconds in all (`deadline`), or each of its statements `answer_timeout`.
    Raises `StoreUnavailable`.
    """
    connection = await connect(url, name=name, connect_timeout=connect_timeout, answer_timeout=answer_timeout)
    try:
        with translate_errors():
            if longest is None:
                yield connection
            else:
                async with deadline(connection, longest):
                    yield connection
    finally:
        await close_quietly(connection)
