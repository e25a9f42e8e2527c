"""How many trust edges and revocations an identity may publish within a day (R-241, R-242, RFC-0005 §5.2).

The log is what counts, so every process on it and every restart agree: an identity's edges of the last
24 hours are read when it publishes another, which is seldom by the nature of the rule. Those on their way to
the log are counted beside them, and once where the log has them already. A revocation gives nothing back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.packets import Packet

from relayd.store.types import DAY_SECONDS, StoredPacket, first_sequence_of_day

__all__ = ["BUDGETED_TYPES", "TrustAct", "TrustBudgets"]

BUDGETED_TYPES: Final = frozenset({"TRUST_EDGE", "TRUST_REVOCATION"})
WINDOW_SECONDS: Final = DAY_SECONDS
_STRONG: Final = 0.5
"""An edge above this strength is a strong one."""


class TrustAct(enum.Enum):
    """The acts of trust that are counted separately."""

    STRONG_EDGES = "strong_edges"
    WEAK_EDGES = "weak_edges"
    REVOCATIONS = "revocations"


class _Log(Protocol):
    async def packets_of(
        self, authors: Sequence[str], types: Iterable[str], *, after: int = 0
    ) -> list[StoredPacket]: ...


class _Content(msgspec.Struct):
    type: str
    strength: float | None = None


class _Edge(msgspec.Struct):
    packet_id: str
    content: _Content


_EDGE_DECODER = msgspec.json.Decoder(_Edge)


class TrustBudgets:
    """The budgets of all identities; `limits` may leave a budget out, or hold 0, for no limit."""

    def __init__(self, log: _Log, limits: Mapping[TrustAct, int], *, clock: Callable[[], int]) -> None:
        self._log = log
        self._limits = {budget: limit for budget, limit in limits.items() if limit}
        self._clock = clock
        self._on_their_way: dict[tuple[str, TrustAct], set[str]] = {}

    async def take(self, packet: Packet) -> None:
        """Count a trust packet, until `settled` says what became of it.

        Raises `InvalidPacket` with `rate_limited`, when nothing is counted, and `StoreError`. Cancelling
        counts nothing.
        """
        budget = _budget_of(packet.content_type, packet.content.get("strength"))
        limit = self._limits.get(budget)
        if limit is None:
            return
        # Reserved before the wait, so that several at once cannot all be the last one that fits.
        under_way = self._on_their_way.setdefault((packet.author_id, budget), set())
        under_way.add(packet.packet_id)
        before = frozenset(under_way)
        try:
            received = await self._received(packet, budget)
            if len(before | received.keys()) > limit:
                raise _over(limit, list(received.values()), len(before - received.keys()), self._clock())
        except BaseException:
            self._release(packet, budget)
            raise

    def settled(self, packet: Packet) -> None:
        """The packet is in the log, or refused: call it once for each `take` that returned."""
        budget = _budget_of(packet.content_type, packet.content.get("strength"))
        if budget in self._limits:
            self._release(packet, budget)

    def _release(self, packet: Packet, budget: TrustAct) -> None:
        under_way = self._on_their_way.get((packet.author_id, budget), set())
        under_way.discard(packet.packet_id)  # the same packet may be published twice at once
        if not under_way:
            self._on_their_way.pop((packet.author_id, budget), None)

    async def _received(self, packet: Packet, budget: TrustAct) -> dict[str, int]:
        """The packets that count against this budget and when they were received, the oldest first."""
        since = self._clock() - WINDOW_SECONDS
        border = first_sequence_of_day(max(0, since // DAY_SECONDS))
        rows = await self._log.packets_of([packet.author_id], [packet.content_type], after=border)
        edges = ((row.received_at, _EDGE_DECODER.decode(row.body)) for row in rows)
        return {
            edge.packet_id: received_at
            for received_at, edge in edges
            if received_at > since and _budget_of(edge.content.type, edge.content.strength) is budget
        }


def _budget_of(content_type: str, strength: object) -> TrustAct:
    if content_type == "TRUST_REVOCATION":
        return TrustAct.REVOCATIONS
    is_strong = isinstance(strength, int | float) and strength > _STRONG
    return TrustAct.STRONG_EDGES if is_strong else TrustAct.WEAK_EDGES


def _over(limit: int, received: list[int], under_way: int, now: int) -> InvalidPacket:
    # One fits again when enough of the oldest have left the window.
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
