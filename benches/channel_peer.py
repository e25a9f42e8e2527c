"""A program with a channel on a real relay, in its own process, driven by `benches.channels`.

It is started with a relay's address, a channel's name and its own name. Then it reads one order per line from
standard input and answers each with a line, both JSON. Times are of the monotonic clock, which the processes
of one Linux machine share: the first eight bytes of a payload say when it was sent.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import strata
import uvloop
from strata.channels.messaging.values import MessageEnvelope, NodeMessageReceived, NodeMessageSent
from strata.channels.reliable.events import ReliableMessageDelivered, ReliableMessageDeliveryError
from strata.protocol.ids import Identity

from benches.measures import percentile
from benches.peer import BenchError

__all__ = ["ChannelPeer", "ChannelProcess"]

_STAMP = struct.Struct("<d")
_LINE_LIMIT = 1 << 20
_QUIET_SECONDS = 45.0
"""Silence for this long means that a message is lost: syncs and retransmissions come more often."""


class ChannelPeer:
    """One open channel, and the orders it can carry out."""

    def __init__(self, relay: strata.Relay, channel: Any, topic: str) -> None:
        self._relay = relay
        self._channel = channel
        self._bare_topic = f"{topic.removesuffix('/proto')}-bare/proto"
        self._sent_at: dict[str, float] = {}
        self._received: list[tuple[float, int, float]] = []
        self._acknowledged: list[tuple[float, float]] = []
        self._bare_sent = self._bare_received = 0
        self._failed = 0
        self._moved = asyncio.Event()
        channel.message_events.on(ReliableMessageDelivered.name, self._on_delivered)
        channel.message_events.on(ReliableMessageDeliveryError.name, self._on_failed)
        relay.node.message_events.on(NodeMessageSent.name, self._on_bare_sent)
        relay.node.message_events.on(NodeMessageReceived.name, self._on_bare_received)

    async def take(self) -> None:
        """Take messages until the channel is closed."""
        async for message in self._channel:
            now = time.monotonic()
            (sent_at,) = _STAMP.unpack_from(message.payload)
            self._received.append((now, len(message.payload), now - sent_at))
            self._moved.set()

    async def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out the order of a line. Raises `BenchError` if it fails."""
        work: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "talk": self.talk,
            "bare": self.bare,
        }
        return await work[order.pop("do")](**order)

    async def talk(self, count: int, expect: int, window: int, payload_bytes: int) -> dict[str, Any]:
        """Send `count` messages, at most `window` of them unacknowledged, and take `expect` messages.

        Memory is counted from before the first payload is made.
        """
        self._received.clear()
        self._acknowledged.clear()
        before, memory = self._channel.statistics.sds, _begin_peak()
        retransmissions, syncs, cpu = before.retransmissions, before.syncs_sent, time.process_time()
        filler = b"." * (payload_bytes - _STAMP.size)
        started_at = time.monotonic()
        for _ in range(count):
            await self._until(lambda: len(self._sent_at) < window)
            sent_at = time.monotonic()
            self._sent_at[await self._channel.send(_STAMP.pack(sent_at) + filler)] = sent_at
        await self._until(lambda: len(self._received) >= expect and not self._sent_at)
        if len(self._received) != expect or len(self._acknowledged) != count or self._failed:
            raise BenchError(
                f"{len(self._received)} of {expect} received, "
                f"{len(self._acknowledged)} of {count} acknowledged, {self._failed} given up"
            )
        if any(size != payload_bytes for _, size, _ in self._received):
            raise BenchError("a message of another size came")
        after = self._channel.statistics.sds
        return {
            "started_at": started_at,
            "received_at": max((at for at, _, _ in self._received), default=started_at),
            "acknowledged_at": max((at for at, _ in self._acknowledged), default=started_at),
            "received": _times([seconds for *_, seconds in self._received]),
            "acknowledged": _times([seconds for _, seconds in self._acknowledged]),
            "retransmissions": after.retransmissions - retransmissions,
            "syncs": after.syncs_sent - syncs,
            "cpu_seconds": time.process_time() - cpu,
            "memory_bytes": memory,
            "peak_bytes": _memory("VmHWM") - memory,
        }

    async def bare(self, count: int, expect: int, window: int, payload_bytes: int) -> dict[str, Any]:
        """Do the same through the node, without a channel; a message counts as sent once a relay said OK."""
        self._bare_sent = self._bare_received = 0
        await self._relay.node.subscribe([self._bare_topic])
        cpu = time.process_time()
        started_at = time.monotonic()
        for number in range(count):
            await self._until(partial(self._has_room, number, window))
            payload = _STAMP.pack(time.monotonic()).ljust(payload_bytes, b".")
            await self._relay.node.send(
                MessageEnvelope(content_topic=self._bare_topic, payload=payload), request_id=f"bare-{number}"
            )
        await self._until(lambda: self._bare_received >= expect and self._bare_sent >= count)
        return {
            "started_at": started_at,
            "received_at": time.monotonic(),
            "cpu_seconds": time.process_time() - cpu,
        }

    def _has_room(self, number: int, window: int) -> bool:
        return number - self._bare_sent < window

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._moved.clear()
            try:
                async with asyncio.timeout(_QUIET_SECONDS):
                    await self._moved.wait()
            except TimeoutError:
                raise BenchError(
                    f"nothing for {_QUIET_SECONDS:.0f} s: {len(self._received)} received, "
                    f"{len(self._acknowledged)} acknowledged, {len(self._sent_at)} not"
                ) from None

    def _on_delivered(self, event: ReliableMessageDelivered) -> None:
        now = time.monotonic()
        sent_at = self._sent_at.pop(event.request_id, None)
        if sent_at is not None:
            self._acknowledged.append((now, now - sent_at))
        self._moved.set()

    def _on_failed(self, event: ReliableMessageDeliveryError) -> None:
        self._failed += 1

    def _on_bare_sent(self, event: NodeMessageSent) -> None:
        if event.request_id.startswith("bare-"):
            self._bare_sent += 1
            self._moved.set()

    def _on_bare_received(self, event: NodeMessageReceived) -> None:
        if (
            event.message.content_topic == self._bare_topic
            and event.message.author != self._relay.node.transport_identity
        ):
            self._bare_received += 1
            self._moved.set()


def _times(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{share}": percentile(ordered, share / 100) for share in (50, 99)} if ordered else {}


def _memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def _begin_peak() -> int:
    """Reset the peak of resident memory, and return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


class ChannelProcess:
    """A process of this program, as an asynchronous context manager; it is ready when entered."""

    def __init__(self, url: str, channel_id: str, name: str) -> None:
        self._arguments = (url, channel_id, name)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> ChannelProcess:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benches.channel_peer",
            *self._arguments,
            cwd=Path(__file__).parents[1],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
        )
        await self._answer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        if error is not None and process.returncode is None:
            process.kill()
        process.stdin.close()
        await process.wait()

    async def order(self, do: str, **arguments: int) -> dict[str, Any]:
        """Give an order and wait for its result. Raises `BenchError`."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"void": "a peer's process has ended"}
        if "void" in answer:
            raise BenchError(answer["void"])
        return answer


async def _serve(url: str, channel_id: str, name: str) -> None:
    topic = f"/bench/1/{channel_id}/proto"
    reader = asyncio.StreamReader(limit=_LINE_LIMIT)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(strata.connect(url, identity=Identity.generate()))
        channel = await stack.enter_async_context(relay.channel(channel_id, topic=topic, sender_id=name))
        peer = ChannelPeer(relay, channel, topic)
        taking = asyncio.create_task(peer.take())
        _say({"ready": True})
        while line := await reader.readline():
            try:
                _say(await peer.carry_out(json.loads(line)))
            except BenchError as error:
                _say({"void": str(error)})
                break
        taking.cancel()
        await asyncio.wait([taking])


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    uvloop.run(_serve(*sys.argv[1:4]))
