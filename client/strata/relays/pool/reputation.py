"""A client's scores of relays, from its own observations (R-340…R-344): no I/O, no clock.

Everything counted is an `Observation`. They are kept in buckets of an hour, and those of the last seven days
make the score:

    score        = integrity · uptime · (0.7 · quickness + 0.3 · capacity)          in [0, 1]
    integrity    = validity · consistency
    validity     = (good + 20) / (good + 20 + 20 · bad)      packets verified, packets forged or malformed
    consistency  = (found + 20) / (found + 20 + 20 · denied + 5 · missing)
    uptime       = (good + 2) / (good + bad + 2)             connections and pings
    quickness    = 1 / (1 + mean round trip / 0.5 s)         unknown: 0.5
    capacity     = rate / (rate + 256 KiB/s)                 unknown: 0.5

*Denied* is a packet the relay itself had acknowledged or served, *missing* one that several others serve. One
denial of an unknown relay halves its score; a relay with a thousand good answers has more credit. A correctly
annotated downgrade is no offence (R-342): it is not reported here as bad.

Everything seen lowers the score, but only `Evidence` blacklists at once: what no honest relay brings about,
however slow, cut off, killed or late it is. The rest is `Suspicion`, and enough of it makes a backup. A relay
is *gone* when it could not be reached in 24 different hours of the window in which another relay could, and
was reached in none.

    honesty      = (verified + 20) / (verified + 20 + 20 · forged) · (found + 20) / (found + 20 + 20 · denied)

    ACTIVE ──score < 0.30──▶ BACKUP ──score ≥ 0.40──▶ ACTIVE
       └──────────┬─────────────┘
        honesty < 0.30, or gone
                  ▼
             BLACKLISTED ──sentence served──▶ BACKUP, its offences forgotten, its strikes not

The first sentence is an hour, each further one four times the last, seven days at most.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from strata.relays.pool.values import Standing

__all__ = [
    "WINDOW_SECONDS",
    "Aspect",
    "Evidence",
    "Observation",
    "Reputation",
    "Saved",
    "Score",
    "Suspicion",
]

WINDOW_SECONDS = 7 * 86_400
"""Older observations do not count (R-341)."""

_BUCKET_SECONDS = 3600
_TO_BACKUP, _TO_ACTIVE = 0.30, 0.40
_MIN_HONESTY = 0.30
_HOURS_GONE = 24
_FIRST_SENTENCE, _SENTENCE_GROWTH = 3600.0, 4
_HALF_LATENCY = 0.5
_HALF_RATE = 256 * 1024


class Aspect(enum.StrEnum):
    """What an observation is about."""

    CONNECT = "connect"
    """Attempts to connect that succeeded or failed, and connections lost."""
    PING = "ping"
    """Signs of life asked for; `value` is the mean round trip in seconds."""
    PUBLISH = "publish"
    """Publishes acknowledged; `value` is the mean round trip in seconds."""
    HISTORY = "history"
    """Packets of history read; `value` is bytes a second."""
    VALIDITY = "validity"
    """Packets that verified, and packets that the relay has forged (R-342): the id fails, or the signature by
    keys that the relay itself has told in full."""
    FORM = "form"
    """Malformed messages and packets, and packets whose key does not hold (R-342). A relay of another
    version, a stranger's packets, or keys not known in full may bring them about."""
    PRESENCE = "presence"
    """Packets looked for at a relay that had acknowledged or served them: found, or clearly denied."""
    CONSISTENCY = "consistency"
    """Packets looked for that several others serve: found, or missing (R-343). Also packets that a relay had
    acknowledged or served and does not name, where its answer is no clear denial."""


Evidence = Literal[Aspect.VALIDITY, Aspect.PRESENCE]
"""What is bad here, only a relay that lies brings about: it contradicts a signature, or its own word."""

Suspicion = Literal[
    Aspect.CONNECT, Aspect.PING, Aspect.PUBLISH, Aspect.HISTORY, Aspect.FORM, Aspect.CONSISTENCY
]
"""What is bad here, an outage, a slow link, a gap or a difference of versions may bring about too."""

_REACH = (Aspect.CONNECT, Aspect.PING)
_INTEGRITY_KINDS = (Aspect.VALIDITY, Aspect.FORM, Aspect.PRESENCE, Aspect.CONSISTENCY)


@dataclass(frozen=True, slots=True)
class Observation:
    """Something seen of one relay; several alike may be one observation."""

    url: str
    at: float
    """Unix seconds."""
    kind: Aspect
    good: int = 0
    bad: int = 0
    value: float | None = None
    """The mean of the measurements, over the `good` ones."""


@dataclass(frozen=True, slots=True)
class Score:
    """A relay's score and its parts; a part is None until something was observed."""

    value: float
    integrity: float
    uptime: float | None
    latency: float | None
    throughput: float | None


@dataclass(frozen=True, slots=True)
class Saved:
    """The part of a relay's record that outlives the process, beside its observations."""

    standing: Standing
    strikes: int
    blacklisted_until: float | None
    last_seen_at: float | None


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


@dataclass(slots=True)
class _Record:
    standing: Standing = Standing.ACTIVE
    strikes: int = 0
    blacklisted_until: float | None = None
    last_seen_at: float | None = None
    buckets: dict[tuple[int, Aspect], _Count] = field(default_factory=dict)


class Reputation:
    """The scores of all relays that one client knows; no other client sees them (R-340)."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def record(self, observation: Observation) -> None:
        """Take note; `judge` draws the conclusions."""
        record = self._records.setdefault(observation.url, _Record())
        bucket = int(observation.at // _BUCKET_SECONDS)
        count = record.buckets.setdefault((bucket, observation.kind), _Count())
        weight = max(observation.good, 1) if observation.value is not None else 0
        count.add(observation.good, observation.bad, weight, weight * (observation.value or 0.0))
        if observation.good:
            record.last_seen_at = max(record.last_seen_at or 0.0, observation.at)

    def restore(self, url: str, saved: Saved) -> None:
        """Go on from what an earlier process kept. Its observations are given to `record` as well."""
        record = self._records.setdefault(url, _Record())
        record.standing, record.strikes = saved.standing, saved.strikes
        record.blacklisted_until, record.last_seen_at = saved.blacklisted_until, saved.last_seen_at

    def saved(self, url: str) -> Saved:
        """What to keep of a relay."""
        record = self._records.get(url, _Record())
        return Saved(record.standing, record.strikes, record.blacklisted_until, record.last_seen_at)

    def forget(self, url: str) -> None:
        """Drop everything known about a relay."""
        self._records.pop(url, None)

    def standing(self, url: str) -> Standing:
        """What was last judged."""
        record = self._records.get(url)
        return Standing.ACTIVE if record is None else record.standing

    def score(self, url: str, now: float) -> Score:
        """The score by the formula above."""
        totals = self._totals(url, now)
        valid, present = totals[Aspect.VALIDITY], totals[Aspect.PRESENCE]
        common, connects, pings = (
            totals[Aspect.CONSISTENCY],
            totals[Aspect.CONNECT],
            totals[Aspect.PING],
        )
        validity = (valid.good + 20) / (valid.good + 20 + 20 * (valid.bad + totals[Aspect.FORM].bad))
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

    def judge(self, url: str, now: float) -> Standing | None:
        """Move the relay to the standing it has earned; returns it if that is another than before."""
        record = self._records.setdefault(url, _Record())
        before = record.standing
        if before is Standing.BLACKLISTED:
            if record.blacklisted_until is not None and now < record.blacklisted_until:
                return None
            self._forgive(record)
        score = self.score(url, now)
        if _honesty(self._evidence(url, now)) < _MIN_HONESTY or self._is_gone(url):
            record.strikes += 1
            record.blacklisted_until = now + _sentence(record.strikes)
            record.standing = Standing.BLACKLISTED
        elif record.standing is Standing.ACTIVE and score.value < _TO_BACKUP:
            record.standing = Standing.BACKUP
        elif record.standing is Standing.BACKUP and before is Standing.BACKUP and score.value >= _TO_ACTIVE:
            record.standing = Standing.ACTIVE
        return record.standing if record.standing is not before else None

    def _forgive(self, record: _Record) -> None:
        """A sentence served: the same offences must not lead to another one."""
        for key in [k for k in record.buckets if k[1] in (*_INTEGRITY_KINDS, *_REACH)]:
            del record.buckets[key]
        record.standing = Standing.BACKUP

    def _is_gone(self, url: str) -> bool:
        """Whether only this relay was out of reach, not this client, and for too long for an outage."""
        mine = self._records[url].buckets
        hours = {hour for (hour, kind), count in mine.items() if kind in _REACH and count.bad}
        if len(hours) < _HOURS_GONE or any(mine[key].good for key in mine if key[1] in _REACH):
            return False
        others = [record.buckets for other, record in self._records.items() if other != url]
        reached = {
            hour
            for buckets in others
            for (hour, kind), count in buckets.items()
            if kind in _REACH and count.good
        }
        return len(hours & reached) >= _HOURS_GONE

    def _evidence(self, url: str, now: float) -> dict[Evidence, _Count]:
        totals = self._totals(url, now)
        return {Aspect.VALIDITY: totals[Aspect.VALIDITY], Aspect.PRESENCE: totals[Aspect.PRESENCE]}

    def _totals(self, url: str, now: float) -> dict[Aspect, _Count]:
        totals = {kind: _Count() for kind in Aspect}
        record = self._records.get(url)
        if record is None:
            return totals
        oldest = int((now - WINDOW_SECONDS) // _BUCKET_SECONDS)
        for key, count in list(record.buckets.items()):
            if key[0] < oldest:
                del record.buckets[key]
            else:
                totals[key[1]].add(count.good, count.bad, count.weight, count.total)
        return totals


def _honesty(evidence: Mapping[Evidence, _Count]) -> float:
    """Between 0 and 1. Nothing but evidence goes in, for a low value is a sentence."""
    valid, present = evidence[Aspect.VALIDITY], evidence[Aspect.PRESENCE]
    validity = (valid.good + 20) / (valid.good + 20 + 20 * valid.bad)
    return validity * (present.good + 20) / (present.good + 20 + 20 * present.bad)


def _sentence(strikes: int) -> float:
    return min(_FIRST_SENTENCE * float(_SENTENCE_GROWTH ** min(strikes - 1, 16)), float(WINDOW_SECONDS))
