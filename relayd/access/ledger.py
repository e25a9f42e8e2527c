"""Accounts that several processes of one machine charge: each reports to the others what was taken there.

A budget is spent on the event loop of one process, and asking another process first would make every request
wait. So each process lets its peers take from its own budgets at once, and reports a moment later what they
took; the others spend that too. A client that opens a socket at each of several processes gets more during
that moment, and pays it back: a budget may be in debt, and over any longer time no more than the limit
passes.

The number of connections that hold an account is reported when it changes, and all numbers are repeated again
and again, a part with each report. So the loss of a report, or the restart of a process, is made up for, and
accounts that a process no longer reports are no longer held there.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

__all__ = ["Account", "Book", "Books", "Ledger", "Share"]

_MOST_AT_ONCE: Final = 200
_LONGEST_KEY: Final = 200
"""A message is one datagram; accounts with longer names are not shared between processes."""


class Account(Protocol):
    """The accounts of one kind, by key."""

    def hear(self, key: str, kind: str, units: float, now: float) -> None:
        """Another process has taken this many units."""

    def holders(self) -> Iterable[tuple[str, int]]:
        """Each account that open connections hold, with the number of connections."""

    def count(self, key: str) -> int:
        """The number of open connections that hold this account."""


class Share(Protocol):
    """The part that one kind of accounts has in a book."""

    def taker(self, key: str, kind: str) -> Callable[[float], None]:
        """Return a function to call with the units taken from a budget."""

    def holds(self, key: str, count: int) -> None:
        """This many connections of this process hold an account now."""

    def elsewhere(self, key: str) -> int:
        """The number of connections that hold the account at other processes."""


class Book(Protocol):
    """The book in which a process records, for others, what is charged to its accounts."""

    def share(self, name: str, accounts: Account) -> Share | None:
        """Join with these accounts, which have this name in every process; None if the book takes others."""


class Books:
    """Several books in which the same accounts are kept."""

    def __init__(self, *books: Book) -> None:
        self._books = books

    def share(self, name: str, accounts: Account) -> Share | None:
        """Join each book that is for these accounts."""
        shares = [share for book in self._books if (share := book.share(name, accounts)) is not None]
        return _Shares(shares) if len(shares) > 1 else shares[0] if shares else None


class _Shares:
    __slots__ = ("_shares",)

    def __init__(self, shares: Iterable[Share]) -> None:
        self._shares = tuple(shares)

    def taker(self, key: str, kind: str) -> Callable[[float], None]:
        takers = [share.taker(key, kind) for share in self._shares]

        def took(units: float) -> None:
            for taker in takers:
                taker(units)

        return took

    def holds(self, key: str, count: int) -> None:
        for share in self._shares:
            share.holds(key, count)

    def elsewhere(self, key: str) -> int:
        return sum(share.elsewhere(key) for share in self._shares)


class _Said(msgspec.Struct, array_like=True):
    process: int
    round: int
    """Incremented when all connections have been reported and are reported again; 0 when a process begins."""
    spent: list[tuple[str, str, str, float]] = []
    """Each an account kind, a key, a kind of budget and units."""
    held: list[tuple[str, str, int]] = []
    """Each an account kind, a key, and the number of connections that hold it now."""


_DECODER: Final = msgspec.msgpack.Decoder(_Said)
_Holder = tuple[str, str]


class _Other:
    """What is known of another process: the accounts held there, and when each was last reported."""

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.round = 0
        self.held: dict[_Holder, tuple[int, int]] = {}


class Ledger:
    """What this process must report, and what it has heard. `process` is its number among the processes."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._accounts: dict[str, Account] = {}
        self._spent: dict[tuple[str, str, str], float] = {}
        self._held: dict[_Holder, int] = {}
        self._round = 1
        self._unsaid: list[_Holder] = []
        """The accounts still to be reported in this round."""
        self._others: dict[int, _Other] = {}

    def share(self, name: str, accounts: Account) -> Share:
        """Join with these accounts, which have this name in every process."""
        self._accounts[name] = accounts
        return _Share(self, name)

    def took(self, name: str, key: str, kind: str, units: float) -> None:
        """A peer of this process has taken this many units."""
        what = name, key, kind
        self._spent[what] = self._spent.get(what, 0.0) + units

    def holds(self, name: str, key: str, count: int) -> None:
        """This many connections of this process hold an account now."""
        self._held[name, key] = count

    def elsewhere(self, name: str, key: str) -> int:
        """The number of connections that hold this account at other processes."""
        who = name, key
        return sum(other.held.get(who, (0, 0))[0] for other in self._others.values())

    def begin(self) -> bytes:
        """The first message of a process: what was heard before came from its predecessor, and is dropped."""
        return msgspec.msgpack.encode(_Said(self._process, 0))

    def report(self) -> list[bytes]:
        """The messages with all news since the last report, and with the next part of the rest."""
        if not self._unsaid:
            self._round += 1
            self._unsaid = [
                (name, key) for name, accounts in self._accounts.items() for key, _ in accounts.holders()
            ]
        again, self._unsaid = self._unsaid[:_MOST_AT_ONCE], self._unsaid[_MOST_AT_ONCE:]
        spent = [(*what, units) for what, units in self._spent.items() if len(what[1]) <= _LONGEST_KEY]
        news = {who: count for who, count in self._held.items() if len(who[1]) <= _LONGEST_KEY}
        for name, key in again:
            if len(key) <= _LONGEST_KEY:
                news[name, key] = self._accounts[name].count(key)
        self._spent, self._held = {}, {}
        held = [(*who, count) for who, count in news.items()]
        parts = range(0, max(len(spent), len(held), 1), _MOST_AT_ONCE)
        return [
            msgspec.msgpack.encode(
                _Said(
                    self._process,
                    self._round,
                    spent[first : first + _MOST_AT_ONCE],
                    held[first : first + _MOST_AT_ONCE],
                )
            )
            for first in parts
        ]

    def hear(self, message: bytes, now: float) -> None:
        """Take in a message of another process.

        Raises `msgspec.MsgspecError` if it cannot come from a process of this release.
        """
        said = _DECODER.decode(message)
        if not said.round:
            self._others.pop(said.process, None)
        other = self._others.setdefault(said.process, _Other(now))
        other.heard_at = now
        if said.round > other.round:
            # An account that was not reported in a whole round is no longer held there.
            other.held = {who: (count, at) for who, (count, at) in other.held.items() if at >= other.round}
            other.round = said.round
        for name, key, kind, units in said.spent:
            if (accounts := self._accounts.get(name)) is not None:
                accounts.hear(key, kind, units, now)
        for name, key, count in said.held:
            if count:
                other.held[name, key] = count, said.round
            else:
                other.held.pop((name, key), None)

    def look(self, now: float, patience: float) -> None:
        """Forget processes that were silent for `patience` seconds: they have ended. Their spending
        still counts."""
        for process, other in list(self._others.items()):
            if now - other.heard_at > patience:
                del self._others[process]


class _Share:
    __slots__ = ("_ledger", "_name")

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._name = name

    def taker(self, key: str, kind: str) -> Callable[[float], None]:
        return functools.partial(self._ledger.took, self._name, key, kind)

    def holds(self, key: str, count: int) -> None:
        self._ledger.holds(self._name, key, count)

    def elsewhere(self, key: str) -> int:
        return self._ledger.elsewhere(self._name, key)
