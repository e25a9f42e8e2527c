"""Failpoints: named places in the code at which a test injects a fault into a real relay.

The environment variable `RELAYD_FAILPOINTS` arms them when the process starts. Without it `ARMED` is false,
every place costs one check of that constant, and nothing else in this module runs. It is for tests only.

    RELAYD_FAILPOINTS="store.append.after_commit=raise@3,feed.tail.read=delay:0.5@p0.1:seed7"

Entries are separated by commas: `place=action[@when]`. The place `*` stands for every place without its own
entry. The actions:

    raise           raise `FailpointRaised`
    delay:SECONDS   wait this long; if the place cannot await, its thread blocks
    kill            end the process at once with SIGKILL
    stop            suspend the process with SIGSTOP, until somebody sends SIGCONT

`@3` means the third time the place is reached, and no other. `@p0.1` means each time with this probability,
drawn from the place's own generator: the same seed (`:seed7`, else 0) gives the same draws. Without `@` the
action applies every time. Each process counts and draws for itself. A fault is logged as `failpoint` before
it is injected.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from relayd.logs import flush, get_logger

__all__ = ["ARMED", "POINTS", "Failpoint", "FailpointRaised", "hit", "parse", "reached"]

VARIABLE: Final = "RELAYD_FAILPOINTS"

POINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "server.start": "a process is about to open its store",
        "server.reload": "SIGHUP came, and nothing has been read again",
        "server.drain": "the process stops, and publishes under way are still to be answered",
        "workers.start": "a worker process has begun, the first time or anew",
        "postgres.supervise": "the embedded server has died, and is to be started again",
        "sessions.accept": "a socket was accepted",
        "sessions.write": "a socket's frames, OK among them, are about to be written",
        "sessions.auth": "an AUTH is about to be looked up",
        "sessions.page": "a page of history is about to be read",
        "http.respond": "a plain HTTP request is about to be answered",
        "admission.submit": "a PUBLISH has arrived",
        "admission.verify": "a packet is about to be checked",
        "admission.answer": "a packet is in the log, and its OK is about to be made",
        "identity.read": "the chains of some authors are about to be read",
        "identity.observe": "the feed has brought an identity packet",
        "store.append.before_commit": "a batch is about to be sent to the database",
        "store.append.after_commit": "a batch is committed, and nobody knows yet",
        "store.lookup": "ids are about to be looked up in the duplicate index",
        "store.notify": "the database has told of a commit by somebody else",
        "store.erase.before_commit": "some packets are erased, and nobody can see it yet",
        "store.erase.after_commit": "some packets are erased, and the rest is still to be",
        "store.retention": "old days are about to be dropped",
        "feed.tail.read": "the log is about to be read behind the feed",
        "feed.dispatch": "a batch is about to go through the feed",
    }
)
"""Every place, and what is happening when it is reached."""

_ENTRY: Final = re.compile(
    r"(?P<place>[a-z_.]+|\*)=(?P<action>raise|kill|stop|delay:(?P<seconds>\d+(\.\d+)?))"
    r"(@(?:(?P<count>[1-9]\d*)|p(?P<chance>\d+(\.\d+)?)(:seed(?P<seed>\d+))?))?"
)

_log = get_logger("relayd.failpoints")


class FailpointRaised(Exception):
    """Raised by the action `raise`."""


class Failpoint:
    """The action at one place, and how often the place was reached."""

    def __init__(
        self,
        place: str,
        action: str,
        seconds: float = 0.0,
        *,
        count: int | None = None,
        chance: float | None = None,
        seed: int = 0,
    ) -> None:
        self.place = place
        self.action = action
        self.seconds = seconds
        self.hits = 0
        self._count = count
        self._chance = chance
        self._random = random.Random(f"{seed} {place}")

    def is_due(self) -> bool:
        """Count one hit. Returns whether the fault is due this time."""
        self.hits += 1
        if self._chance is not None:
            return self._random.random() < self._chance
        return self._count is None or self.hits == self._count


def parse(text: str) -> dict[str, Failpoint]:
    """The failpoints that the variable's value arms, by place. Raises ValueError."""
    found: dict[str, Failpoint] = {}
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    # `*` comes last, whatever the order.
    for entry in sorted(entries, key=lambda entry: entry.startswith("*")):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"{VARIABLE}: {entry!r} is not place=action[@when]")
        place = match["place"]
        if place != "*" and place not in POINTS:
            raise ValueError(f"{VARIABLE}: no place is called {place}")
        if place in found:
            raise ValueError(f"{VARIABLE}: {place} stands there twice")
        for each in POINTS if place == "*" else [place]:
            if each not in found:
                found[each] = Failpoint(
                    each,
                    match["action"].partition(":")[0],
                    float(match["seconds"] or 0),
                    count=int(match["count"]) if match["count"] else None,
                    chance=float(match["chance"]) if match["chance"] else None,
                    seed=int(match["seed"] or 0),
                )
    return found


_armed: Final = parse(os.environ.get(VARIABLE, ""))

ARMED: Final = bool(_armed)
"""Whether any place is armed in this process. Check this before calling anything else here."""


def hit(place: str) -> None:
    """A place that cannot await is reached. Raises `FailpointRaised` if that is armed."""
    point = _due(place)
    if point is not None and point.action == "delay":
        time.sleep(point.seconds)


async def reached(place: str) -> None:
    """A place that can await is reached. Raises `FailpointRaised` if that is armed."""
    point = _due(place)
    if point is not None and point.action == "delay":
        await asyncio.sleep(point.seconds)


def _due(place: str) -> Failpoint | None:
    """Inject the fault that is due at this place; a delay is left to the caller."""
    assert place in POINTS, place
    point = _armed.get(place)
    if point is None or not point.is_due():
        return None
    _log.info("failpoint", place=place, action=point.action, hits=point.hits)
    if point.action in ("kill", "stop"):
        flush()
    match point.action:
        case "raise":
            raise FailpointRaised(place)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    return point
