"""How many trust edges and revocations an identity may publish within a day (R-241, R-242, RFC-0005 §5.2).

The log is what counts, so all processes on it and all restarts agree. An identity's acts of the last 24
hours are read when it first publishes one, and kept among those of the identities that did so most recently.
The feed, which passes every entry of the log, adds later acts. Acts on their way to the log are counted
besides, but only once if the log has them already. A revocation gives nothing back.

The append refuses an act if the log holds one of the same identity that the feed has not passed; each attempt
counts again (`recount`). So the budgets hold exactly, whichever processes an identity uses at once.

The cost that an identity may cause is bounded: a read takes ids, times and strengths, never a body. It uses a
connection that nothing else waits for, and happens once for an identity, not for each packet.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.packets import Packet
from strata.protocol.sequences import DAY_SECONDS, first_of_day
from strata.protocol.typed import trust_strength

from relayd.admission.refusals import UNAVAILABLE
from relayd.faults import FaultLog
from relayd.store.payers import Payer
from relayd.store.types import LogEntry, NewPacket, TrustRow

__all__ = ["BUDGETED_TYPES", "TrustAct", "TrustBudgets"]

BUDGETED_TYPES: Final = frozenset({"TRUST_EDGE", "TRUST_REVOCATION"})
WINDOW_SECONDS: Final = DAY_SECONDS
_STRONG: Final = 0.5
"""An edge of more than this strength is a strong edge."""
_MAX_READ: Final = 1000
"""The number of acts kept of one identity, the newest, or twice its budgets if those are larger: an import,
or a relay with other budgets on the same log, may bring more than fit."""
_MAX_AUTHORS: Final = 1024
"""The number of identities whose acts are kept; beyond it, the one quiet longest is read again on return."""


class TrustAct(enum.Enum):
    """The acts of trust that are counted separately."""

    STRONG_EDGES = "strong_edges"
    WEAK_EDGES = "weak_edges"
    REVOCATIONS = "revocations"


class _Log(Protocol):
    async def trust_acts(
        self, author: str, types: Iterable[str], *, after: int, most: int, payer: Payer | None = None
    ) -> list[TrustRow]: ...


class _Acts:
    """The acts of one identity: by packet id, when each was received and its kind.

    While `reading`, the feed adds acts too: the read contains what was committed before it began, and the
    feed passes what came after.
    """

    __slots__ = ("reading", "received")

    def __init__(self) -> None:
        self.received: dict[bytes, tuple[int, TrustAct]] = {}
        self.reading: asyncio.Task[None] | None = None


class _Content(msgspec.Struct):
    strength: msgspec.Raw = msgspec.Raw(b"null")
    """Decoded only for edges: decoding whatever a revocation holds here may take a second."""


class _Edge(msgspec.Struct):
    content: _Content


_EDGE_DECODER = msgspec.json.Decoder(_Edge)
_BEGINS_NUMBER = frozenset(bytes([character]) for character in b"-0123456789")


class TrustBudgets:
    """The budgets of all identities; in `limits`, a budget that is absent or 0 sets no limit."""

    def __init__(
        self,
        log: _Log,
        limits: Mapping[TrustAct, int],
        *,
        clock: Callable[[], int],
        faults: FaultLog | None = None,
    ) -> None:
        self._log = log
        self._faults = faults or FaultLog()
        self._limits = {budget: limit for budget, limit in limits.items() if limit}
        self._clock = clock
        self._max_acts = max(_MAX_READ, 2 * sum(self._limits.values()))
        # By author and packet id.
        self._on_their_way: dict[str, dict[bytes, TrustAct]] = {}
        # In order of last use.
        self._known: OrderedDict[str, _Acts] = OrderedDict()

    async def take(self, packet: Packet, at: int | None = None, payer: Payer | None = None) -> None:
        """Count a trust packet, until `settled` reports its outcome. `at` is when another relay received it,
        so that a peer's backlog of several days counts for the days it comes from. If the log has to be
        read, that is at the expense of `payer`.

        Raises `InvalidPacket` with `rate_limited`, and any error of reading the log; nothing is counted then.
        Cancelling it counts nothing.
        """
        budget = _act(packet.content_type, trust_strength(packet))
        limit = self._limits.get(budget)
        if limit is None:
            return
        # Reserve before the wait, so that several at once cannot each count as the last one that fits.
        mine = self._on_their_way.setdefault(packet.author_id, {})
        mine[packet.digest] = budget
        before = {packet_id for packet_id, act in mine.items() if act is budget}
        try:
            self._check(limit, before, await self._received(packet.author_id, budget, at, payer))
        except BaseException:
            self.settled(packet)
            raise

    def recount(self, packet: Packet, at: int | None = None) -> None:
        """Count a packet that `take` let pass once more, right before it is appended: the feed may have
        brought acts that other processes have committed since.

        Raises `InvalidPacket`: `rate_limited`, or `UNAVAILABLE` if what the log holds is no longer in memory.
        """
        mine = self._on_their_way.get(packet.author_id, {})
        budget = mine.get(packet.digest)
        if budget is None:  # without a limit, or the same packet has been settled in another session
            return
        acts = self._known.get(packet.author_id)
        if acts is None or acts.reading is not None:
            raise UNAVAILABLE
        ahead = itertools.takewhile(lambda packet_id: packet_id != packet.digest, mine)
        before = {packet.digest, *(packet_id for packet_id in ahead if mine[packet_id] is budget)}
        self._check(self._limits[budget], before, self._counted(acts, budget, at))

    def _check(self, limit: int, under_way: set[bytes], received: dict[bytes, int]) -> None:
        if len(under_way | received.keys()) > limit:
            times = sorted(received.values())
            raise _over(limit, times, len(under_way - received.keys()), self._clock())

    def settled(self, packet: Packet, received_at: int | None = None) -> None:
        """The packet is in the log since `received_at`, or refused. Call it after each `take` that returned.

        The same packet may be published twice at once; the second call then changes nothing.
        """
        mine = self._on_their_way.get(packet.author_id, {})
        act = mine.pop(packet.digest, None)
        if not mine:
            self._on_their_way.pop(packet.author_id, None)
        if act is not None and received_at is not None:
            self._count(packet.author_id, packet.digest, received_at, act)

    def observe(self, entries: Sequence[LogEntry]) -> None:
        """Take the log's next entries, in sequence and without a gap; called by the feed. Never raises."""
        for entry in entries:
            new = entry.packet
            if new.content_type in BUDGETED_TYPES and new.author_id in self._known:
                try:
                    self._observe(entry)
                except Exception as error:
                    self._faults.caught("identity", error)
                    self._known.pop(new.author_id, None)  # what is kept may be wrong: it is read again

    def _observe(self, entry: LogEntry) -> None:
        new = entry.packet
        act = _act(new.content_type, _strength(new) if new.content_type == "TRUST_EDGE" else None)
        self._count(new.author_id, new.packet_id, entry.told_at, act)

    async def close(self) -> None:
        """End the reads under way."""
        tasks = [acts.reading for acts in self._known.values() if acts.reading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _received(
        self, author: str, budget: TrustAct, at: int | None, payer: Payer | None
    ) -> dict[bytes, int]:
        """The packets that count against this budget at this time, with the times they were received."""
        acts = self._known.get(author) or self._begin(author, payer)
        self._known.move_to_end(author)
        if (task := acts.reading) is not None:
            try:
                await asyncio.wait({task})
                task.result()
            finally:
                del task  # it holds the exception, whose frames would hold the task
        return self._counted(acts, budget, at)

    def _counted(self, acts: _Acts, budget: TrustAct, at: int | None) -> dict[bytes, int]:
        until = math.inf if at is None else at
        since = (self._clock() if at is None else at) - WINDOW_SECONDS
        return {
            packet_id: received_at
            for packet_id, (received_at, act) in acts.received.items()
            if act is budget and since < received_at <= until
        }

    def _begin(self, author: str, payer: Payer | None) -> _Acts:
        """Start reading the acts of an identity."""
        acts = _Acts()
        acts.reading = asyncio.create_task(self._read(author, acts, payer), name="trust-budget")
        acts.reading.add_done_callback(functools.partial(self._read_ended, author, acts))
        self._known[author] = acts
        return acts

    async def _read(self, author: str, acts: _Acts, payer: Payer | None) -> None:
        after = first_of_day(max(0, (self._clock() - WINDOW_SECONDS) // DAY_SECONDS))
        rows = await self._log.trust_acts(
            author, BUDGETED_TYPES, after=after, most=self._max_acts, payer=payer
        )
        for row in rows:
            acts.received[row.packet_id] = row.received_at, _act(row.content_type, row.strength)

    def _read_ended(self, author: str, acts: _Acts, task: asyncio.Task[None]) -> None:
        acts.reading = None
        if task.cancelled() or task.exception() is not None:
            self._known.pop(author, None)  # those who wait get the error, and the next one reads again
            return
        self._make_room()

    def _count(self, author: str, packet_id: bytes, received_at: int, act: TrustAct) -> None:
        acts = self._known.get(author)
        if acts is None or packet_id in acts.received:
            return
        acts.received[packet_id] = received_at, act
        if len(acts.received) > self._max_acts and acts.reading is None:
            del self._known[author]
        else:
            self._make_room()

    def _make_room(self) -> None:
        while len(self._known) > _MAX_AUTHORS:
            self._known.popitem(last=False)


def _strength(edge: NewPacket) -> float | None:
    """The strength of an edge in the log; None if it is not a number."""
    text = bytes(_EDGE_DECODER.decode(edge.body).content.strength)
    try:
        return float(text) if text[:1] in _BEGINS_NUMBER else None
    except ValueError:
        return None


def _act(content_type: str, strength: float | None) -> TrustAct:
    if content_type == "TRUST_REVOCATION":
        return TrustAct.REVOCATIONS
    return TrustAct.STRONG_EDGES if strength is not None and strength > _STRONG else TrustAct.WEAK_EDGES


def _over(limit: int, received: list[int], under_way: int, now: int) -> InvalidPacket:
    # A new packet fits when enough of the oldest have left the window.
    leaving = len(received) + under_way - limit
    last = received[min(leaving, len(received)) - 1] if received else now
    return InvalidPacket(
        ErrorCode.RATE_LIMITED,
        f"this identity has published its {limit} trust packets of this kind for the last 24 hours",
        detail="trust_budget",
        retry_after=max(1, last + WINDOW_SECONDS - now),
        limit=limit,
        window_seconds=WINDOW_SECONDS,
    )
