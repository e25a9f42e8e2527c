"""One relay's conduct, and the standing that follows from it: no I/O, no clock.

A client's pool keeps this for every relay that it knows, and a relay for every peer that it reads from, with
the same offences, weights and time limits. It is not shared with others (R-340).

Observations are counted in buckets of an hour. The buckets of the last seven days make the score:

    score        = integrity · uptime · (0.7 · quickness + 0.3 · capacity)          in [0, 1]
    integrity    = validity · consistency
    validity     = (good + 20) / (good + 20 + 20 · bad)      packets verified, and those that were
                                                             forged, malformed or misdated
    consistency  = (found + 20) / (found + 20 + 20 · denied + 5 · missing)
    uptime       = (good + 2) / (good + bad + 2)             connections, pings, and checks left unanswered
    quickness    = 1 / (1 + mean round trip / 0.5 s)         unknown: 0.5
    capacity     = rate / (rate + 256 KiB/s)                 unknown: 0.5

A *denied* packet is one that the relay itself had acknowledged to this client, or named in two comparisons;
a *missing* packet is one that it had served, or that is widely held. One denial halves the score of an
unknown relay; a relay with a thousand good answers has more credit. A correctly annotated downgrade is not an
offence (R-342) and is not reported as bad.

All bad observations lower the score, but only `Evidence` blacklists at once: what no honest relay does,
however slow, disconnected, killed or late it is. The rest is `Suspicion`, and enough of it makes a relay a
backup.

    honesty      = (verified + 20) / (verified + 20 + 20 · forged) · (found + 20) / (found + 20 + 20 · denied)

    ACTIVE ──score < 0.30──▶ BACKUP ──score ≥ 0.40──▶ ACTIVE
       └──────────┬─────────────┘
        honesty < 0.30, or gone
                  ▼
             BLACKLISTED ──sentence served──▶ BACKUP, its offences forgotten, its strikes not

The first sentence is an hour; each further one is four times as long, seven days at most. By the formula,
three pieces of evidence of one kind, or one of each kind, blacklist a relay that has done nothing else yet.
`strata.relays.pool.reputation` defines *gone*.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "WINDOW_SECONDS",
    "Aspect",
    "Conduct",
    "Evidence",
    "HourCount",
    "Saved",
    "Score",
    "Standing",
    "Suspicion",
]

WINDOW_SECONDS = 7 * 86_400
"""Observations older than this do not count (R-341)."""

_BUCKET_SECONDS = 3600
_TO_BACKUP, _TO_ACTIVE = 0.30, 0.40
_MIN_HONESTY = 0.30
_HOURS_GONE = 24
_FIRST_SENTENCE, _SENTENCE_GROWTH = 3600.0, 4
_HALF_LATENCY = 0.5
_HALF_RATE = 256 * 1024


class Standing(enum.StrEnum):
    """The judgement of a relay by a client or peer that uses it (RFC-0004 §7)."""

    ACTIVE = "active"
    """Preferred."""
    BACKUP = "backup"
    """Slow or unsteady, but used when the active ones fail."""
    BLACKLISTED = "blacklisted"
    """Lying, or gone: not contacted until its sentence is over. A relay that is only silent is a backup."""


class Aspect(enum.StrEnum):
    """The subject of an observation."""

    CONNECT = "connect"
    """Attempts to connect that succeeded or failed, and connections lost."""
    PING = "ping"
    """Pings, and checks that a connected relay did not answer; `value` is the mean round trip in seconds."""
    PUBLISH = "publish"
    """Publishes acknowledged; `value` is the mean round trip in seconds."""
    HISTORY = "history"
    """Packets of history read; `value` is the rate in bytes per second."""
    VALIDITY = "validity"
    """Packets that verified, and packets that the relay has forged (R-342): the id is of other content."""
    FORM = "form"
    """Malformed messages and packets, and packets whose key is not valid (R-342). Causes may be a relay of
    another version, a stranger's packets, or keys that are not all known."""
    CLOCK = "clock"
    """Packets with a time of receipt that cannot be true (R-369). The relay's clock may be wrong."""
    PRESENCE = "presence"
    """Packets sought at a relay that had acknowledged or named them: found, or clearly denied."""
    CONSISTENCY = "consistency"
    """Packets sought that the relay had served, or that are widely held: found, or missing (R-343); an
    operator may have removed them. Also packets that the relay had acknowledged, if its answer is not a clear
    denial."""


Evidence = Literal[Aspect.VALIDITY, Aspect.PRESENCE]
"""Offences that only a lying relay commits: it contradicts a packet's id, or its own statement."""

Suspicion = Literal[
    Aspect.CONNECT, Aspect.PING, Aspect.PUBLISH, Aspect.HISTORY, Aspect.FORM, Aspect.CLOCK, Aspect.CONSISTENCY
]
"""Offences that may also come from an outage, a slow link, a gap or a difference of versions."""

_REACH = (Aspect.CONNECT, Aspect.PING)
_FORGIVEN = (Aspect.VALIDITY, Aspect.FORM, Aspect.CLOCK, Aspect.PRESENCE, Aspect.CONSISTENCY, *_REACH)
"""The observations that are forgotten once a sentence is served."""


@dataclass(frozen=True, slots=True)
class Score:
    """A relay's score and its parts; an optional part is None until something was observed."""

    value: float
    integrity: float
    uptime: float | None
    latency: float | None
    throughput: float | None


@dataclass(frozen=True, slots=True)
class Saved:
    """The part of a relay's record that is kept across processes, in addition to its observations."""

    standing: Standing
    strikes: int
    blacklisted_until: float | None
    last_seen_at: float | None


class HourCount(NamedTuple):
    """The observations of one aspect in one hour, in a form to keep."""

    hour: int
    kind: Aspect
    good: int
    bad: int
    weight: int
    """The number of observations that have a value."""
    total: float
    """The sum of their values."""


@dataclass(slots=True)
class _Count:
    good: int = 0
    bad: int = 0
    weight: int = 0
    total: float = 0.0

    def add(self, good: int, bad: int, weight: int, total: float) -> None:
        self.good += good
        self.bad += bad
        self.weight += weight
        self.total += total

    @property
    def mean(self) -> float | None:
        return self.total / self.weight if self.weight else None


class Conduct:
    """The conduct of one relay. Times are Unix seconds."""

    __slots__ = ("_blacklisted_until", "_counts", "_last_seen_at", "_strikes", "_summed", "standing")

    def __init__(self) -> None:
        self.standing = Standing.ACTIVE
        """The standing as last judged."""
        self._strikes = 0
        self._blacklisted_until: float | None = None
        self._last_seen_at: float | None = None
        self._counts: dict[tuple[int, Aspect], _Count] = {}
        self._summed: tuple[int, dict[Aspect, _Count]] | None = None
        """The last result of `_totals`, and its first hour; None if more has been observed since."""

    def record(self, at: float, kind: Aspect, good: int, bad: int, value: float | None = None) -> None:
        """Record an observation; `judge` acts on it. `value` is the mean of the measurements, over `good`."""
        count = self._counts.setdefault((int(at // _BUCKET_SECONDS), kind), _Count())
        weight = max(good, 1) if value is not None else 0
        count.add(good, bad, weight, weight * (value or 0.0))
        self._summed = None
        if good:
            self._last_seen_at = max(self._last_seen_at or 0.0, at)

    @property
    def saved(self) -> Saved:
        """What to keep in addition to the observations."""
        return Saved(self.standing, self._strikes, self._blacklisted_until, self._last_seen_at)

    @property
    def counts(self) -> list[HourCount]:
        """The observations, by the hour, for `restore`."""
        return [
            HourCount(*key, each.good, each.bad, each.weight, each.total)
            for key, each in self._counts.items()
        ]

    def restore(self, saved: Saved, counts: Iterable[HourCount] = ()) -> None:
        """Restore what an earlier process kept."""
        self.standing, self._strikes = saved.standing, saved.strikes
        self._blacklisted_until, self._last_seen_at = saved.blacklisted_until, saved.last_seen_at
        for hour, kind, good, bad, weight, total in counts:
            self._counts.setdefault((hour, kind), _Count()).add(good, bad, weight, total)
        self._summed = None

    def has_forgiven(self, at: float, kind: Aspect) -> bool:
        """Whether an observation of this time and kind has been forgotten, with a sentence served since."""
        until = self._blacklisted_until
        if until is None or self.standing is Standing.BLACKLISTED:
            return False
        return at < until and kind in _FORGIVEN

    def score(self, now: float) -> Score:
        """The score by the formula of this module's docstring."""
        totals = self._totals(now)
        valid, present = totals[Aspect.VALIDITY], totals[Aspect.PRESENCE]
        common, connects, pings = (
            totals[Aspect.CONSISTENCY],
            totals[Aspect.CONNECT],
            totals[Aspect.PING],
        )
        spoilt = valid.bad + totals[Aspect.FORM].bad + totals[Aspect.CLOCK].bad
        validity = (valid.good + 20) / (valid.good + 20 + 20 * spoilt)
        found = present.good + common.good + 20
        consistency = found / (found + 20 * present.bad + 5 * common.bad)
        good, bad = connects.good + pings.good, connects.bad + pings.bad
        uptime = (good + 2) / (good + bad + 2)
        trips = _Count()
        for kind in (Aspect.PING, Aspect.PUBLISH):
            trips.add(0, 0, totals[kind].weight, totals[kind].total)
        latency, rate = trips.mean, totals[Aspect.HISTORY].mean
        quickness = 0.5 if latency is None else 1 / (1 + max(latency, 0.0) / _HALF_LATENCY)
        capacity = 0.5 if rate is None else rate / (rate + _HALF_RATE)
        integrity = validity * consistency
        value = integrity * uptime * (0.7 * quickness + 0.3 * capacity)
        return Score(value, integrity, good / (good + bad) if good + bad else None, latency, rate)

    def offences(self, now: float) -> int:
        """The number of pieces of evidence against the relay that count now."""
        totals = self._totals(now)
        return totals[Aspect.VALIDITY].bad + totals[Aspect.PRESENCE].bad

    def judge(self, now: float, is_gone: Callable[[], bool] = lambda: False) -> Standing | None:
        """Update the relay's standing; return the new one if it has changed."""
        before = self.standing
        if before is Standing.BLACKLISTED:
            if self._blacklisted_until is not None and now < self._blacklisted_until:
                return None
            self._forgive()
        score = self.score(now)
        if self._honesty(now) < _MIN_HONESTY or is_gone():
            self._strikes += 1
            self._blacklisted_until = now + _sentence(self._strikes)
            self.standing = Standing.BLACKLISTED
        elif self.standing is Standing.ACTIVE and score.value < _TO_BACKUP:
            self.standing = Standing.BACKUP
        elif self.standing is Standing.BACKUP and before is Standing.BACKUP and score.value >= _TO_ACTIVE:
            self.standing = Standing.ACTIVE
        return self.standing if self.standing is not before else None

    def hours_reached(self) -> set[int]:
        """The hours in which the relay was reached."""
        return {hour for (hour, kind), count in self._counts.items() if kind in _REACH and count.good}

    def is_gone(self, reached_elsewhere: Callable[[], set[int]]) -> bool:
        """Whether the relay was never reached, and was unreachable in at least 24 hours in which another
        relay was reached: too long for an outage."""
        hours = {hour for (hour, kind), count in self._counts.items() if kind in _REACH and count.bad}
        if len(hours) < _HOURS_GONE or self.hours_reached():
            return False
        return len(hours & reached_elsewhere()) >= _HOURS_GONE

    def _forgive(self) -> None:
        """Forget offences after a served sentence: the same offences must not lead to another one."""
        for key in [k for k in self._counts if k[1] in _FORGIVEN]:
            del self._counts[key]
        self._summed = None
        self.standing = Standing.BACKUP

    def _honesty(self, now: float) -> float:
        """The honesty, between 0 and 1. Only evidence counts, because a low value leads to a sentence."""
        totals = self._totals(now)
        evidence: dict[Evidence, _Count] = {
            Aspect.VALIDITY: totals[Aspect.VALIDITY],
            Aspect.PRESENCE: totals[Aspect.PRESENCE],
        }
        honesty = 1.0
        for count in evidence.values():
            honesty *= (count.good + 20) / (count.good + 20 + 20 * count.bad)
        return honesty

    def _totals(self, now: float) -> dict[Aspect, _Count]:
        """All that counts now, by aspect; not to be modified. Cached: a pool asks several times a second."""
        oldest = int((now - WINDOW_SECONDS) // _BUCKET_SECONDS)
        if self._summed is not None and self._summed[0] == oldest:
            return self._summed[1]
        totals = {kind: _Count() for kind in Aspect}
        for key, count in list(self._counts.items()):
            if key[0] < oldest:
                del self._counts[key]
            else:
                totals[key[1]].add(count.good, count.bad, count.weight, count.total)
        self._summed = oldest, totals
        return totals


def _sentence(strikes: int) -> float:
    return min(_FIRST_SENTENCE * float(_SENTENCE_GROWTH ** min(strikes - 1, 16)), float(WINDOW_SECONDS))
