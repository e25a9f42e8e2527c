"""Accounts of identities that relays on several machines charge: each tells the others what it let go.

The rules are those of workers (`ledger`): everybody takes at once, says a moment later what was taken, and
spends what others say from the same budgets, which may go into debt. Two things differ. Only what was taken
is said, and of identities alone: an address means little behind different balancers, and connections are
counted by the machine that has them. And a report comes over a bus on which others may be: it is sealed
there with the log's secret, and counts here once and while it is young, so whoever sends it again takes
nothing from anybody.
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
"""Entries of one message, some 20 KB."""
_MOST_MESSAGES: Final = 10
"""Of one report; what is left is said with the next one."""
_MOST_KEPT: Final = 20_000
_LONGEST_KEY: Final = 200
_YOUNG_SECONDS: Final = 60.0
"""By how much the clocks of two machines may differ, and the way between them may take."""
_TICK: Final = 0.0001


class _Said(msgspec.Struct, array_like=True):
    machine: bytes
    process: bytes
    at: float
    """Unix seconds, higher in each message of a process."""
    spent: list[tuple[str, str, str, float]]
    """Accounts, key, kind, units."""


_DECODER: Final = msgspec.msgpack.Decoder(_Said)


class Machines:
    """What this process has to say to those of other machines, and what it hears from them.

    `machine` is the same for all processes that share a ledger, and `process` is nobody else's.
    """

    def __init__(self, machine: bytes, process: bytes) -> None:
        self._machine = machine
        self._process = process
        self._accounts: dict[str, Account] = {}
        self._spent: dict[tuple[str, str, str], float] = {}
        self._said_at = 0.0
        self._heard: dict[bytes, float] = {}
        """When each process said what was heard of it last."""

    def share(self, name: str, accounts: Account) -> Share | None:
        """Take part for these accounts, if they are those of identities."""
        if name not in _SHARED:
            return None
        self._accounts[name] = accounts
        return _Taken(self, name)

    def took(self, name: str, key: str, kind: str, units: float) -> None:
        """A peer of this process has taken so much."""
        what = name, key, kind
        if what in self._spent or (len(self._spent) < _MOST_KEPT and len(key) <= _LONGEST_KEY):
            self._spent[what] = self._spent.get(what, 0.0) + units

    def report(self, wall: float) -> list[bytes]:
        """What was taken since the last report, at this Unix time; the rest comes with the next one."""
        # Whoever was silent for so long may be forgotten: nothing that it has said yet is young any more.
        self._heard = {who: at for who, at in self._heard.items() if abs(wall - at) < 2 * _YOUNG_SECONDS}
        messages: list[bytes] = []
        while self._spent and len(messages) < _MOST_MESSAGES:
            some = list(islice(self._spent, _MOST_AT_ONCE))
            # Two messages of one moment are told apart; after a clock was set back a lot they start anew.
            later = self._said_at + _TICK
            self._said_at = later if wall < later < wall + _YOUNG_SECONDS else wall
            spent = [(*what, self._spent.pop(what)) for what in some]
            said = _Said(self._machine, self._process, self._said_at, spent)
            messages.append(msgspec.msgpack.encode(said))
        return messages

    def hear(self, message: bytes, wall: float, now: float) -> bool:
        """Take in what another process says, at this Unix time; False for what is old, or was heard before.

        Raises `msgspec.MsgspecError` for what no process of this release has said.
        """
        said = _DECODER.decode(message)
        if said.machine == self._machine:
            return True  # a ledger tells it
        if abs(wall - said.at) > _YOUNG_SECONDS or said.at <= self._heard.get(said.process, 0.0):
            return False
        self._heard[said.process] = said.at
        for name, key, kind, units in said.spent:
            if (accounts := self._accounts.get(name)) is not None:
                accounts.hear(key, kind, units, now)
        return True


class _Taken:
    """The part that accounts have which tell what was taken, and not who is connected."""

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
