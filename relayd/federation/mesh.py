"""Which peer is asked for what, in a group whose relays all read from each other, so that each packet comes
once.

Each peer is asked for its log without what it got from the others (`not_via`), because those are read
themselves. So each packet comes from the relay where it was published, and from no other. This holds while
every peer that is left out can be read:

- A peer that has not been heard for `DOWN_SECONDS` is no longer left out. The others are then read again
  from where reading stood before the peer fell silent, because since then they have withheld what it had
  sent them.
- Until a peer that is left out has caught up, and while it is silent, the cursors of the others are stored
  as they stood when that began. Otherwise they are stored as they stood a minute ago, because its silence may
  not have been noticed yet. A restart reads from there, and nothing that was withheld is skipped.

A relay always leaves out itself: nothing that a peer got from it comes back.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DOWN_SECONDS", "Mesh", "PeerReading"]

DOWN_SECONDS = 30.0
_UNNOTICED_SECONDS = 60.0
"""How long a dead connection may go unnoticed: a lost peer is in doubt since this long before the loss."""
_CHECKPOINT_SECONDS = 10.0
_CHECKPOINTS = 30


@dataclass(frozen=True, slots=True)
class PeerReading:
    """The request to a peer. `from_cursor` counts only if `rewinds` is set."""

    not_via: tuple[str, ...]
    rewinds: bool = False
    from_cursor: str | None = None


@dataclass(slots=True)
class _Peer:
    group: str
    silent_since: float
    """When it fell silent; infinity while it sends its log."""
    doubtful_since: float = -math.inf
    """Since when it may have packets not read from it; infinity while all of its log has been read."""
    left_out: frozenset[str] = frozenset()
    """The peers that it is asked to leave out, as of the last `read`."""
    checkpoints: deque[tuple[float, str | None]] = field(default_factory=deque)
    """Where reading of it stood, and when; oldest first."""


class Mesh:
    """The peers of one relay; times are seconds on one monotonic clock."""

    def __init__(self, own_id: str, groups: Mapping[str, str], now: float) -> None:
        """`groups` maps each peer to its group, or to an empty name if it is in none."""
        self._own_id = own_id
        self._peers = {did: _Peer(group, now) for did, group in groups.items()}

    def start(self, did: str, cursor: str | None, now: float) -> None:
        """Reading begins here, at the stored cursor. If an earlier link has passed it, what was read
        behind it still counts: links that each last less than a minute would never get further."""
        peer = self._peers[did]
        if cursor is None or cursor not in [each[1] for each in peer.checkpoints]:
            peer.checkpoints = deque([(now, cursor)])

    def heard(self, did: str) -> None:
        """The peer sends its log. Being connected is not enough: a peer that refuses on each attempt would
        never be silent for long, and what the others have of it would come from no peer."""
        self._peers[did].silent_since = math.inf

    def caught_up(self, did: str) -> None:
        """All of its log has been read; what comes now is new."""
        peer = self._peers[did]
        if peer.silent_since == math.inf:
            peer.doubtful_since = math.inf

    def lost(self, did: str, now: float) -> None:
        """The peer is no longer there, or cannot be read from."""
        peer = self._peers[did]
        peer.silent_since = min(peer.silent_since, now)
        peer.doubtful_since = min(peer.doubtful_since, now - _UNNOTICED_SECONDS)

    def read(self, did: str, now: float) -> PeerReading:
        """The request for this peer now. The caller makes it, or keeps its present request if that is the
        same: see `is_due`."""
        peer = self._peers[did]
        wanted = self._left_out(did, now)
        returned = peer.left_out - wanted
        peer.left_out = wanted
        not_via = (self._own_id, *sorted(wanted))
        if not returned:
            return PeerReading(not_via)
        since = min(self._peers[other].doubtful_since for other in returned)
        cursor = _standing_at(peer, since)
        # What was read after that place is read again, so no later checkpoint may be returned to.
        peer.checkpoints = deque([each for each in peer.checkpoints if each[0] <= since] or [(now, cursor)])
        return PeerReading(not_via, True, cursor)

    def is_due(self, did: str, now: float) -> bool:
        """Whether `read` would return another request than the last time."""
        return self._left_out(did, now) != self._peers[did].left_out

    def to_store(
        self, did: str, cursor: str | None, now: float, *, with_batch: str | None = None
    ) -> str | None:
        """The cursor that may be stored for this peer while reading stands at `cursor`, or will stand at
        `with_batch` once the packets that it is stored with are in.

        These may fail to be stored, so reading goes back to no place behind `cursor`.
        """
        peer = self._peers[did]
        doubtful_since = min((self._peers[other].doubtful_since for other in peer.left_out), default=math.inf)
        is_last_long_ago = not peer.checkpoints or now - peer.checkpoints[-1][0] >= _CHECKPOINT_SECONDS
        if doubtful_since == math.inf and is_last_long_ago:
            peer.checkpoints.append((now, cursor))
            if len(peer.checkpoints) > _CHECKPOINTS:
                peer.checkpoints.popleft()
        if peer.left_out:
            return _standing_at(peer, min(doubtful_since, now - _UNNOTICED_SECONDS))
        return cursor if with_batch is None else with_batch

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
    """Where reading stood at the last checkpoint at or before this moment, else at the first."""
    standing = peer.checkpoints[0][1] if peer.checkpoints else None
    for at, cursor in peer.checkpoints:
        if at > moment:
            break
        standing = cursor
    return standing
