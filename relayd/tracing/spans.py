"""Spans, and the choice of the packets that are traced.

The trace of a packet needs no propagated context. Its id is the beginning of the packet's id; whether the
packet is traced, and the id of the span of its append, follow from the packet's id and a secret of the log.
So the process that stores a packet and the processes that send it contribute to the same trace, and neither
NOTIFY, nor the bus, nor a row carries anything for it. The secret is needed because authors choose their
packets: without it an author could make packets that are all traced.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol

__all__ = ["PacketTrace", "Sample", "Spans", "TraceSpan"]

_HALF: Final = 8
"""The bytes of a span's id; a trace's id has twice as many."""


class PacketTrace(NamedTuple):
    """The trace of one packet."""

    trace_id: int
    append_id: int
    """The id of the span of the append that stored the packet."""


class Sample:
    """Decides which packets are traced: `ratio` of them, the same ones in every process of a log."""

    def __init__(self, ratio: float, log_key: bytes) -> None:
        self._key = hashlib.blake2s(b"tracing", key=log_key).digest()
        self._below = round(ratio * 2 ** (8 * _HALF))

    def trace(self, digest: bytes) -> PacketTrace | None:
        """The trace of the packet with this id, if it is traced."""
        drawn = hashlib.blake2s(digest, key=self._key, digest_size=2 * _HALF).digest()
        if int.from_bytes(drawn[:_HALF], "big") >= self._below:
            return None
        # Zero stands for no id.
        return PacketTrace(
            int.from_bytes(digest[: 2 * _HALF], "big") or 1, int.from_bytes(drawn[_HALF:], "big") or 1
        )


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span that has ended. Times are on the monotonic clock, in seconds."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    began_at: float
    ended_at: float
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    problem: str | None = None
    """The failure, if the span is about one."""
    kind: Literal["internal", "server", "client"] = "internal"


class Spans(Protocol):
    """The destination of spans."""

    def emit(self, span: TraceSpan) -> None:
        """Take a span, or drop one if too many wait. Never waits."""
