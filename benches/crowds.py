"""Crowds of idle and of hostile connections, in their own processes.

They come from their own loopback addresses, which only Linux lets any program bind. So the relay's limits by
address apply to them, while honest clients share no budget with them. A hostile connection acts once per
interval; one that the relay has thrown out returns after the same interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import uvloop

from benches.attacks import ATTACKS, TLS_ATTACKS, Gang, Ledger
from benches.peer import BenchError, connect_peers
from benches.processes import fork_context

__all__ = ["MANY", "ONE", "Crowd", "CrowdReport", "hostile_crowd", "idle_crowd"]

_LEAST_CPU: Final = 19
"""Crowds stand for other machines, so they get only the CPU that relay, database and honest clients leave."""
_READY_TIMEOUT: Final = 120.0
_STOP_TIMEOUT: Final = 30.0
_ADDRESSES: Final = 50
_IDLE: Final = [f"127.0.1.{host}" for host in range(1, _ADDRESSES + 1)]
MANY: Final = [f"127.0.2.{host}" for host in range(1, _ADDRESSES + 1)]
"""The addresses of hostile connections."""
ONE: Final = MANY[:1]

_Message = tuple[int, float, dict[str, int], dict[str, int], int, int]


@dataclass(frozen=True, slots=True)
class CrowdReport:
    """What a crowd has done so far: connections open, CPU seconds used, deeds and their answers by kind."""

    open: int
    cpu: float
    deeds: dict[str, int]
    answers: dict[str, int]
    sent_bytes: int
    opened: int


class Crowd:
    """A crowd in its own process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def report(self) -> CrowdReport:
        """The crowd's report at this moment. Raises `BenchError` if the process does not answer in time."""
        self._pipe.send("report")
        return CrowdReport(*await _receive(self._pipe, _STOP_TIMEOUT))


@contextlib.asynccontextmanager
async def idle_crowd(url: str, count: int) -> AsyncIterator[Crowd]:
    """`count` connections that answer pings and do nothing else; all are open when the block begins."""
    async with _crowd(functools.partial(_stand_idle, url, count)) as crowd:
        yield crowd


@contextlib.asynccontextmanager
async def hostile_crowd(
    url: str, attacks: Sequence[str], count: int, interval: float, sources: Sequence[str] = MANY
) -> AsyncIterator[Crowd]:
    """`count` connections that make these attacks in turn, each with a deed every `interval` seconds."""
    work = functools.partial(_be_hostile, url, attacks, count, interval, sources)
    async with _crowd(work) as crowd:
        yield crowd


@contextlib.asynccontextmanager
async def _crowd(work: Callable[[Connection], Awaitable[None]]) -> AsyncIterator[Crowd]:
    context = fork_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        await _receive(ours, _READY_TIMEOUT)
        yield Crowd(ours)
    finally:
        with contextlib.suppress(BrokenPipeError):
            ours.send(None)
        await asyncio.to_thread(process.join, _STOP_TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
        ours.close()


async def _receive(pipe: Connection, timeout: float) -> _Message:
    try:
        if not await asyncio.to_thread(pipe.poll, timeout):
            raise BenchError("a crowd of connections does not answer")
        message: _Message = pipe.recv()
    except EOFError:
        raise BenchError("a crowd of connections has died; its last words are on stderr") from None
    return message


# In the crowd's process.


def _give_way() -> None:
    """Use only the CPU that relay, database and honest clients leave: a crowd stands for other machines.

    Niceness alone would still give it slices of some milliseconds. Where the kernel shares the CPU among
    sessions first (`sched_autogroup_enabled`), a policy counts only within one: so the crowd has a session of
    its own, with the least share.
    """
    os.nice(_LEAST_CPU)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.setsid()
        with contextlib.suppress(OSError):  # a kernel that does not
            Path("/proc/self/autogroup").write_text(str(_LEAST_CPU), encoding="ascii")


def _run(work: Callable[[Connection], Awaitable[None]], pipe: Connection) -> None:
    _give_way()

    async def main() -> None:
        await work(pipe)

    uvloop.run(main())


async def _answer_reports(pipe: Connection, count_open: Callable[[], int], ledger: Ledger) -> None:
    """Report when all connections are open, then on every request, until a message says to stop."""
    loop = asyncio.get_running_loop()

    def report() -> _Message:
        deeds, answers = dict(ledger.deeds), dict(ledger.answers)
        return count_open(), time.process_time(), deeds, answers, ledger.sent_bytes, ledger.opened

    pipe.send(report())
    while await loop.run_in_executor(None, pipe.recv) is not None:
        pipe.send(report())


async def _stand_idle(url: str, count: int, pipe: Connection) -> None:
    peers = await connect_peers(url, count, sources=_IDLE)
    await _answer_reports(pipe, lambda: sum(not peer.transport.is_closing() for peer in peers), Ledger())


async def _be_hostile(
    url: str, names: Sequence[str], count: int, interval: float, sources: Sequence[str], pipe: Connection
) -> None:
    attacks = {name: {**ATTACKS, **TLS_ATTACKS}[name] for name in names}
    async with Gang(url, attacks, count, interval, sources) as gang:
        await _answer_reports(pipe, lambda: gang.open, gang.ledger)
