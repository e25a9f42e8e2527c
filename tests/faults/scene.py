"""A real relay with two workers on a real PostgreSQL, and how each fault is inflicted on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import asyncpg
import psutil

from tests.faults.clock import SteppedClock
from tests.faults.disk import FaultyDisk
from tests.faults.jumping import JUMPS, Jumping
from tests.faults.ledger import Ledger
from tests.faults.proxy import FaultyNetwork
from tests.faults.schedule import Fault
from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess

__all__ = ["Scene"]

WORKERS = 2
HOURS = 6.0
_PATIENCE = 300.0
_LONGEST_DISK_FAULT = 10.0
_LONGEST_WAIT_FOR_NEWS = 20.0
_TRIES = 120
_PAUSE_BETWEEN_TRIES = 0.5
_DATABASE_AWAY = (
    ConnectionError,
    FileNotFoundError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # raised by the driver for a connection that ends while being opened
)
_SETTINGS: dict[str, object] = {
    "publish_timeout": 10,
    "ping_interval": 2,
    "slow_consumer_timeout": 10,
    "handshake_timeout": 5,
    "max_connections_per_address": 10_000,
}


class Scene:
    """The relay, its database, its disk, its clock and the network in front of it."""

    def __init__(self, folder: Path, ledger: Ledger, *, seed: int) -> None:
        self._folder = folder
        self._ledger = ledger
        self._chance = random.Random(seed)
        self._stack = AsyncExitStack()
        self._serves = asyncio.Event()
        """Set unless the relay is being started: on a slow machine most faults would otherwise hit none."""
        self.fired: Counter[str] = Counter()
        """How often each fault has taken place."""

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_context
        self.disk = enter(FaultyDisk())
        self.clock = enter(SteppedClock(self._folder / "clock"))
        self.relay = RelayProcess(
            self._folder / "relay",
            port=free_port(),
            arguments=("--workers", str(WORKERS)),
            environ=self.disk.environ | self.clock.environ,
            python_path=self.clock.python_path,
            **_SETTINGS,  # type: ignore[arg-type]
        )
        # A database that recovers on a slow disk, while the machine does other work, takes minutes.
        self.relay.start_timeout = self.relay.stop_timeout = _PATIENCE
        self._stack.callback(self.relay.kill)
        await self._start_relay()
        self.network = await self._stack.enter_async_context(FaultyNetwork(self.relay.port))
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def run(
        self, tracks: Iterable[list[Fault]], seconds: float, report: Callable[[Fault], None]
    ) -> None:
        """Let the faults happen, the tracks in parallel; then mend everything.

        After `seconds` only kinds that have not occurred yet still come: on a busy machine, where each start
        of the relay takes a minute, the tracks take many times as long as planned.
        """
        self._ends_at = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.TaskGroup() as group:
                for track in tracks:
                    group.create_task(self._follow(track, report))
        finally:
            await self.mend()

    async def mend(self) -> None:
        """End every fault, and make sure that the relay runs."""
        self.network.heal()
        self.clock.step(0.0)
        self.disk.fill(full=False)
        self.disk.fail(failing=False)
        self.disk.slow(0.0)
        if not self.relay.is_running():
            await self._start_relay()

    async def _start_relay(self) -> None:
        await asyncio.to_thread(self.relay.start)
        self._serves.set()

    async def _follow(self, track: list[Fault], report: Callable[[Fault], None]) -> None:
        for fault in track:
            if self.fired[fault.kind] and asyncio.get_running_loop().time() > self._ends_at:
                continue
            await asyncio.sleep(fault.pause)
            await asyncio.to_thread(self.relay.look_at_machine)
            await self._serves.wait()
            act: Callable[[Fault], Coroutine[Any, Any, bool]] = getattr(self, f"_{fault.kind}")
            # Another track may have taken what this fault needs: the database that it should kill is down.
            for _ in range(_TRIES):
                await self._serves.wait()
                if await act(fault):
                    self.fired[fault.kind] += 1
                    report(fault)
                    break
                await asyncio.sleep(_PAUSE_BETWEEN_TRIES)

    # -- processes

    async def _kill_relay(self, fault: Fault) -> bool:
        self._serves.clear()
        await asyncio.to_thread(self.relay.kill)
        await asyncio.sleep(fault.lasts)
        await self._start_relay()
        return True

    async def _stop_relay(self, fault: Fault) -> bool:
        self._serves.clear()
        await asyncio.to_thread(self.relay.stop)
        await asyncio.sleep(fault.lasts)
        await self._start_relay()
        return True

    async def _kill_worker(self, fault: Fault) -> bool:
        if worker := self._a_worker(fault):
            worker.kill()
        return worker is not None

    async def _freeze_worker(self, fault: Fault) -> bool:
        worker = self._a_worker(fault)
        return worker is not None and await _freeze([worker], fault.lasts)

    def _a_worker(self, fault: Fault) -> psutil.Process | None:
        workers = self.relay.workers()
        return workers[int(fault.chance * 0.999 * len(workers))] if workers else None

    async def _kill_database(self, fault: Fault) -> bool:
        return self._signal_database(signal.SIGKILL)

    async def _restart_database(self, fault: Fault) -> bool:
        return self._signal_database(signal.SIGINT)  # PostgreSQL's fast shutdown

    def _signal_database(self, number: signal.Signals) -> bool:
        with contextlib.suppress(OSError, ValueError):
            os.kill(self.relay.postgres_pid(), number)
            return True
        return False

    async def _freeze_database(self, fault: Fault) -> bool:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            server = self.relay.postgres()
            return await _freeze([server, *server.children(recursive=True)], fault.lasts)
        return False

    async def _end_backends(self, fault: Fault) -> bool:
        with contextlib.suppress(*_DATABASE_AWAY):
            connection = await self._database()
            try:
                ended = await connection.fetchval(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                    " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
                )
            finally:
                await connection.close(timeout=5.0)
            return bool(ended)
        return False

    async def _take_connections(self, fault: Fault) -> bool:
        """Take all remaining connections of the database, while the relay must reopen its own."""
        taken: list[asyncpg.Connection] = []
        try:
            with contextlib.suppress(*_DATABASE_AWAY):
                while True:
                    taken.append(await self._database())
            if taken:
                await taken[0].execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE NOT pid = ANY($1) AND backend_type = 'client backend'",
                    [connection.get_server_pid() for connection in taken],
                )
            await asyncio.sleep(fault.lasts)
        except _DATABASE_AWAY:
            pass
        finally:
            for connection in taken:
                connection.terminate()
        return bool(taken)

    async def _database(self) -> asyncpg.Connection:
        # By descriptor: the path of a socket has at most 107 bytes, and tests' folders have long names.
        folder = os.open(self.relay.cluster(), os.O_PATH | os.O_DIRECTORY)
        try:
            return await asyncpg.connect(
                host=f"/proc/self/fd/{folder}", port=5432, user="relayd", database="relayd", timeout=5.0
            )
        finally:
            os.close(folder)

    async def _restored_backup(self, fault: Fault) -> bool:
        """Take a cold copy of the database, let the relay run for a while, and restore the copy."""
        cluster, backup = self.relay.cluster(), self._folder / "backup"
        await self._stopped(shutil.rmtree, backup, ignore_errors=True)
        await _copied(cluster, backup)
        self.network.admits.clear()  # nobody publishes until the content of the copy is known
        await self._start_relay()
        try:
            kept = await self._packets()
        finally:
            self.network.admits.set()
        if kept is None:
            return False
        await asyncio.sleep(fault.lasts)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_WAIT_FOR_NEWS):
                while not self._ledger.acknowledged.keys() - kept:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.1)
        await self._stopped(shutil.rmtree, cluster)
        self.network.admits.clear()
        self.network.reset(self._chance, 1.0)  # an OK on its way must not come after the loss
        try:
            await _copied(backup, cluster)
            self._ledger.restore(kept)
        finally:
            self.network.admits.set()
        await self._start_relay()
        return True

    async def _stopped(self, then: Callable[..., object], *arguments: Any, **options: Any) -> None:
        self._serves.clear()
        await asyncio.to_thread(self.relay.stop)
        await asyncio.to_thread(then, *arguments, **options)

    async def _packets(self) -> frozenset[str] | None:
        """The ids of all packets in the database; None if it cannot be read."""
        for _ in range(_TRIES):
            with contextlib.suppress(*_DATABASE_AWAY):
                connection = await self._database()
                try:
                    rows = await connection.fetch("SELECT packet_id FROM packets", timeout=60.0)
                finally:
                    connection.terminate()
                return frozenset("0x" + row["packet_id"].hex() for row in rows)
            await asyncio.sleep(_PAUSE_BETWEEN_TRIES)
        return None

    async def _reload(self, fault: Fault) -> bool:
        if self.relay.is_running():
            os.kill(self.relay.pid, signal.SIGHUP)
        return self.relay.is_running()

    # -- network

    async def _partition(self, fault: Fault) -> bool:
        self.network.partition()
        await asyncio.sleep(fault.lasts)
        self.network.heal()
        return True

    async def _trickle(self, fault: Fault) -> bool:
        self.network.trickles = True
        await asyncio.sleep(fault.lasts)
        self.network.heal()
        return True

    async def _reset(self, fault: Fault) -> bool:
        return bool(self.network.reset(self._chance, fault.chance))

    async def _half_open(self, fault: Fault) -> bool:
        return bool(self.network.half_open(self._chance, fault.chance))

    # -- disk and clock

    async def _full_disk(self, fault: Fault) -> bool:
        self.disk.fill(full=True)
        try:
            return await self._disk_is_hit(fault)
        finally:
            self.disk.fill(full=False)

    async def _slow_disk(self, fault: Fault) -> bool:
        self.disk.slow(0.005 + 0.045 * fault.chance)
        try:
            return await self._disk_is_hit(fault)
        finally:
            self.disk.slow(0.0)

    async def _failing_fsync(self, fault: Fault) -> bool:
        self.disk.fail(failing=True)
        try:
            return await self._disk_is_hit(fault)
        finally:
            self.disk.fail(failing=False)

    async def _disk_is_hit(self, fault: Fault) -> bool:
        """Wait as long as the fault lasts, and until it has hit the database; returns False if it does not.

        A restart of the relay ends the fault: a recovering database syncs each of its thousand files.
        """
        loop = asyncio.get_running_loop()
        before, start = self.disk.hits, loop.time()
        while self._serves.is_set():
            await asyncio.sleep(0.05)
            passed = loop.time() - start
            if passed > _LONGEST_DISK_FAULT or (passed > fault.lasts and self.disk.hits > before):
                break
        return self.disk.hits > before

    async def _clock_step(self, fault: Fault) -> bool:
        self.clock.step((2.0 * fault.chance - 1.0) * HOURS * 3600.0)
        await asyncio.sleep(fault.lasts)
        self.clock.step(0.0)
        return True

    async def _clock_jump(self, fault: Fault) -> bool:
        """Step the clock by hours or years; packets are stored meanwhile, and verdicts checked afterwards."""
        seconds = JUMPS[int(fault.chance * 0.999 * len(JUMPS))]
        jumping = Jumping(lambda: self.relay.ws, self._ledger)
        if not await jumping.before():
            return False
        self.clock.step(seconds)
        try:
            if not await jumping.meanwhile(seconds):
                return False
            await asyncio.sleep(fault.lasts)
        finally:
            self.clock.step(0.0)
        return await jumping.after()


async def _copied(source: Path, target: Path) -> None:
    """Copy a folder and keep its owners, which PostgreSQL checks."""
    copying = await asyncio.create_subprocess_exec("cp", "-a", str(source), str(target))
    if await copying.wait():
        raise OSError(f"{source} could not be copied")


async def _freeze(processes: list[psutil.Process], seconds: float) -> bool:
    """Suspend processes for a while."""
    stopped = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
            stopped.append(process)
    try:
        await asyncio.sleep(seconds)
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    return bool(stopped)
