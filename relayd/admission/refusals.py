"""The refusals that are this relay's own doing: the packet may be perfectly valid.

The publisher receives `internal_error` and may publish again. A packet of a peer arrives only once, so it is
judged again here: after any number of waits if the refusal is temporary, and a bounded number of times if
the relay may fail on the packet itself (`federation.intake`).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Final

from strata.protocol.errors import ErrorCode, InvalidPacket

__all__ = [
    "FAULT",
    "KEYS_CHANGED",
    "NOT_IN_TIME",
    "NOT_STORABLE",
    "QUEUE_FULL",
    "REPEATS_REMOVED",
    "UNAVAILABLE",
    "is_passing",
]


def _ours(reason: str, detail: str | None = None) -> InvalidPacket:
    return InvalidPacket(ErrorCode.INTERNAL_ERROR, reason, detail=detail)


QUEUE_FULL: Final = _ours("too many packets wait to be stored; publish it again", "queue_full")
UNAVAILABLE: Final = _ours("the packet could not be checked in time; publish it again", "store_unavailable")
NOT_IN_TIME: Final = _ours("the packet could not be stored in time; publish it again", "store_unavailable")
KEYS_CHANGED: Final = _ours("the author's keys changed meanwhile; publish it again", "keys_changed")

_PASSING: Final = frozenset(each.detail for each in (QUEUE_FULL, UNAVAILABLE, NOT_IN_TIME, KEYS_CHANGED))

NOT_STORABLE: Final = _ours("the packet could not be stored", "not_storable")
FAULT: Final = _ours("the relay failed on this packet; it may not be stored")

REPEATS_REMOVED: Final = InvalidPacket(
    ErrorCode.POLICY_REJECTED, "it states the same as a packet that was removed here", detail="duplicate_of"
)
"""Not temporary: what was removed stays away, and no OK may name a packet that is not served (R-113)."""


def is_passing(error: InvalidPacket) -> bool:
    """Whether the refusal is temporary: the fault is this relay's, not the packet's."""
    return error.code == ErrorCode.INTERNAL_ERROR and error.detail in _PASSING
