"""Whether the log already has a packet: looked up for packets that would not be stored, before they are
refused (check 8).

Looking up every packet first would double the database's work (decision 3). A packet that passes all checks
meets the duplicate index inside the append itself; a packet that a later check refuses is looked up before
the refusal is sent. A memory of recent ids spares most repeats their signature check, and no more than that:
OK always rests on what the database says now, because a database that was restored without its end has lost
what this process remembers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from strata.protocol.provenance import UNKNOWN
from strata.protocol.provenance.origins import header_of

from relayd.admission.gathering import Gathering
from relayd.admission.request import PublishRequest
from relayd.faults import FaultLog
from relayd.slices import Slices
from relayd.store.payers import Payer, Together
from relayd.store.types import StoreError

__all__ = ["DuplicateIndex", "Repeat", "Repeats", "is_told_origin"]

_RECENT_IDS: Final = 65_536


class DuplicateIndex(Protocol):
    """The part of the store that this module needs; each method may raise `StoreError`."""

    async def find(
        self, ids: Sequence[bytes], payer: Payer | None = None
    ) -> dict[bytes, tuple[int, int]]: ...

    async def findings(self, ids: Sequence[bytes], payer: Payer | None = None) -> dict[bytes, bytes]: ...


class Repeat(NamedTuple):
    """A packet that the log has: since when, and what was found about its origin then, still encoded."""

    received_at: int
    finding: bytes | None


def is_told_origin(request: PublishRequest) -> bool:
    """Whether the answer says what was found about the packet's origin (R-209). A peer does not need it."""
    header = header_of(request.packet.value)
    return request.origin is None and header is not None and header.get("origin_type") not in (None, UNKNOWN)


class Repeats:
    """Looks requests up in `log`; those that have gathered are looked up together.

    `told(request, repeat)`, which must not raise, is called with each result: None if the log is not known
    to have the packet. `on_flush` is called after each batch, and unexpected errors go to `lost`.
    """

    def __init__(
        self,
        log: DuplicateIndex,
        *,
        told: Callable[[PublishRequest, Repeat | None], None],
        lost: Callable[[PublishRequest, BaseException], None],
        on_flush: Callable[[], None],
        faults: FaultLog,
        slices: Slices,
    ) -> None:
        self._log = log
        self._told = told
        self._on_flush = on_flush
        self._faults = faults
        self._slices = slices
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._doubtful: Gathering[tuple[PublishRequest, int | None]] = Gathering(
            "duplicates", self._look_up, lambda asked, error: lost(asked[0], error)
        )

    def remembers(self, digest: bytes) -> bool:
        """Whether a packet of this id entered the log recently, or was found there recently."""
        return digest in self._recent

    def remember(self, digest: bytes) -> None:
        """Remember that the log has a packet of this id."""
        recent = self._recent
        recent[digest] = None
        if len(recent) > _RECENT_IDS:
            recent.popitem(last=False)

    def forget(self, digest: bytes) -> None:
        """Forget this id: the log does not confirm it."""
        self._recent.pop(digest, None)

    def look_up(self, request: PublishRequest, received_at: int | None = None) -> None:
        """Look up whether the log has this packet. If `received_at` is given, an append has reported that it
        does: then only the finding about its origin is looked up. If this raises, nothing is looked up."""
        self._doubtful.put((request, received_at))

    async def close(self) -> None:
        """Stop the look-ups."""
        await self._doubtful.close()

    async def _look_up(self, asked: list[tuple[PublishRequest, int | None]]) -> None:
        known = await self._find([request for request, _ in asked])
        findings = await self._findings_of([each for each, _ in asked if each.packet.digest in known])
        for request, appended_at in asked:
            if self._slices.is_over():
                self._on_flush()
                await self._slices.next()
            digest = request.packet.digest
            received_at = known[digest][1] if digest in known else appended_at
            found = None if received_at is None else Repeat(received_at, findings.get(digest))
            self._told(request, found)
        self._on_flush()

    async def _find(self, requests: Sequence[PublishRequest]) -> dict[bytes, tuple[int, int]]:
        ids = list({request.packet.digest for request in requests})
        try:
            return await self._log.find(ids, _payers(requests))
        except StoreError:
            return {}  # a refusal stands whatever the index would say, and needs no database
        except Exception as error:
            self._faults.caught("publish", error)
            return {}

    async def _findings_of(self, repeats: Sequence[PublishRequest]) -> dict[bytes, bytes]:
        """What the log holds about the origin of these packets; without it, they still count as stored."""
        told = [request for request in repeats if is_told_origin(request)]
        ids = [request.packet.digest for request in told]
        try:
            return await self._log.findings(ids, _payers(told)) if ids else {}
        except StoreError:
            return {}
        except Exception as error:
            self._faults.caught("publish", error)
            return {}


def _payers(requests: Sequence[PublishRequest]) -> Payer:
    return Together(request.lane.publisher.payer for request in requests)
