"""`strata bench`: how fast a relay of one's own stores packets, and how fast it delivers them.

There are two parts, each bounded in packets and in time. *Publish*: several connections keep packets in
flight. *Fan-out*: the same, while subscribers count the packets that arrive. Packets are signed before the
clock starts. A subscriber reads only the id of a packet and verifies nothing, because the bench measures the
relay and not this machine.

Exit codes: 0 every packet was stored and delivered to each subscriber once, 1 one was not or the relay is
unreachable, 2 usage.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from strata.channels.connecting import Relay, connect
from strata.protocol import packets, wire
from strata.protocol.errors import RequestRefused, RequestTimeout
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.relays.connection import Options
from strata.relays.connection.dialing import describe, hang_up, shown, tls_context
from strata.relays.connection.websocket import open_websocket
from strata.tools.cli import output
from strata.tools.cli.running import run
from strata.tools.cli.target import is_on_this_machine, require_relay_url

__all__ = ["BenchRequest", "bench", "percentile"]

_LIFETIME_SECONDS = 600
_PATIENCE = 10.0
"""How long an acknowledgement or a delivery may take before it counts as missing."""
_CLOSE_TIMEOUT = 1.0
_SIGN_AT_ONCE = 50
_COLUMNS = f"{'part':<9}{'packets':>10}{'deliveries':>12}{'seconds':>9}{'a second':>11}{'p50':>11}{'p99':>11}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """The options of the command line."""

    url: str
    count: int
    seconds: float
    connections: int
    in_flight: int
    subscribers: int
    size: int
    yes: bool
    as_json: bool


@dataclass(slots=True)
class Figures:
    """The measurements of one part. Times are in seconds."""

    sent_at: dict[str, float] = field(default_factory=dict)
    """When the publish of each packet began, by packet id."""
    latencies: list[float] = field(default_factory=list)
    """From the start of a publish to its acknowledgement, or to its delivery to one subscriber."""
    refused: Counter[str] = field(default_factory=Counter)
    """The number of packets refused, by error code."""
    stored: set[str] = field(default_factory=set)
    """The ids of the acknowledged packets."""
    delivered: Counter[str] = field(default_factory=Counter)
    """How many subscribers have got a packet, by packet id."""
    repeated: int = 0
    """Deliveries of a packet to a subscriber that had it."""
    seconds: float = 0.0

    def missing(self, subscribers: int) -> int:
        """The deliveries of stored packets that have not arrived."""
        return sum(subscribers - self.delivered[packet_id] for packet_id in self.stored)

    def waits(self, subscribers: int) -> bool:
        """Whether any is missing. The first condition is cheap, and enough unless packets arrive that were
        not acknowledged."""
        return len(self.latencies) < len(self.stored) * subscribers or self.missing(subscribers) > 0


class _Event(msgspec.Struct):
    """The members of a message that a subscriber reads."""

    type: str
    packet: _PacketId | None = None
    reason: str = ""


class _PacketId(msgspec.Struct):
    packet_id: str


_DECODER = msgspec.json.Decoder(_Event)


def bench(request: BenchRequest) -> None:
    """Measure a relay and print the figures. Ends with exit code 2 for a relay that must not be measured."""
    require_relay_url(request.url)
    parts = 2 if request.subscribers else 1
    output.note(
        f"bench writes up to {parts * request.count} packets to {shown(request.url)}, under a throw-away "
        f"identity and type; they expire after {_LIFETIME_SECONDS // 60} minutes."
    )
    if not request.yes and not is_on_this_machine(request.url):
        output.misuse("this relay is not on this machine: add --yes to write to it")
    run(_bench(request))


async def _bench(request: BenchRequest) -> int:
    try:
        published = await _measure_publishing(request)
        _print(request, "publish", published, len(published.stored))
        is_whole = not published.refused
        if request.subscribers:
            delivered = await _measure_fan_out(request)
            _print(request, "fan-out", delivered, len(delivered.latencies))
            missing, repeated = delivered.missing(request.subscribers), delivered.repeated
            if missing:
                output.note(f"error: {missing} deliveries did not arrive within {_PATIENCE:g} s")
            if repeated:
                output.note(f"error: {repeated} deliveries came to a subscriber that had the packet already")
            is_whole &= not missing and not repeated and not delivered.refused
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    except WebSocketException as error:
        raise describe(error, request.url) from error
    return 0 if is_whole else 1


async def _measure_publishing(request: BenchRequest) -> Figures:
    signed = await _sign(request, f"BENCH_{secrets.token_hex(4)}")
    figures = Figures()
    async with AsyncExitStack() as stack:
        relays = await _connections(request, stack)
        began_at = time.perf_counter()
        await _publish(request, relays, signed, figures, acknowledged=figures.latencies)
        figures.seconds = time.perf_counter() - began_at
    return figures


async def _measure_fan_out(request: BenchRequest) -> Figures:
    type = f"BENCH_{secrets.token_hex(4)}"
    first, *signed = await _sign(request, type, extra=1)
    figures = Figures()
    async with AsyncExitStack() as stack:
        relays = await _connections(request, stack)
        sockets = [await _subscribe(request, type, stack) for _ in range(request.subscribers)]
        # Once every subscriber has the first packet, stored or live, all subscriptions are in place.
        await relays[0].publish(first, timeout=_PATIENCE)
        for socket in sockets:
            await _arrival_of(first, socket)
        places = {packet.packet_id: place for place, packet in enumerate(signed)}
        last_at = began_at = time.perf_counter()

        async def listen(socket: ClientConnection) -> None:
            nonlocal last_at
            has = bytearray(len(signed))
            while True:
                event = _DECODER.decode(await socket.recv(decode=False))
                packet_id = "" if event.packet is None else event.packet.packet_id
                place = places.get(packet_id)
                if place is None:
                    continue
                if has[place]:
                    figures.repeated += 1
                    continue
                has[place] = True
                last_at = time.perf_counter()
                figures.delivered[packet_id] += 1
                figures.latencies.append(last_at - figures.sent_at[packet_id])

        async with asyncio.TaskGroup() as tasks:
            listening = [tasks.create_task(listen(each), name="strata-bench-listen") for each in sockets]
            await _publish(request, relays, signed, figures, acknowledged=[])
            while figures.waits(len(sockets)):
                if time.perf_counter() - last_at > _PATIENCE:
                    break
                await asyncio.sleep(0.01)
            for task in listening:
                task.cancel()
        figures.seconds = last_at - began_at
    return figures


async def _sign(request: BenchRequest, type: str, *, extra: int = 0) -> list[Packet]:
    """The packets of one part, signed by a new identity."""
    identity = Identity.generate()
    now = int(time.time())
    text = "x" * request.size
    signed = []
    with output.ProgressBar("signing", request.count) as progress:
        for number in range(request.count + extra):
            content = {"type": type, "n": number, "text": text}
            signed.append(packets.build(identity, content, timestamp=now, expires_at=now + _LIFETIME_SECONDS))
            progress.advance()
            if number % _SIGN_AT_ONCE == 0:
                await asyncio.sleep(0)  # lets the bar appear
    return signed


async def _connections(request: BenchRequest, stack: AsyncExitStack) -> list[Relay]:
    options = Options(connect_timeout=5.0, max_in_flight=request.in_flight)
    return [
        await stack.enter_async_context(connect(request.url, options=options))
        for _ in range(request.connections)
    ]


async def _publish(
    request: BenchRequest,
    relays: Sequence[Relay],
    signed: Sequence[Packet],
    figures: Figures,
    *,
    acknowledged: list[float],
) -> None:
    """Publish until the packets or the seconds are used up, then wait for the publishes in flight."""
    waiting: Iterator[Packet] = iter(signed)
    deadline = time.perf_counter() + request.seconds

    async def work(relay: Relay) -> None:
        while time.perf_counter() < deadline and (packet := next(waiting, None)) is not None:
            began_at = figures.sent_at[packet.packet_id] = time.perf_counter()
            try:
                await relay.publish(packet, timeout=_PATIENCE)
            except RequestRefused as error:
                figures.refused[error.code] += 1
            except RequestTimeout:
                figures.refused["no answer"] += 1
            else:
                figures.stored.add(packet.packet_id)
                acknowledged.append(time.perf_counter() - began_at)
            progress.advance()

    with output.ProgressBar("publishing", len(signed)) as progress:
        async with asyncio.TaskGroup() as tasks:
            for relay in relays:
                for _ in range(request.in_flight):
                    tasks.create_task(work(relay), name="strata-bench-publish")


async def _subscribe(request: BenchRequest, type: str, stack: AsyncExitStack) -> ClientConnection:
    socket = await open_websocket(
        request.url, ssl=tls_context(request.url, None), compression=None, proxy=None, max_size=None
    )
    stack.push_async_callback(hang_up, socket, _CLOSE_TIMEOUT)
    subscribe = wire.Subscribe(subscription_id="bench", filters=wire.Filters(types=[type]))
    await socket.send(wire.encode(subscribe), text=True)
    return socket


async def _arrival_of(packet: Packet, socket: ClientConnection) -> None:
    """Wait until a subscriber has this packet. Raises `ValueError` if the relay does not deliver it."""
    try:
        async with asyncio.timeout(_PATIENCE):
            while True:
                event = _DECODER.decode(await socket.recv(decode=False))
                if event.type == "ERROR":
                    raise ValueError(f"the relay refuses the subscription: {output.harmless(event.reason)}")
                if event.packet is not None and event.packet.packet_id == packet.packet_id:
                    return
    except TimeoutError:
        raise ValueError(f"a subscriber has got nothing within {_PATIENCE:g} s") from None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed; None if there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def _print(request: BenchRequest, part: str, figures: Figures, done: int) -> None:
    """Print the line of a part; `done` is the number of packets stored, or of deliveries made."""
    rate = done / figures.seconds if figures.seconds else 0.0
    p50, p99 = percentile(figures.latencies, 0.5), percentile(figures.latencies, 0.99)
    if request.as_json:
        record = {
            "part": part,
            "url": shown(request.url),
            "connections": request.connections,
            "in_flight": request.in_flight,
            "subscribers": request.subscribers if part == "fan-out" else 0,
            "stored": len(figures.stored),
            "refused": dict(figures.refused),
            "deliveries": done if part == "fan-out" else 0,
            "repeated": figures.repeated,
            "seconds": figures.seconds,
            "per_second": rate,
            "p50": p50,
            "p99": p99,
        }
        output.write_record(record)
        return
    if part == "publish":
        output.write_line(_COLUMNS)
        deliveries = "-"
        what = f"{request.connections} connections, {request.in_flight} in flight on each, until stored"
    else:
        deliveries = f"{done:,}"
        what = f"{request.subscribers} subscribers, from publish to delivery"
    shown_p50, shown_p99 = ("-" if each is None else f"{each * 1000:.1f} ms" for each in (p50, p99))
    output.write_line(
        f"{part:<9}{len(figures.stored):>10,}{deliveries:>12}{figures.seconds:>9.2f}{rate:>11,.0f}"
        f"{shown_p50:>11}{shown_p99:>11}  {what}"
    )
    for code, count in figures.refused.items():
        output.note(f"error: {count} packets were not stored: {output.harmless(code)}")
