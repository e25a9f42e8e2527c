"""Faults planted into the channel on purpose: a judge that finds nothing proves nothing.

Each fault replaces one method of the channel, in this process and for a while. A world of the kinds that the
fault names must then fail within a bounded number of seeds, and the same world must pass without the fault.
If a method no longer exists, planting fails, and the fault must be planted elsewhere.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from strata_testkit.sim.checking import SimulationFailed
from strata_testkit.sim.worlds import KINDS, run_world

__all__ = ["FAULTS", "FaultFound", "PlantedFault", "find"]

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """One deliberate fault."""

    name: str
    about: str
    target: str
    """The method that is replaced, as `module:Class.method` below `strata.channels`."""
    broken: Callable[[Method], Method]
    """Makes the replacement from the original."""
    kinds: tuple[str, ...] = ("wild",)
    """The kinds of worlds that can find it, used in turn."""
    within: int = 30
    """The number of worlds within which it must be found."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Break the channel inside the block. Raises `AttributeError` if the method no longer exists."""
        module, _, path = self.target.partition(":")
        owner_name, _, method = path.partition(".")
        owner = getattr(importlib.import_module(f"strata.channels.{module}"), owner_name)
        original = owner.__dict__.get(method)
        if original is None:
            raise AttributeError(f"{self.name} is planted into {self.target}, which is gone")
        is_property = isinstance(original, property)
        broken = self.broken(original.fget if is_property else original)
        setattr(owner, method, property(broken) if is_property else broken)
        try:
            yield
        finally:
            setattr(owner, method, original)


@dataclass(frozen=True, slots=True)
class FaultFound:
    """The world that found a fault."""

    fault: str
    seed: int | None = None
    """The seed of the world; None if no world found the fault."""
    kind: str = ""
    problem: str = ""
    worlds: int = 0
    """The number of worlds that ran."""
    waits_for: str = ""
    """The kind of world that would find it, but that no channel survives yet, even without the fault."""


def find(name: str) -> FaultFound:
    """Run worlds with a fault until one fails.

    Raises `KeyError` for an unknown fault, and `RuntimeError` for one whose planted code itself fails.
    """
    logger = logging.getLogger("strata")
    level = logger.level
    # With a planted fault, the library may log things that it does not expect of itself.
    logger.setLevel(logging.CRITICAL)
    try:
        return _find(name, FAULTS[name])
    finally:
        logger.setLevel(level)


def _find(name: str, fault: PlantedFault) -> FaultFound:
    open_kinds = [kind for kind in fault.kinds if kind in KINDS and KINDS[kind].open_because]
    if open_kinds:
        return FaultFound(name, waits_for=open_kinds[0])
    for seed in range(fault.within):
        kind = fault.kinds[seed % len(fault.kinds)]
        with fault.planted():
            problem = _problem(seed, kind)
        if problem is not None and _problem(seed, kind) is None:
            return FaultFound(name, seed, kind, problem, seed + 1)
    return FaultFound(name, worlds=fault.within)


def _problem(seed: int, kind: str) -> str | None:
    """The first problem of a world; None if it passes."""
    try:
        run_world(seed, kind)
    except SimulationFailed as failure:
        return failure.problems[0]
    except Exception as error:  # a crash of the channel counts as found
        if _is_of_planting(error):
            raise RuntimeError(f"what was planted failed by itself: {error!r}") from error
        return repr(error)[:200]
    return None


def _is_of_planting(error: BaseException | None) -> bool:
    """Whether the planted code itself failed, or a call of it: then the fault was not tested."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].filename == __file__:
            return True
        error = error.__cause__
    return False


# The replacements. Each takes the original method.


def _returns(value: Any) -> Callable[[Method], Method]:
    def broken(original: Method) -> Method:
        @functools.wraps(original)
        def replaced(*args: Any, **keywords: Any) -> Any:
            return value() if callable(value) else value

        return replaced

    return broken


def _sometimes(skip: Callable[..., bool], value: Any = None) -> Callable[[Method], Method]:
    """Do nothing if `skip` says so. It decides only by the arguments, so that a run stays repeatable."""

    def broken(original: Method) -> Method:
        @functools.wraps(original)
        def replaced(*args: Any, **keywords: Any) -> Any:
            return value if skip(*args, **keywords) else original(*args, **keywords)

        return replaced

    return broken


def _twice(original: Method) -> Method:
    @functools.wraps(original)
    def replaced(*args: Any, **keywords: Any) -> Any:
        original(*args, **keywords)
        return original(*args, **keywords)

    return replaced


def _one_in_four(text: str) -> bool:
    return text[-1:] in "048c"


def _by_arrival(original: Method) -> Method:
    def ordered(self: Any) -> Any:
        return iter(sorted(self._messages.values(), key=lambda each: each.arrival))

    return ordered


def _asks_nothing(original: Method) -> Method:
    def take(self: Any, *args: Any) -> None:
        self.at = math.inf

    return take


def _leaks(original: Method) -> Method:
    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **keywords: Any) -> Any:
        self.__dict__.setdefault("_leak", []).extend(range(50))
        return original(self, *args, **keywords)

    return replaced


def _soon(original: Method) -> Method:
    """Sync far too often."""

    @functools.wraps(original)
    def replaced(self: Any, now: int, *args: Any, **keywords: Any) -> Any:
        original(self, now, *args, **keywords)
        self.at = min(self.at, now + 200)

    return replaced


def _always_due(original: Method) -> Method:
    @functools.wraps(original)
    def replaced(self: Any, outgoing: Any, since: int) -> int:
        return since + 100

    return replaced


FAULTS: dict[str, PlantedFault] = {
    each.name: each
    for each in (
        PlantedFault(
            "delivers twice",
            "what was received before is not known",
            "sds.incoming:Receiver.is_new",
            _returns(True),
        ),
        PlantedFault(
            "hands over twice",
            "the inbox takes each message twice",
            "reliable.inbox:MessageInbox.put",
            _twice,
            within=3,
        ),
        PlantedFault(
            "waits for nothing",
            "messages are delivered before those that they follow",
            "sds.incoming:Receiver.unmet",
            _returns(dict),
        ),
        PlantedFault(
            "order of arrival",
            "the log is in the order in which messages came",
            "sds.log:MessageLog.ordered",
            _by_arrival,
        ),
        PlantedFault(
            "own order",
            "a message follows nothing",
            "sds.participant:Participant._recent",
            _returns(list),
        ),
        PlantedFault(
            "never sends again",
            "lost messages are not repeated",
            "sds.outgoing:OutgoingBuffer.take_due",
            _returns(lambda: ([], [])),
            kinds=("devices",),
            within=60,
        ),
        PlantedFault(
            "never asks",
            "missing messages are not asked for of relays",
            "reliable.retrieval:Retrieval.take",
            _asks_nothing,
            kinds=("departed",),
        ),
        PlantedFault(
            "never syncs",
            "nobody says what it has unless it speaks",
            "sds.participant:Participant._send_sync",
            _sometimes(lambda self, now: self._sync.sent([], now) is None),
            within=100,
        ),
        PlantedFault(
            "acknowledges before storing",
            "messages leave before the store has them",
            "reliable.session:ChannelSession._is_stored",
            _returns(True),
            kinds=("mixed",),
            within=60,
        ),
        PlantedFault(
            "believes any filter",
            "a filter acknowledges what it does not hold",
            "sds.bloom:BloomParameters.contains",
            _returns(True),
        ),
        PlantedFault(
            "forgets what it sent",
            "after a crash a program hears no more of what it sent",
            "reliable.requests:Requests.changes_to_store",
            _returns(list),
            kinds=("wild", "mixed"),
            within=60,
        ),
        PlantedFault(
            "forgets the inbox",
            "what waits for the program does not survive a crash",
            "reliable.inbox:MessageInbox._store",
            _returns(None),
            kinds=("wild", "mixed"),
            within=60,
        ),
        PlantedFault(
            "loses one in four",
            "some messages never reach the program",
            "reliable.inbox:MessageInbox.put",
            _sometimes(lambda self, message, digest: _one_in_four(message.request_id)),
            within=3,
        ),
        PlantedFault(
            "tells nothing",
            "senders are not told of delivery",
            "reliable.requests:Requests.acknowledged",
            _sometimes(lambda self, message_id, sender_id=None: _one_in_four(message_id)),
            within=5,
        ),
        PlantedFault(
            "syncs without end",
            "everybody syncs several times a second",
            "sds.sync:SyncSchedule._schedule",
            _soon,
            kinds=("crowd",),
            within=3,
        ),
        PlantedFault(
            "repeats without end",
            "unacknowledged messages are repeated at once",
            "sds.outgoing:OutgoingBuffer._due_at",
            _always_due,
            kinds=("crowd",),
            within=5,
        ),
        PlantedFault(
            "keeps everything",
            "each received message leaves something behind for ever",
            "reliable.engine:ChannelEngine.receive",
            _leaks,
            kinds=("crowd", "forged"),
            within=4,
        ),
        PlantedFault(
            "no catch-up",
            "what was missed while away is not asked for",
            "reliable.catching_up:CatchingUp.is_due",
            _returns(False),
            kinds=("absence",),
            within=5,
        ),
        PlantedFault(
            "says it is synced",
            "a channel claims to have everything at any time",
            "reliable.values:SyncStatus.is_synced",
            _returns(True),
            kinds=("absence",),
            within=5,
        ),
        PlantedFault(
            "gives up in silence",
            "nobody is told of what no relay has any more",
            "reliable.engine:ChannelEngine.tell_gap",
            _returns(None),
            kinds=("retention",),
            within=5,
        ),
    )
}
