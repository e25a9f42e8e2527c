"""Accounts that several processes of one machine charge: each tells the others what it has taken.

A budget is spent on the event loop of one process, and asking another one first would make every request
wait. So each process lets its peers take from its own budgets at once, and says a moment later what they
took; the others spend that too. Whoever opens a socket at each of several processes gets more for that
moment, and pays it back: a budget may be in debt, and over any longer time no more than the limit passes.

How many connections hold an account is said when it changes, and all of it again and again, a part with each
report. So a report that is lost, or a process that begins anew, is made up for, and what a process no longer
says it no longer has.
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
"""A message is one datagram; an account of a longer name is each process's own."""


class Account(Protocol):
    """The accounts of one kind, by key."""

    def hear(self, key: str, kind: str, units: float, now: float) -> None:
        """Another process has taken so much."""

    def holders(self) -> Iterable[tuple[str, int]]:
        """Each account that open connections hold, and how many."""

    def count(self, key: str) -> int:
        """How many open connections hold this account."""


class Share(Protocol):
    """The part that one kind of accounts has in a book."""

    def taker(self, key: str, kind: str) -> Callable[[float], None]:
        """To be called with what is taken from a budget."""

    def holds(self, key: str, count: int) -> None:
        """So many connections of this process hold an account now."""

    def elsewhere(self, key: str) -> int:
        """How many connections hold it at other processes."""


class Book(Protocol):
    """Where a process writes down what is charged to its accounts, for others."""

    def share(self, name: str, accounts: Account) -> Share | None:
        """Take part for these accounts, which have this name in every process; None where others do."""


class Books:
    """Several books in which the same accounts are kept."""

    def __init__(self, *books: Book) -> None:
        self._books = books

    def share(self, name: str, accounts: Account) -> Share | None:
        """Take part in each book that is for these accounts."""
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
    """Rises when all connections have been said, and are said again; 0 where a process begins."""
    spent: list[tuple[str, str, str, float]] = []
    """Accounts, key, kind, units."""
    held: list[tuple[str, str, int]] = []
    """Accounts, key, and how many connections hold it now."""


_DECODER: Final = msgspec.msgpack.Decoder(_Said)
_Holder = tuple[str, str]


class _Other:
    """What is known of another process: who has connections there, and in which round that was said."""

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.round = 0
        self.held: dict[_Holder, tuple[int, int]] = {}


class Ledger:
    """What this process has to say, and what it has heard. `process` is its number among its like."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._accounts: dict[str, Account] = {}
        self._spent: dict[tuple[str, str, str], float] = {}
        self._held: dict[_Holder, int] = {}
        self._round = 1
        self._unsaid: list[_Holder] = []
        """Who is still to be said in this round."""
        self._others: dict[int, _Other] = {}

    def share(self, name: str, accounts: Account) -> Share:
        """Take part for these accounts, which have this name in every process."""
        self._accounts[name] = accounts
        return _Share(self, name)

    def took(self, name: str, key: str, kind: str, units: float) -> None:
        """A peer of this process has taken so much."""
        what = name, key, kind
        self._spent[what] = self._spent.get(what, 0.0) + units

    def holds(self, name: str, key: str, count: int) -> None:
        """So many connections of this process hold an account now."""
        self._held[name, key] = count

    def elsewhere(self, name: str, key: str) -> int:
        """How many connections hold this account at other processes."""
        who = name, key
        return sum(other.held.get(who, (0, 0))[0] for other in self._others.values())

    def begin(self) -> bytes:
        """What a process says first: whatever was heard of it is of the one before."""
        return msgspec.msgpack.encode(_Said(self._process, 0))

    def report(self) -> list[bytes]:
        """What is new since the last report, and the next part of the rest."""
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
        """Take in what another process says.

        Raises `msgspec.MsgspecError` for what no process of this release has said.
        """
        said = _DECODER.decode(message)
        if not said.round:
            self._others.pop(said.process, None)
        other = self._others.setdefault(said.process, _Other(now))
        other.heard_at = now
        if said.round > other.round:
            # Whoever was not said in a whole round is not there any more.
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
        """Forget processes that were silent for so long: they have ended. What they spent stays spent."""
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
