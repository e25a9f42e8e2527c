"""Accounts of identities that relays on several machines charge: each reports to the others what it let pass.

The rules are those of workers (`ledger`): each process takes at once, reports a moment later what was taken,
and charges what others report to the same budgets, which may go into debt. Two things differ. Only what was
taken is reported, and only for identities: an address means little behind different balancers, and
connections are counted by the machine that has them. And a report travels over a bus on which others may be.
It is sealed there with the log's secret, and counts here only once and while it is recent, so that replaying
it takes nothing from anybody.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import islice
from typing import Final

import msgspec

from relayd.access.ledger import Account, Share

__all__ = ["Machines"]

_SHARED: Final = frozenset({"identity", "restricted"})
_MOST_AT_ONCE: Final = 200
"""The number of entries in one message, about 20 KB."""
_MOST_MESSAGES: Final = 10
"""The number of messages in one report; the rest follows with the next report."""
_MOST_KEPT: Final = 20_000
_LONGEST_KEY: Final = 200
_YOUNG_SECONDS: Final = 60.0
"""The most by which a message's time may differ, for the clocks of two machines and the way between them."""
_TICK: Final = 0.0001


class _Said(msgspec.Struct, array_like=True):
    machine: bytes
    process: bytes
    at: float
    """Unix seconds, increasing with each message of a process."""
    spent: list[tuple[str, str, str, float]]
    """Each an account kind, a key, a kind of budget and units."""


_DECODER: Final = msgspec.msgpack.Decoder(_Said)


class Machines:
    """What this process must report to processes of other machines, and what it hears from them.

    `machine` is the same for all processes that share a ledger; `process` is unique.
    """

    def __init__(self, machine: bytes, process: bytes) -> None:
        self._machine = machine
        self._process = process
        self._accounts: dict[str, Account] = {}
        self._spent: dict[tuple[str, str, str], float] = {}
        self._said_at = 0.0
        self._heard: dict[bytes, float] = {}
        """The time in the latest message that was heard from each process."""

    def share(self, name: str, accounts: Account) -> Share | None:
        """Join with these accounts, if they are those of identities."""
        if name not in _SHARED:
            return None
        self._accounts[name] = accounts
        return _Taken(self, name)

    def took(self, name: str, key: str, kind: str, units: float) -> None:
        """A peer of this process has taken this many units."""
        what = name, key, kind
        if what in self._spent or (len(self._spent) < _MOST_KEPT and len(key) <= _LONGEST_KEY):
            self._spent[what] = self._spent.get(what, 0.0) + units

    def report(self, wall: float) -> list[bytes]:
        """The messages with what was taken up to this Unix time; the rest follows with the next report."""
        # A process that was silent for this long may be forgotten: none of its past messages is still recent.
        self._heard = {who: at for who, at in self._heard.items() if abs(wall - at) < 2 * _YOUNG_SECONDS}
        messages: list[bytes] = []
        while self._spent and len(messages) < _MOST_MESSAGES:
            some = list(islice(self._spent, _MOST_AT_ONCE))
            # Messages of the same moment get distinct times, which start anew after a clock was set back far.
            later = self._said_at + _TICK
            self._said_at = later if wall < later < wall + _YOUNG_SECONDS else wall
            spent = [(*what, self._spent.pop(what)) for what in some]
            said = _Said(self._machine, self._process, self._said_at, spent)
            messages.append(msgspec.msgpack.encode(said))
        return messages

    def hear(self, message: bytes, wall: float, now: float) -> bool:
        """Take in a message of another process at this Unix time; False if it is old or was heard before.

        Raises `msgspec.MsgspecError` if it cannot come from a process of this release.
        """
        said = _DECODER.decode(message)
        if said.machine == self._machine:
            return True  # the ledger reports it already
        if abs(wall - said.at) > _YOUNG_SECONDS or said.at <= self._heard.get(said.process, 0.0):
            return False
        self._heard[said.process] = said.at
        for name, key, kind, units in said.spent:
            if (accounts := self._accounts.get(name)) is not None:
                accounts.hear(key, kind, units, now)
        return True


class _Taken:
    """The share of accounts that reports what was taken, and not which connections hold them."""

    __slots__ = ("_machines", "_name")

    def __init__(self, machines: Machines, name: str) -> None:
        self._machines = machines
        self._name = name

    def taker(self, key: str, kind: str) -> Callable[[float], None]:
        return functools.partial(self._machines.took, self._name, key, kind)

    def holds(self, key: str, count: int) -> None:
        pass

    def elsewhere(self, key: str) -> int:
        return 0
