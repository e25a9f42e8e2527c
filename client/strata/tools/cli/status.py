"""`strata status`: whether a relay can be reached, what it says about itself, and how far away it is.

Exit codes: 0 reachable, 1 unreachable or the identity was not accepted, 2 usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import msgspec
from websockets.exceptions import WebSocketException

from strata.channels.connecting import Relay
from strata.protocol import packets
from strata.protocol.errors import ConnectionFailed, RequestRefused, RequestTimeout, StrataError
from strata.relays.connection import Announced, Authenticated, Options
from strata.relays.connection.dialing import describe, hang_up, shown, tls_context
from strata.relays.connection.discovery import MANIFEST_PATH, http_get
from strata.relays.connection.websocket import open_websocket
from strata.tools.cli import output
from strata.tools.cli.running import run
from strata.tools.cli.target import Target

__all__ = ["clock_of", "round_trip", "status"]

_PROTOCOL = "RFC-0004"
_SAMPLE_INTERVAL = 0.15  # samples at different fractions of a second narrow down the clock difference
_CLOSE_TIMEOUT = 1.0

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Handshake:
    """One opening of a WebSocket connection, and our clock (Unix seconds) before and after it."""

    began_at: float
    ended_at: float
    date: float | None
    """The Date header of the relay's answer, in whole Unix seconds."""

    @property
    def seconds(self) -> float:
        """The duration of the TCP, TLS and WebSocket handshakes together."""
        return self.ended_at - self.began_at


@dataclass(frozen=True, slots=True)
class Clock:
    """How far the relay's clock is ahead of ours, in seconds; the true value is within `error` of this."""

    difference: float
    error: float
    samples: int


@dataclass(frozen=True, slots=True)
class Visit:
    """The findings of one connection to the relay. Times are in seconds."""

    round_trips: list[float]
    announced: Announced
    relay_id: str | None
    authenticated: Authenticated | None
    authentication_error: str | None
    is_refused: bool


def status(target: Target, *, samples: int, timeout: float, as_json: bool) -> None:
    """Examine a relay and print the findings."""
    run(_status(target, samples=samples, timeout=timeout, as_json=as_json))


async def _status(target: Target, *, samples: int, timeout: float, as_json: bool) -> int:
    try:
        handshakes = await _shake_hands(target.url, samples, timeout)
        visit = await _visit(target, samples, timeout)
    except ConnectionFailed as error:
        if as_json:
            output.write_record({"url": shown(target.url), "reachable": False, "error": str(error)})
        else:
            output.note(f"error: {error}")
        return 1
    manifest = await _manifest(target.url, timeout)
    if as_json:
        output.write_record(_record(target.url, visit, handshakes, manifest))
    else:
        for label, value in _lines(target.url, visit, handshakes, manifest):
            output.write_line(output.harmless(f"{label:<15}{value}"))
    return 1 if visit.is_refused else 0


async def _shake_hands(url: str, samples: int, timeout: float) -> list[Handshake]:
    """Open and close several connections. Raises `ConnectionFailed` if the first one cannot be opened."""
    found: list[Handshake] = []
    ssl = tls_context(url, None)
    while len(found) < samples:
        began_at = time.time()
        try:
            socket = await open_websocket(url, ssl=ssl, compression=None, proxy=None, open_timeout=timeout)
        except (WebSocketException, OSError) as error:
            if not found:
                raise describe(error, url) from error
            break  # the relay may limit how often a client connects
        ended_at = time.time()
        date = None if socket.response is None else _date(socket.response.headers.get("Date"))
        found.append(Handshake(began_at, ended_at, date))
        await hang_up(socket, _CLOSE_TIMEOUT)
        await asyncio.sleep(_SAMPLE_INTERVAL)
    return found


async def _visit(target: Target, samples: int, timeout: float) -> Visit:
    """Connect, measure, and authenticate if an identity is given. Raises `ConnectionFailed`."""
    async with target.connect(Options(connect_timeout=timeout)) as relay:
        announced = relay.announced or Announced()
        # A plain relay ends its history by silence, so no round trip can be measured.
        marks = "history_marker" in announced.extensions
        round_trips = await _round_trips(relay, samples, timeout) if marks else []
        authenticated, problem, is_refused = None, None, False
        if target.identity is not None and target.authenticate != "never":
            try:
                authenticated = await relay.authenticate(timeout=timeout)
            except RequestTimeout as error:
                is_refused = relay.latest_time is not None  # it has sent a challenge
                problem = str(error) if is_refused else "the relay did not ask for it"
            except ConnectionFailed:
                raise
            except StrataError as error:
                problem, is_refused = str(error), True
        relay_id = relay.relay_id or announced.relay_id
    return Visit(round_trips, announced, relay_id, authenticated, problem, is_refused)


async def _round_trips(relay: Relay, samples: int, timeout: float) -> list[float]:
    """The times of several round trips; those that time out are left out."""
    trips = []
    for _ in range(samples):
        with contextlib.suppress(TimeoutError):
            trips.append(await round_trip(relay, timeout))
    return trips


async def round_trip(relay: Relay, timeout: float) -> float:
    """The time of one request with an empty answer: no packet dates from 1970.

    Raises `TimeoutError`, and the errors of reading except a refusal, which is an answer too.
    """
    began_at = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            async for _ in relay.fetch(since=0, until=0, limit=1):
                pass
    except RequestRefused:
        pass
    return time.perf_counter() - began_at


def _date(text: str | None) -> float | None:
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


async def _manifest(url: str, timeout: float) -> Json:
    """The relay's manifest; empty if it has none."""
    try:
        async with asyncio.timeout(timeout):
            body = await http_get(url, MANIFEST_PATH, ssl=tls_context(url, None))
        found = msgspec.json.decode(body)
    except (OSError, ValueError, EOFError, RecursionError, asyncio.LimitOverrunError):
        return {}
    return found if isinstance(found, dict) else {}


def clock_of(handshakes: Sequence[Handshake]) -> Clock | None:
    """The clock difference that all handshakes agree with; None if none of them carries a date.

    A relay whose Date is the second D, written between two readings a and b of our clock, is ahead by between
    D - b and D + 1 - a. Several answers narrow that down; if they contradict each other, the last one counts.
    """
    bounds = [
        (each.date - each.ended_at, each.date + 1 - each.began_at)
        for each in handshakes
        if each.date is not None
    ]
    if not bounds:
        return None
    low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
    if low > high:
        low, high = bounds[-1]
    return Clock((low + high) / 2, (high - low) / 2, len(bounds))


def _record(url: str, visit: Visit, handshakes: Sequence[Handshake], manifest: Json) -> dict[str, object]:
    clock = clock_of(handshakes)
    who = visit.authenticated
    return {
        "url": shown(url),
        "reachable": True,
        "error": None,
        "protocol": _PROTOCOL,
        "packet_version": packets.VERSION,
        "relay_id": visit.relay_id,
        "software": manifest.get("software"),
        "status": manifest.get("status"),
        "extensions": sorted(visit.announced.extensions),
        "limits": manifest.get("limits"),
        "auth": manifest.get("auth"),
        "clock": None if clock is None else msgspec.to_builtins(clock),
        "latency": {
            "connect": _spread([each.seconds for each in handshakes]),
            "round_trip": _spread(visit.round_trips),
        },
        "authenticated": None
        if who is None
        else {
            "author_id": who.author_id,
            "capabilities": None if who.capabilities is None else sorted(who.capabilities),
        },
        "authentication_error": visit.authentication_error,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {
        "samples": len(seconds),
        "min": min(seconds),
        "median": statistics.median(seconds),
        "max": max(seconds),
    }


def _lines(url: str, visit: Visit, handshakes: Sequence[Handshake], manifest: Json) -> list[tuple[str, str]]:
    software = manifest.get("software")
    named = [str(part) for part in software.values()] if isinstance(software, dict) else []
    lines = [
        ("relay", shown(url)),
        ("reachable", "yes"),
        ("protocol", f"{_PROTOCOL}, packets of version {packets.VERSION}"),
        ("relay id", visit.relay_id or "not given"),
        ("software", " ".join(named) or "not given"),
        ("state", str(manifest.get("status", "not given"))),
        ("extensions", ", ".join(sorted(visit.announced.extensions)) or "none"),
    ]
    limits = manifest.get("limits")
    numbers = list(limits.items()) if isinstance(limits, dict) else []
    numbers = [(name, value) for name, value in numbers if isinstance(value, int | float)]
    lines += [("limits" if not n else "", f"{name} {value}") for n, (name, value) in enumerate(numbers)]
    lines += [
        ("clock", _clock_text(clock_of(handshakes))),
        ("connect", _spread_text([each.seconds for each in handshakes])),
        ("round trip", _spread_text(visit.round_trips)),
    ]
    if (who := visit.authenticated) is not None:
        capabilities = "everything" if who.capabilities is None else ", ".join(sorted(who.capabilities))
        lines.append(("authenticated", f"as {who.author_id} for {capabilities or 'nothing'}"))
    elif visit.authentication_error is not None:
        lines.append(("authenticated", f"no: {visit.authentication_error}"))
    return lines


def _clock_text(clock: Clock | None) -> str:
    if clock is None:
        return "unknown: the relay's handshake carries no date"
    side = "ahead of" if clock.difference >= 0 else "behind"
    return (
        f"the relay is {abs(clock.difference):.2f} s {side} this machine, ± {clock.error:.2f} s "
        f"(by the Date of {clock.samples} handshakes)"
    )


def _spread_text(seconds: Sequence[float]) -> str:
    if not seconds:
        return "unknown"
    low, middle, high = (each * 1000 for each in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.1f} ms ({len(seconds)} samples, {low:.1f} to {high:.1f} ms)"
