"""One run of a benchmark of Tx/Rx: a receiver and a sender, each in its own process, and their measurements.

Every run has a fresh pair of processes, so that no contestant inherits another's threads, memory or warm
caches: they are forks of a process that has imported all contestants and run none. All do the same: some
messages to warm up, then as many as fit into the time, with at most `Job.window` in flight, until the last
has been acknowledged.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trustme
from strata.txrx import TxRxSettings

from benches.peer import BenchError
from benches.processes import fork_context

__all__ = ["AsyncLink", "BlockingLink", "Contestant", "Job", "Run", "Sent", "run"]

_WINDOW_MESSAGES = 4096
_WINDOW_BYTES = 8 * 2**20
_PARTS_OF_WINDOW = 4
_FRAME_LIMIT = 128 * 2**20
_START_SECONDS = 30.0
_SPARE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """The work of a pair of processes."""

    contestant: str
    """Module and class, such as `benches.tx_rx_ours:Ours`."""
    transport: str
    """`unix`, `tcp` or `tls`."""
    size: int
    """Bytes in a message."""
    seconds: float
    one_by_one: bool = False
    """Whether each message is acknowledged before the next is sent."""
    folder: str = ""
    """For sockets and certificates."""
    one_core: bool = False
    """Whether both processes share a core: the time to wake another core varies with the machine."""

    @property
    def batch(self) -> int:
        """The number of messages written at once."""
        return self.window // _PARTS_OF_WINDOW

    @property
    def window(self) -> int:
        """The number of messages that may wait for their acknowledgement."""
        return max(_PARTS_OF_WINDOW, min(_WINDOW_MESSAGES, _WINDOW_BYTES // self.size))

    @property
    def payload(self) -> bytes:
        """The message."""
        return b"x" * self.size

    @property
    def socket_path(self) -> str:
        """The path of a Unix socket."""
        return f"{self.folder}/socket"

    @property
    def settings(self) -> TxRxSettings:
        """The defaults, with room for the largest message, and with certificates if TLS needs them."""
        if self.transport != "tls":
            return TxRxSettings(codec_max_frame_length=_FRAME_LIMIT)
        folder = Path(self.folder)
        return TxRxSettings(
            codec_max_frame_length=_FRAME_LIMIT,
            tls_certificate=folder / "certificate.pem",
            tls_key=folder / "key.pem",
            tls_authorities=folder / "authority.pem",
        )


@dataclass(frozen=True, slots=True)
class Sent:
    """The measurements of a sender."""

    timed: int
    """Messages sent while the clock ran; all were acknowledged before it stopped."""
    seconds: float
    total: int
    """All messages, including those sent before."""
    times: list[float]
    """The time of each message, ascending, if they were sent one by one."""


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of a pair of processes."""

    sent: Sent
    sender_cpu: float
    """CPU seconds of all threads, per message."""
    receiver_cpu: float

    @property
    def rate(self) -> float:
        """Messages per second."""
        return self.sent.timed / self.sent.seconds


class Contestant(ABC):
    """A way to send messages from one process to another. Each of them makes an instance."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        """Serve, call `ready` with the address, and receive until the sender is done. Returns the number of
        messages, and of bytes."""

    @abstractmethod
    def send(self, where: str) -> Sent:
        """Send the messages of the job to this address."""


class AsyncLink(ABC):
    """A sender on an event loop."""

    @abstractmethod
    async def write(self, count: int) -> None:
        """Send `count` messages."""

    @abstractmethod
    async def drain(self, most: int) -> None:
        """Wait until no more than `most` wait for their acknowledgement."""

    async def send(self) -> None:
        """Send one message, and wait until it is acknowledged."""
        await self.write(1)
        await self.drain(0)

    async def carry_out(self, job: Job) -> Sent:
        """Send the messages of the job."""
        for _ in range(job.batch if job.one_by_one else 1):
            await self.write(1 if job.one_by_one else job.batch)
            await self.drain(0)
        clock, times, timed = time.perf_counter, list[float](), 0
        started = clock()
        until = started + job.seconds
        while (now := clock()) < until:
            if job.one_by_one:
                await self.send()
                times.append(clock() - now)
                timed += 1
            else:
                await self.write(job.batch)
                await self.drain(job.window - job.batch)
                timed += job.batch
        await self.drain(0)
        return Sent(timed, clock() - started, timed + job.batch, sorted(times))


class BlockingLink(ABC):
    """A sender without an event loop; it mirrors `AsyncLink` line by line."""

    @abstractmethod
    def write(self, count: int) -> None:
        """Send `count` messages."""

    @abstractmethod
    def drain(self, most: int) -> None:
        """Wait until no more than `most` wait for their acknowledgement."""

    def carry_out(self, job: Job) -> Sent:
        """Send the messages of the job."""
        for _ in range(job.batch if job.one_by_one else 1):
            self.write(1 if job.one_by_one else job.batch)
            self.drain(0)
        clock, times, timed = time.perf_counter, list[float](), 0
        started = clock()
        until = started + job.seconds
        while (now := clock()) < until:
            if job.one_by_one:
                self.write(1)
                self.drain(0)
                times.append(clock() - now)
                timed += 1
            else:
                self.write(job.batch)
                self.drain(job.window - job.batch)
                timed += job.batch
        self.drain(0)
        return Sent(timed, clock() - started, timed + job.batch, sorted(times))


def run(
    contestant: str,
    transport: str,
    size: int,
    seconds: float,
    *,
    one_by_one: bool = False,
    one_core: bool = False,
) -> Run:
    """Run a pair of processes. Raises `BenchError` if one of them failed, or a message was lost."""
    with TemporaryDirectory(prefix="bench-tx-rx-") as folder, contextlib.ExitStack() as processes:
        job = Job(contestant, transport, size, seconds, one_by_one, folder, one_core)
        if transport == "tls":
            _make_certificates(Path(folder))
        receiver = processes.enter_context(_Process(_receive, job))
        where = receiver.answer(_START_SECONDS)
        sender = processes.enter_context(_Process(_send, job, where))
        sent, sender_cpu = sender.answer(_SPARE_SECONDS + seconds)
        received, received_bytes, receiver_cpu = receiver.answer(_SPARE_SECONDS)
        if received != sent.total or received_bytes != sent.total * size:
            raise BenchError(
                f"{job}: {sent.total} messages sent, {received} received, {received_bytes} bytes"
            )
        return Run(sent, sender_cpu / sent.total, receiver_cpu / received)


def _make_certificates(folder: Path) -> None:
    authority = trustme.CA()
    server = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(folder / "authority.pem")
    server.private_key_pem.write_to_path(folder / "key.pem")
    for certificate in server.cert_chain_pems:
        certificate.write_to_path(folder / "certificate.pem", append=True)


class _Process:
    """One of the two processes. It is killed if it does not end by itself."""

    def __init__(self, target: Callable[..., None], job: Job, *arguments: str) -> None:
        context = fork_context()
        self._job = job
        self._pipe, self._theirs = context.Pipe()
        self._process: ForkServerProcess = context.Process(
            target=target, args=(self._theirs, job, *arguments), daemon=True
        )

    def __enter__(self) -> _Process:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._process.join(0.0 if kind else _SPARE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._pipe.close()

    def answer(self, timeout: float) -> Any:
        """The next message from the process. Raises `BenchError` if there is none."""
        try:
            if self._pipe.poll(timeout):
                return self._pipe.recv()
        except EOFError:
            raise BenchError(f"{self._job}: a process has failed; see above") from None
        raise BenchError(f"{self._job}: nothing within {timeout:g} s")


def _receive(pipe: Connection, job: Job) -> None:
    contestant = _made(job)
    before = time.process_time()
    received, received_bytes = contestant.receive(pipe.send)
    pipe.send((received, received_bytes, time.process_time() - before))


def _send(pipe: Connection, job: Job, where: str) -> None:
    contestant = _made(job)
    before = time.process_time()
    sent = contestant.send(where)
    pipe.send((sent, time.process_time() - before))


def _made(job: Job) -> Contestant:
    if job.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    module, _, name = job.contestant.partition(":")
    made: Contestant = getattr(importlib.import_module(module), name)(job)
    return made
