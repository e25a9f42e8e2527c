"""The standing of each peer, by its conduct: the client library's `Conduct`, kept in the database (R-381).

A peer that the library would blacklist is *barred*: it is not read from until its sentence is served. A peer
that the library would treat as a backup is read like any other, because the operator has chosen it. Only
evidence bars (decision 35): a packet that a rule of this relay refuses, or that is too old, is not even
noted.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math

import msgspec
from strata.relays.conduct import Aspect, Conduct, HourCount, Saved, Score, Standing

__all__ = ["JUDGE_SECONDS", "KeptConduct", "Standings", "conduct_of"]

JUDGE_SECONDS = 60.0
"""How often a peer is judged, and its record stored, if it has done nothing wrong meanwhile, in seconds."""


class KeptConduct(msgspec.Struct, frozen=True):
    """A peer's record as the database keeps it; older programs know only the numbers."""

    offences: int
    """The pieces of evidence that count now."""
    bars: int
    """How often it was barred."""
    barred_until: int
    """When the last sentence ends, in Unix seconds."""
    conduct: str | None
    """The whole record as JSON; None for a peer of which only the numbers above are known."""


class _Record(msgspec.Struct):
    saved: Saved
    counts: list[HourCount]


_DECODER = msgspec.json.Decoder(_Record)


def conduct_of(kept: KeptConduct, now: float) -> Conduct:
    """The conduct as it was kept, by this program or by one that knew only numbers."""
    conduct = Conduct()
    if kept.conduct is not None:
        try:
            record = _DECODER.decode(kept.conduct)
        except msgspec.MsgspecError:
            pass  # from a newer program
        else:
            conduct.restore(record.saved, record.counts)
            return conduct
    standing = Standing.BLACKLISTED if kept.barred_until > now else Standing.ACTIVE
    conduct.restore(Saved(standing, kept.bars, float(kept.barred_until) if kept.barred_until else None, None))
    if kept.offences:
        conduct.record(now, Aspect.VALIDITY, 0, kept.offences)
    return conduct


class _Peer:
    __slots__ = ("conduct", "is_news", "judged_at", "score")

    def __init__(self, conduct: Conduct, now: float) -> None:
        self.conduct = conduct
        self.score = conduct.score(now)
        self.judged_at = -math.inf
        self.is_news = False
        """Whether something has changed that must outlive the process."""


class Standings:
    """The standing of the peers of one relay, by their numbers. Times are Unix seconds."""

    def __init__(self) -> None:
        self._peers: dict[int, _Peer] = {}

    def knows(self, peer_id: int) -> bool:
        """Whether the peer's record was taken up."""
        return peer_id in self._peers

    def forget(self, peer_id: int) -> None:
        """Drop a record, so that it is taken up again."""
        self._peers.pop(peer_id, None)

    def forget_written(self) -> None:
        """Drop every record except those not written yet, so that they are taken up again."""
        self._peers = {peer_id: peer for peer_id, peer in self._peers.items() if peer.is_news}

    def take_up(self, peer_id: int, kept: KeptConduct, now: float) -> None:
        """Take up the kept record, in place of what was known."""
        self._peers[peer_id] = _Peer(conduct_of(kept, now), now)

    def note(self, peer_id: int, kind: Aspect, now: float, good: int, bad: int, value: float | None) -> None:
        """Note something that a peer has done; evidence makes it judged at once."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        peer.conduct.record(now, kind, good, bad, value)
        if bad and kind not in (Aspect.CONNECT, Aspect.PING):
            peer.is_news = True
        if bad and kind in (Aspect.VALIDITY, Aspect.PRESENCE):
            self._judge(peer, now)

    def is_barred(self, peer_id: int, now: float) -> bool:
        """Whether the peer must not be read from. A sentence that is served ends here."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return False
        if peer.conduct.standing is Standing.BLACKLISTED:
            self._judge(peer, now)
        return peer.conduct.standing is Standing.BLACKLISTED

    def barred_until(self, peer_id: int) -> int:
        """When its last sentence ends, in Unix seconds."""
        peer = self._peers.get(peer_id)
        return 0 if peer is None else int(peer.conduct.saved.blacklisted_until or 0)

    def score(self, peer_id: int) -> Score | None:
        """The peer's score when it was last judged."""
        peer = self._peers.get(peer_id)
        return None if peer is None else peer.score

    def to_write(self, peer_id: int, now: float) -> KeptConduct | None:
        """The record, if it is time to write it, else None. Call `not_written` if writing fails."""
        peer = self._peers.get(peer_id)
        if peer is None or not (peer.is_news or now - peer.judged_at >= JUDGE_SECONDS):
            return None
        self._judge(peer, now)
        peer.is_news = False
        record = _Record(peer.conduct.saved, peer.conduct.counts)
        saved = record.saved
        return KeptConduct(
            peer.conduct.offences(now),
            saved.strikes,
            int(saved.blacklisted_until or 0),
            msgspec.json.encode(record).decode(),
        )

    def not_written(self, peer_id: int) -> None:
        """The database did not take the record: it must be written again."""
        if (peer := self._peers.get(peer_id)) is not None:
            peer.is_news = True

    def _judge(self, peer: _Peer, now: float) -> None:
        peer.judged_at = now
        if peer.conduct.judge(now) is not None:
            peer.is_news = True
        peer.score = peer.conduct.score(now)
