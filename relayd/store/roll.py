"""Roll calls over NOTIFY: questions about open sessions to every process, and their answers.

Questions and answers are gone once they are read, so there is no table of them and nothing to clean up. A
process that can be asked holds a shared advisory lock on its listening connection: the asker sees in
`pg_locks` whose answers to wait for, and does not wait for a process that has died.

The asker holds another lock meanwhile, and asks those again that have not answered: a process that hears of
commits over a bus does not listen, but looks for that lock once a second and listens while it is held. A
process that has not answered within three seconds counts as silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import Final

import asyncpg
import msgspec

from relayd.roll import Answers, Question, Roll
from relayd.store.connection import ConnectionPool, connected

__all__ = ["ROLL_CHANNEL", "RollCall"]

ROLL_CHANNEL: Final = "relayd_roll"
"""The LISTEN/NOTIFY channel of questions; the payload is the question."""
# "roll" and "asks": the first halves of the keys of the advisory locks.
_THERE: Final = 0x726F6C6C
_ASKING: Final = 0x61736B73
_TIMEOUT: Final = 3.0
_GRACE: Final = 5.0
"""Seconds that asking may take in addition."""
_ASK_AGAIN_AFTER: Final = 0.3
_ASKED_AT_ONCE: Final = 200
"""The most processes that one notification can name besides the rest of a question; the next names others."""
_HOLDERS: Final = (
    "SELECT DISTINCT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND classid = $1::bigint::oid AND objsubid = 2"
)
_HOLD: Final = "SELECT pg_try_advisory_lock_shared($1, $2)"


class RollCall:
    """Asks all processes, and sends the answers of this one. Every method raises `StoreUnavailable`."""

    def __init__(self, url: str, lookups: ConnectionPool, *, connect_timeout: float) -> None:
        self._url = url
        self._lookups = lookups
        self._connect_timeout = connect_timeout
        self._number = secrets.randbelow(2**31)  # fits the second half of a lock's key
        self.process = f"{self._number:08x}"
        """The name of this process, which is the first half of its sessions' ids."""

    async def attend(self, connection: asyncpg.Connection) -> None:
        """Show other processes that this one answers, as long as this connection lasts."""
        await connection.execute(_HOLD, _THERE, self._number)

    async def is_asking(self, connection: asyncpg.Connection) -> bool:
        """Whether somebody is waiting for answers."""
        return bool(await connection.fetch(_HOLDERS, _ASKING))

    async def ask(self, question: Question, timeout: float = _TIMEOUT) -> Roll:
        """The matching sessions of every process that answers within `timeout` seconds."""
        reply = f"{ROLL_CHANNEL}_{secrets.token_hex(8)}"
        async with connected(
            self._url, "relayd roll", self._connect_timeout, longest=timeout + _GRACE
        ) as connection:
            await connection.execute(_HOLD, _ASKING, 0)
            there = await connection.fetch(_HOLDERS, _THERE)
            answers = Answers(question, frozenset(f"{number:08x}" for (number,) in there))
            came = asyncio.Event()

            def receive(connection: object, pid: int, channel: str, payload: object) -> None:
                answers.receive(str(payload))
                came.set()

            await connection.add_listener(reply, receive)
            with contextlib.suppress(TimeoutError):  # the roll has the number of those that did not answer
                async with asyncio.timeout(timeout):
                    while answers.awaited:
                        asked = msgspec.structs.replace(
                            question, reply=reply, of=answers.awaited[:_ASKED_AT_ONCE]
                        )
                        await _notify(connection, ROLL_CHANNEL, msgspec.json.encode(asked))
                        await _wait(answers, came)
        return answers.roll()

    async def answer(self, reply: str, parts: Sequence[bytes]) -> None:
        """Send this process's answer."""
        async with self._lookups.lease() as connection:
            async with connection.transaction():
                for part in parts:
                    await _notify(connection, reply, part)


async def _wait(answers: Answers, came: asyncio.Event) -> None:
    """Wait until all have answered, or it is time to ask again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ASK_AGAIN_AFTER):
            while answers.awaited:
                await came.wait()
                came.clear()


async def _notify(connection: asyncpg.Connection, channel: str, payload: bytes) -> None:
    await connection.execute("SELECT pg_notify($1, $2)", channel, payload.decode())
