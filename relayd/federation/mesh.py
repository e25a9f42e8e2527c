"""Who is asked for what in a group whose relays all read from each other, so that a packet comes once.

Each peer is asked for its log without what it got from the others (`not_via`): those are read themselves.
So each packet comes from the relay it was published at, and from no other. It holds while every peer left out
can be read:

- A peer that has not been heard for `DOWN_SECONDS` is left out no more. The others are then read again from
  where they stood before it fell silent, for they have withheld since what it had sent them.
- Until a peer that is left out has caught up, and while it is silent, the cursors of the others are stored as
  they stood when that began. A restart reads from there, and nothing withheld is passed by.

To itself a relay never lets anything come back.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DOWN_SECONDS", "Mesh", "Reading"]

DOWN_SECONDS = 30.0
_UNNOTICED_SECONDS = 60.0
"""How long a dead connection may go unnoticed: a peer counts as silent since so long before that."""
_CHECKPOINT_SECONDS = 10.0
_CHECKPOINTS = 30


@dataclass(frozen=True, slots=True)
class Reading:
    """What to ask a peer for. `from_cursor` counts only where `rewinds` says so."""

    not_via: tuple[str, ...]
    rewinds: bool = False
    from_cursor: str | None = None


@dataclass(slots=True)
class _Peer:
    group: str
    silent_since: float
    """When it fell silent; infinity while it sends its log."""
    doubtful_since: float = -math.inf
    """Since when it may have what was not read from it; infinity while all of its log has been read."""
    left_out: frozenset[str] = frozenset()
    """Whom it is asked to leave out, as of the last `read`."""
    checkpoints: deque[tuple[float, str | None]] = field(default_factory=deque)
    """Where it stood in reading, and when; oldest first."""


class Mesh:
    """The peers of one relay; times are seconds on one monotonic clock."""

    def __init__(self, own_id: str, groups: Mapping[str, str], now: float) -> None:
        """`groups` names each peer's group, or nothing where it is in none."""
        self._own_id = own_id
        self._peers = {did: _Peer(group, now) for did, group in groups.items()}

    def start(self, did: str, cursor: str | None, now: float) -> None:
        """Reading begins here, with what was stored."""
        self._peers[did].checkpoints = deque([(now, cursor)])

    def heard(self, did: str) -> None:
        """The peer sends its log. Being reached is not enough: one that refuses each time it is tried would
        never be silent for long, and what the others have of it would come from nobody."""
        self._peers[did].silent_since = math.inf

    def caught_up(self, did: str) -> None:
        """All of its log has been read; what comes now is new."""
        peer = self._peers[did]
        if peer.silent_since == math.inf:
            peer.doubtful_since = math.inf

    def lost(self, did: str, now: float) -> None:
        """The peer is there no more, or not to be read from."""
        peer = self._peers[did]
        peer.silent_since = min(peer.silent_since, now)
        peer.doubtful_since = min(peer.doubtful_since, now - _UNNOTICED_SECONDS)

    def read(self, did: str, now: float) -> Reading:
        """What to ask this peer for now. The caller asks for it, or goes on with what it asked for if that
        is the same: see `is_due`."""
        peer = self._peers[did]
        wanted = self._left_out(did, now)
        returned = peer.left_out - wanted
        peer.left_out = wanted
        not_via = (self._own_id, *sorted(wanted))
        if not returned:
            return Reading(not_via)
        since = min(self._peers[other].doubtful_since for other in returned)
        cursor = _standing_at(peer, since)
        # What was read behind that place is read again: no later place may be come back to.
        peer.checkpoints = deque([each for each in peer.checkpoints if each[0] <= since] or [(now, cursor)])
        return Reading(not_via, True, cursor)

    def is_due(self, did: str, now: float) -> bool:
        """Whether `read` would say something else than the last time."""
        return self._left_out(did, now) != self._peers[did].left_out

    def to_store(self, did: str, cursor: str | None, now: float) -> str | None:
        """The cursor that may be stored for this peer, where reading stands at `cursor`."""
        peer = self._peers[did]
        doubtful_since = min((self._peers[other].doubtful_since for other in peer.left_out), default=math.inf)
        if doubtful_since < math.inf:
            return _standing_at(peer, doubtful_since)
        if not peer.checkpoints or now - peer.checkpoints[-1][0] >= _CHECKPOINT_SECONDS:
            peer.checkpoints.append((now, cursor))
            if len(peer.checkpoints) > _CHECKPOINTS:
                peer.checkpoints.popleft()
        return cursor

    def _left_out(self, did: str, now: float) -> frozenset[str]:
        group = self._peers[did].group
        if not group:
            return frozenset()
        return frozenset(
            other
            for other, peer in self._peers.items()
            if other != did and peer.group == group and now - peer.silent_since < DOWN_SECONDS
        )


def _standing_at(peer: _Peer, moment: float) -> str | None:
    """Where reading stood at this moment at the latest."""
    standing = peer.checkpoints[0][1] if peer.checkpoints else None
    for at, cursor in peer.checkpoints:
        if at > moment:
            break
        standing = cursor
    return standing
