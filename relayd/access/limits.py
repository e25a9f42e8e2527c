"""How much an identity or an address may ask for, without I/O or clock (RFC-0004 §6.1, §8).

A `Budget` holds `limit` units and refills evenly, `limit` units in every window; a full budget can be spent
at once. It is kept as one number, the time at which it will be full again, so taking a unit is one addition
and one comparison (the generic cell rate algorithm).

A `Quota` is every budget of one holder: an authenticated identity, an address, a network of addresses. All
sockets of a holder share the same object, which lives on one event loop, where nothing happens between
looking and taking: however many frames arrive together, no more than the limit pass. Each of several workers
has its own object, and hears from the others what was taken there (`ledger`). A quota may have a `parent`,
which is charged too.

A `Purse` is what one request is charged to: one budget of each quota that pays for it, either all or none.

`Quotas` keeps them. A quota that a connection holds is never dropped. An idle quota is kept until it is full,
because a full quota is like a new one. Beyond `max_idle`, the quota idle for longest is dropped, so that an
attacker with many addresses costs bounded memory, and gains no more than the budgets of those addresses.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from relayd.access.ledger import Book, Share

__all__ = ["Budget", "Excess", "Limits", "Purse", "Quota", "Quotas", "SessionLimits", "purse"]

_TOLERANCE: Final = 1e-6
"""The rounding error, in seconds, by which sums of fractions may miss the end of the window."""

_FADING: Final = 0.9
"""The factor by which the expected time of a step decays with each shorter step."""
_FORGOTTEN_AT_ONCE: Final = 16
"""The idle quotas that are forgotten when one becomes idle: those that a crowd has left are full together."""
_SHARE_WINDOW: Final = 10
"""The window of shares, in seconds: at a share of a tenth, a whole second of work may be done at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one holder in each window of `window_seconds`; 0 sets no limit."""

    publishes: int = 0
    subscribes: int = 0
    backfill_bytes: int = 0
    auths: int = 0
    connects: int = 0
    loop_share: float = 0.0
    """The part of the event loop's time."""
    read_share: float = 0.0
    """The part of the time of one connection to the database."""
    window_seconds: int = 60

    def times(self, factor: int) -> Limits:
        """The limits of this many holders together."""
        return Limits(
            publishes=factor * self.publishes,
            subscribes=factor * self.subscribes,
            backfill_bytes=factor * self.backfill_bytes,
            auths=factor * self.auths,
            connects=factor * self.connects,
            loop_share=factor * self.loop_share,
            read_share=factor * self.read_share,
            window_seconds=self.window_seconds,
        )


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Excess:
    """A request over a limit, in the fields of `ERROR rate_limited` (R-314, R-315)."""

    limit: int
    window_seconds: int
    retry_after: int
    remaining: int = 0


class Budget:
    """Units that are spent and come back; all times are monotonic seconds."""

    __slots__ = ("_full_at", "_interval", "_limit", "_promised_at", "_window")

    def __init__(self, limit: float, window_seconds: float) -> None:
        self._limit = limit
        self._window = float(window_seconds)
        self._interval = window_seconds / limit
        self._full_at = 0.0
        self._promised_at = 0.0

    def take(self, now: float) -> bool:
        """Spend one unit, if there is one."""
        full_at = (self._full_at if self._full_at > now else now) + self._interval
        if full_at - now > self._window + _TOLERANCE:
            return False
        self._full_at = full_at
        return True

    def has_unit(self, now: float) -> bool:
        """Whether `take` would find a unit."""
        return max(self._full_at, now) + self._interval - now <= self._window + _TOLERANCE

    def spend(self, units: float, now: float) -> None:
        """Charge units that are already used; the budget may end in debt."""
        self._full_at = max(self._full_at, now) + units * self._interval

    def debt_seconds(self, now: float) -> float:
        """How long until nothing is owed, in seconds to the millisecond; 0 or less if nothing is owed now."""
        return math.ceil((self._full_at - now - self._window) * 1000) / 1000

    def is_full(self, now: float) -> bool:
        """Whether all units are available."""
        return self._full_at <= now

    def full_at(self, now: float, units: float = 0.0) -> float:
        """When all units would be available, if this many were spent now."""
        return max(self._full_at, now) + units * self._interval

    def excess(self, now: float) -> Excess:
        """The answer to a request that is refused now.

        Requests refused one after the other are sent back at successive times, each when its own unit has
        come back: a request repeated then is not refused for the same window (R-319), and many clients do
        not return in step. No wait is longer than the time in which the whole budget refills.
        """
        own_at = max(self._full_at + self._interval - self._window, now)
        due_at = max(own_at, self._promised_at + self._interval) if self._promised_at > now else own_at
        due_at = min(due_at, max(now + self._window, own_at))
        self._promised_at = due_at
        seconds = math.ceil(due_at - now - _TOLERANCE)
        return Excess(int(self._limit), int(self._window), max(1, seconds))


class _SharedBudget(Budget):
    """A budget that other processes have too, and that reports to them what was taken from it."""

    __slots__ = ("_taken",)

    def __init__(self, limit: float, window_seconds: float, taken: Callable[[float], None]) -> None:
        super().__init__(limit, window_seconds)
        self._taken = taken

    def take(self, now: float) -> bool:
        if not super().take(now):
            return False
        self._taken(1.0)
        return True

    def spend(self, units: float, now: float) -> None:
        super().spend(units, now)
        self._taken(units)

    def hear(self, units: float, now: float) -> None:
        """This many units were taken in another process."""
        super().spend(units, now)


class Purse:
    """The budgets that pay for one kind of request together."""

    __slots__ = ("_budgets",)

    def __init__(self, budgets: tuple[Budget, ...]) -> None:
        self._budgets = budgets

    def take(self, now: float) -> bool:
        """Spend one unit of each budget, if each has one; otherwise spend nothing."""
        for budget in self._budgets:
            if not budget.has_unit(now):
                return False
        for budget in self._budgets:
            budget.take(now)
        return True

    def spend(self, units: float, now: float) -> None:
        """Charge each budget with units that are already used."""
        for budget in self._budgets:
            budget.spend(units, now)

    def debt_seconds(self, now: float) -> float:
        """How long until no budget owes anything, in seconds; 0 or less if none does now."""
        return max(budget.debt_seconds(now) for budget in self._budgets)

    def excess(self, now: float) -> Excess:
        """The answer to a request that is refused now, by the first budget that refuses."""
        refusing = [budget for budget in self._budgets if not budget.has_unit(now)]
        return (refusing or self._budgets)[0].excess(now)


class Quota:
    """The budgets of one holder; a budget without limit is None. `holders` counts the open connections.

    As a `Payer` of the store it takes its turn among the other quotas.
    """

    __slots__ = (
        "_limits",
        "_share",
        "auth",
        "backfill",
        "chains",
        "connect",
        "holders",
        "key",
        "knock",
        "loop",
        "parent",
        "publish",
        "read",
        "subscribe",
        "usual",
    )

    def __init__(self, key: str, limits: Limits = NO_LIMITS, share: Share | None = None) -> None:
        self.key = key
        self._share = share
        self.holders = 0
        self.parent: Quota | None = None
        """The holder that contains this one, and is charged for all that this one does."""
        self._limits = limits
        self.publish = self._budget("publish", limits.publishes)
        self.subscribe = self._budget("subscribe", limits.subscribes)
        self.backfill = self._budget("backfill", limits.backfill_bytes)
        self.auth = self._budget("auth", limits.auths)
        self.connect = self._budget("connect", limits.connects)
        self.knock = self._budget("knock", limits.connects)
        """Connections beyond `connect` that are still told why they are refused."""
        self.loop = self._part(limits.loop_share)
        self.read = self._part(limits.read_share)
        self.chains = 0
        """The requests over HTTP under way that may have a chain of keys read."""
        self.usual = 0.0
        """The time that the next step for this holder is expected to take on the loop, in seconds."""

    @property
    def line(self) -> tuple[Quota, ...]:
        """This quota, its parent, and so on up."""
        return (self,) if self.parent is None else (self, *self.parent.line)

    def used_database(self, seconds: float, now: float) -> None:
        """A connection to the database worked this long for this holder."""
        for quota in self.line:
            if quota.read is not None:
                quota.read.spend(seconds, now)

    def used_loop(self, seconds: float, now: float) -> float:
        """The event loop worked this long for this holder. Returns how long until nothing is owed."""
        self.usual = max(seconds, _FADING * self.usual)
        owed, quota = 0.0, self
        while True:
            if quota.loop is not None:
                quota.loop.spend(seconds, now)
                owed = max(owed, quota.loop.debt_seconds(now))
            if quota.parent is None:
                return owed
            quota = quota.parent

    def turn(self, now: float) -> float:
        """The place of this holder's work among that of others; the lowest is first.

        The place is the time when all that the holder has used of the loop, with its next step, will have
        come back. So nobody is put off for longer than that takes.
        """
        budgets = (quota.loop for quota in self.line)
        return max([now, *(each.full_at(now, self.usual) for each in budgets if each is not None)])

    def is_full(self, now: float) -> bool:
        """Whether every budget is full, so that the quota can be forgotten."""
        budgets = (
            self.publish,
            self.subscribe,
            self.backfill,
            self.auth,
            self.connect,
            self.knock,
            self.loop,
            self.read,
        )
        return all(budget is None or budget.is_full(now) for budget in budgets)

    def hear(self, kind: str, units: float, now: float) -> None:
        """This many units were taken from this holder's budget in another process."""
        budget = getattr(self, kind, None)
        if isinstance(budget, _SharedBudget):
            budget.hear(units, now)

    def _budget(self, kind: str, limit: int) -> Budget | None:
        if not limit:
            return None
        window = self._limits.window_seconds
        if self._share is None:
            return Budget(limit, window)
        return _SharedBudget(limit, window, self._share.taker(self.key, kind))

    @staticmethod
    def _part(share: float) -> Budget | None:
        """A budget of this process's own time, which no other process shares."""
        return Budget(share * _SHARE_WINDOW, _SHARE_WINDOW) if share else None


def purse(kind: str, quotas: Iterable[Quota]) -> Budget | Purse | None:
    """The budgets of this name that requests are charged to; None if no quota sets a limit."""
    found = tuple(budget for quota in quotas if (budget := getattr(quota, kind)) is not None)
    return Purse(found) if len(found) > 1 else found[0] if found else None


class Quotas:
    """The quotas of one kind of holder, by key. At most `max_idle` quotas held by no connection are kept.

    With a `book`, other processes charge the same holders, and know these quotas by the same `name`.
    """

    def __init__(
        self, limits: Limits, *, max_idle: int = 20_000, book: Book | None = None, name: str = ""
    ) -> None:
        self._limits = limits
        self._share = None if book is None else book.share(name, self)
        self._max_idle = max_idle
        self._held: dict[str, Quota] = {}
        self._idle: OrderedDict[str, Quota] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held) + len(self._idle)

    def hold(self, key: str) -> Quota:
        """The quota of this holder, for one more connection; `release` gives it back."""
        quota = self._held.get(key)
        if quota is None:
            quota = self._idle.pop(key, None) or Quota(key, self._limits, self._share)
            self._held[key] = quota
        quota.holders += 1
        if self._share is not None:
            self._share.holds(key, quota.holders)
        return quota

    def holders(self) -> Iterable[tuple[str, int]]:
        """Each holder with connections here, and their number."""
        return [(key, quota.holders) for key, quota in self._held.items()]

    def count(self, key: str) -> int:
        """The number of connections that this holder has here."""
        quota = self._held.get(key)
        return 0 if quota is None else quota.holders

    def everywhere(self, quota: Quota) -> int:
        """The number of connections that hold this quota, here and at other processes."""
        return quota.holders + (0 if self._share is None else self._share.elsewhere(quota.key))

    def hear(self, key: str, kind: str, units: float, now: float) -> None:
        """Another process let this holder take this many units."""
        quota = self._held.get(key) or self._idle.get(key)
        if quota is None:
            quota = self._idle[key] = Quota(key, self._limits, self._share)
        quota.hear(kind, units, now)
        self._forget_idle(now)

    def holds(self, quota: Quota) -> bool:
        """Whether this quota was given by `hold` and not yet fully released by `release`."""
        return self._held.get(quota.key) is quota

    def release(self, quota: Quota, now: float) -> None:
        """Give back the quota of a connection that has ended."""
        quota.holders -= 1
        if self._share is not None:
            self._share.holds(quota.key, quota.holders)
        if quota.holders:
            return
        del self._held[quota.key]
        if not quota.is_full(now):
            self._idle[quota.key] = quota
        self._forget_idle(now)

    def _forget_idle(self, now: float) -> None:
        idle = self._idle
        for _ in range(_FORGOTTEN_AT_ONCE):
            if not idle or (len(idle) <= self._max_idle and not next(iter(idle.values())).is_full(now)):
                return
            idle.popitem(last=False)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of one session; the names are those of the settings."""

    default_limit: int = 100
    max_limit: int = 500
    max_subscriptions: int = 64
    max_filter_values: int = 1000
    max_filter_bytes: int = 2 * 2**20
    malformed_limit: int = 20
    malformed_window: float = 60.0
    peers: Mapping[str, int] = field(default_factory=dict)
    """The numbers of the relays that this relay has read from, by DID: the relays that `not_via` may name."""
