"""Packets that wait for keys and manifests not in memory: these are read for many packets at once.

A chain of a thousand events takes a fifth of a second to read, and a stranger can make many such chains and
name them in turn. So whoever makes the relay read a chain is charged for it, and the packets of those who
have used little come first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from strata.protocol.errors import InvalidPacket

from relayd.admission.gathering import Gathering
from relayd.admission.knowledge import missing_for
from relayd.admission.refusals import FAULT, UNAVAILABLE
from relayd.admission.request import PublishRequest, Submitter
from relayd.faults import FaultLog
from relayd.identity.directory import Identities
from relayd.slices import Slices
from relayd.store.types import StoreError

__all__ = ["Loading"]

_LOADED_TOGETHER: Final = 64
"""The number of packets whose keys are in memory together, of any weight."""
_CHAINS_TOGETHER: Final = 64
"""The number of chains read for them: a packet may need three, and one more packet may exceed the number."""
_OF_EACH: Final = 16
"""The number among them of one publisher: a batch is as long as all its chains together."""
_LITTLE_SECONDS: Final = 1.0
"""A publisher that owes nothing after this time has used little: by default a tenth of it, of the loop."""


class _InTurn:
    """The packets that wait, a few at a time: one of each publisher after the other, of those that have used
    little, or else of the one that has used least."""

    def __init__(self) -> None:
        self._waiting: dict[Submitter, deque[PublishRequest]] = {}

    def append(self, request: PublishRequest) -> None:
        self._waiting.setdefault(request.lane.publisher, deque()).append(request)

    def take(self) -> list[PublishRequest]:
        if not self._waiting:
            return []
        now = time.monotonic()
        places = {publisher: publisher.turn(now) for publisher in self._waiting}
        last = max(now + _LITTLE_SECONDS, min(places.values()))
        turns = deque(sorted((each for each in places if places[each] <= last), key=places.__getitem__))
        taken: list[PublishRequest] = []
        left = dict.fromkeys(turns, _OF_EACH)
        while turns and len(taken) < _LOADED_TOGETHER:
            publisher = turns.popleft()
            requests = self._waiting[publisher]
            taken.append(requests.popleft())
            left[publisher] -= 1
            if not requests:
                del self._waiting[publisher]
            elif left[publisher]:
                turns.append(publisher)
        return taken

    def drain(self) -> list[PublishRequest]:
        waiting, self._waiting = self._waiting, {}
        return [request for requests in waiting.values() for request in requests]


class Loading:
    """Loads what requests need. `go_on(request, refusal)`, which must not raise, is called when it is
    loaded, or with the refusal if it could not be read. `on_flush` is called after each batch."""

    def __init__(
        self,
        identities: Identities,
        *,
        go_on: Callable[[PublishRequest, InvalidPacket | None], None],
        lost: Callable[[PublishRequest, BaseException], None],
        on_flush: Callable[[], None],
        faults: FaultLog,
        slices: Slices,
    ) -> None:
        self._identities = identities
        self._go_on = go_on
        self._lost = lost
        self._on_flush = on_flush
        self._faults = faults
        self._slices = slices
        self._queue = _InTurn()
        self._waiting = Gathering("keys", self._load, lost, self._queue)

    def put(self, request: PublishRequest) -> None:
        """Load what this request needs. If this raises, nothing is loaded for it."""
        self._waiting.put(request)

    async def close(self) -> None:
        """Stop loading."""
        await self._waiting.close()

    async def _load(self, requests: list[PublishRequest]) -> None:
        """What was read for a packet stays until it is used, however large: otherwise two chains that do not
        fit together would be read alternately, forever."""
        askers, ready = self._askers_of(requests)
        with self._identities.held():
            refusal = await self._read(askers)
            for request in ready:
                self._go_on(request, refusal)
        if refusal is UNAVAILABLE:  # the others have waited as long already
            for request in self._queue.drain():
                if self._slices.is_over():
                    self._on_flush()
                    await self._slices.next()
                self._go_on(request, refusal)
        self._on_flush()

    def _askers_of(
        self, requests: Sequence[PublishRequest]
    ) -> tuple[dict[str, Submitter], list[PublishRequest]]:
        """Whose chains these requests need, with those who pay for the reads, and the requests that can go on
        then. Requests beyond the number of chains go back to the queue."""
        askers: dict[str, Submitter] = {}
        ready: list[PublishRequest] = []
        for request in requests:
            if request.is_ended:
                continue
            if len(askers) >= _CHAINS_TOGETHER:
                self._queue.append(request)
                continue
            try:
                for did in missing_for(request.packet, self._identities):
                    askers.setdefault(did, request.lane.publisher)
            except Exception as error:
                self._lost(request, error)
            else:
                ready.append(request)
        return askers, ready

    async def _read(self, askers: dict[str, Submitter]) -> InvalidPacket | None:
        """Read these chains. Returns the refusal if they could not be read, else None."""
        try:
            await self._identities.load(askers)
        except StoreError:
            return UNAVAILABLE
        except Exception as error:
            self._faults.caught("identity", error)
            return FAULT
        return None
