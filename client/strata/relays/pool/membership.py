"""Which relays a pool is connected to, reads from and publishes to: no I/O, no clock.

Every known relay is a member. Of those that may be contacted, the ones with a *seat* hold a connection each.
A relay keeps its seat as long as it is useful, so a slightly better score elsewhere changes nothing. It loses
the seat

- at once, if it is blacklisted (R-344);
- after `replace_after` of absence or `ping_failures` missed pings, if another relay waits for a seat (C-272,
  C-277). The loser goes to the end of the line, and has its turn again when others fail. A relay that was
  not reached in its seat then gets the whole time of an attempt the next time, otherwise distant relays would
  take turns forever;
- to a newcomer that did better in its trial (R-345).

Readers and publish targets are chosen from the seats, connected ones first, then by standing and score.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from strata.relays.conduct import Standing
from strata.relays.pool.options import PoolOptions

__all__ = ["Membership"]

_TRIAL_SECONDS = 60.0
"""How long a newcomer is tried before its score decides."""


@dataclass(slots=True)
class _Member:
    url: str
    turn: int
    """Among equals, lower turns come first; the loser of a seat gets the highest."""
    seated: bool = False
    connected: bool = False
    absent_since: float = -math.inf
    is_new: bool = True
    """Whether it has not been reached since it got its seat."""
    is_slow: bool = False
    """Whether it has lost a seat before it was reached, and has not been reached since."""
    missed_pings: int = 0
    trial_until: float | None = None


class Membership:
    """Seats, readers and targets. `standing` and `score` return the latest judgement of a relay."""

    def __init__(
        self,
        urls: Iterable[str],
        options: PoolOptions,
        *,
        standing: Callable[[str], Standing],
        score: Callable[[str], float],
        random: Callable[[], float],
    ) -> None:
        self._options = options
        self._standing = standing
        self._score = score
        self._random = random
        self._members: dict[str, _Member] = {}
        self._turns = 0
        self._sample_at = math.inf
        for url in urls:
            self.add(url)

    def __contains__(self, url: str) -> bool:
        return url in self._members

    @property
    def urls(self) -> list[str]:
        """Every member, in the order added."""
        return list(self._members)

    def add(self, url: str) -> None:
        """Make a relay a member, at the end of the line. Idempotent."""
        if url not in self._members:
            self._turns += 1
            self._members[url] = _Member(url, self._turns)

    def remove(self, url: str) -> None:
        """Forget a member."""
        self._members.pop(url, None)

    def usable(self) -> list[str]:
        """Members that may be contacted (R-344)."""
        return [member.url for member in self._usable()]

    # Events.

    def connected(self, url: str) -> None:
        """Note that there is a connection to this relay."""
        if member := self._members.get(url):
            member.connected, member.missed_pings = True, 0
            member.is_new = member.is_slow = False

    def disconnected(self, url: str, now: float) -> None:
        """Note that the connection was lost, or an attempt failed."""
        member = self._members.get(url)
        if member is not None and (member.connected or member.absent_since == -math.inf):
            member.connected, member.absent_since = False, now

    def ping_answered(self, url: str) -> None:
        """Note a successful ping."""
        if member := self._members.get(url):
            member.missed_pings = 0

    def ping_missed(self, url: str) -> None:
        """Note a ping without an answer in time (C-277)."""
        if member := self._members.get(url):
            member.missed_pings += 1

    def is_connected(self, url: str) -> bool:
        """Whether there is a connection to this relay."""
        member = self._members.get(url)
        return member is not None and member.connected

    # Choices.

    def seats(self, now: float) -> list[str]:
        """Reassign the seats; return the relays to hold connections to from now on."""
        options = self._options
        usable = self._usable()
        for member in self._members.values():
            if self._standing(member.url) is Standing.BLACKLISTED:
                member.seated, member.trial_until = False, None
        waiting = sorted((m for m in usable if not m.seated), key=self._turn)
        for member in [m for m in usable if m.seated and self._is_lost(m, now)]:
            # An extra seat for a trial goes to no other relay: it is removed after its minute.
            is_beside = member.trial_until is not None and sum(m.seated for m in usable) > options.connections
            if waiting and not is_beside:
                self._swap(member, waiting.pop(0), now)
        self._end_trials(now)
        free = options.connections - sum(m.seated for m in usable)
        for member in sorted((m for m in usable if not m.seated), key=self._turn)[: max(free, 0)]:
            self._seat(member, now)
        return [m.url for m in usable if m.seated]

    def readers(self, wanted: int, current: Iterable[str], without: Container[str] = ()) -> list[str]:
        """The relays to read from, among the healthy ones: active before backup, those read from now before
        others, then by score; none of `without`."""
        kept = set(current)
        seated = [m for m in self._usable() if m.seated and m.connected and m.url not in without]
        healthy = [m for m in seated if not self._is_failing(m)]

        def rank(member: _Member) -> tuple[bool, bool, float, int]:
            is_backup = self._standing(member.url) is Standing.BACKUP
            return is_backup, member.url not in kept, -self._score(member.url), member.turn

        return [member.url for member in sorted(healthy, key=rank)[:wanted]]

    def targets(self) -> list[str]:
        """Where to publish, best first: healthy, then failing, then absent relays; never blacklisted ones."""

        def rank(member: _Member) -> tuple[bool, bool, bool, float, int]:
            is_backup = self._standing(member.url) is Standing.BACKUP
            failing = self._is_failing(member)
            return not member.connected, failing, is_backup, -self._score(member.url), member.turn

        return [member.url for member in sorted((m for m in self._usable() if m.seated), key=rank)]

    def sample(self, now: float) -> str | None:
        """Choose a relay not in use to be tried, if a trial is due, else None (R-345).

        The relay gets an extra seat for a minute; then its score decides whether it keeps a seat.
        """
        interval = self._options.sample_interval
        if interval is None:
            return None
        if self._sample_at == math.inf:
            self._sample_at = now + interval * (0.5 + self._random())
        if now < self._sample_at:
            return None
        self._sample_at = now + interval * (0.5 + self._random())
        waiting = [m for m in self._usable() if not m.seated]
        if not waiting:
            return None
        chosen = waiting[min(int(self._random() * len(waiting)), len(waiting) - 1)]
        self._seat(chosen, now)
        chosen.trial_until = now + _TRIAL_SECONDS
        return chosen.url

    # Rules.

    def _usable(self) -> list[_Member]:
        return [m for m in self._members.values() if self._standing(m.url) is not Standing.BLACKLISTED]

    def _turn(self, member: _Member) -> tuple[bool, int]:
        """The order of getting a seat: the loser of one waits for the others, whatever its score is."""
        return self._standing(member.url) is Standing.BACKUP, member.turn

    def _is_failing(self, member: _Member) -> bool:
        return member.missed_pings >= self._options.ping_failures

    def _is_lost(self, member: _Member, now: float) -> bool:
        options = self._options
        patience = options.replace_after
        if member.is_new and member.is_slow:
            patience = max(patience, min(options.relay.handshake_timeout, options.revive_after))
        gone = not member.connected and now - member.absent_since >= patience
        return gone or self._is_failing(member)

    def _seat(self, member: _Member, now: float) -> None:
        member.seated, member.connected, member.is_new = True, False, True
        member.missed_pings, member.absent_since = 0, now

    def _unseat(self, loser: _Member) -> None:
        """Take a relay's seat away; the relay goes to the end of the line."""
        self._turns += 1
        loser.turn, loser.seated, loser.connected, loser.trial_until = self._turns, False, False, None

    def _swap(self, loser: _Member, successor: _Member, now: float) -> None:
        self._unseat(loser)
        loser.is_slow |= loser.is_new
        self._seat(successor, now)

    def _end_trials(self, now: float) -> None:
        for member in self._members.values():
            if member.trial_until is not None and now >= member.trial_until:
                member.trial_until = None
        kept = [m for m in self._members.values() if m.seated and m.trial_until is None]
        kept.sort(key=lambda m: (m.connected, self._score(m.url), -m.turn), reverse=True)
        for worst in kept[self._options.connections :]:
            self._unseat(worst)
