"""Receipts: the messages that a participant has received, in six bytes each (decision 0046).

A filter takes 18 KB whether it holds one id or ten thousand. Nearly always only a few of its ids are news to
anybody: the messages that were received and that nobody has acknowledged. A *receipt* is the first six bytes
of the SHA-256 of such an id. A list of receipts says what the filter would say, in some hundred bytes and
with certainty. The list is a separate field, which other implementations skip.

A filter is useful only to participants that have sent something, as an acknowledgement. So filters are
omitted while everybody heard recently lists receipts. A participant that does not know receipts still reads
every message, and gets filters again as soon as it sends a message.

A list shows what its sender has, so it also shows who lacks what. For that somebody must send a sync, which
each participant of a crowd seldom does. `Unheard` makes a participant send one when others list receipts of
messages that it does not have.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache

__all__ = [
    "LATEST",
    "MAX_IN_CONTENT",
    "MAX_IN_SYNC",
    "Debts",
    "Unheard",
    "read_receipts",
    "receipt",
    "write_receipts",
]

RECEIPT_BYTES = 6
MAX_IN_CONTENT = 32
"""The most receipts in a content message; a sync lists the others."""
MAX_IN_SYNC = 1_000
"""The most receipts in a sync; if there are more, the sync carries the filter too."""
LATEST = 48
"""The number of latest messages that a sync lists again, acknowledged or not."""
_MAX_READ = 2_000
"""The most receipts read from one message; a longer list is ignored."""
_MAX_DEBTS = 1_024
_MAX_UNHEARD = 1_024
_NOTICED = 4_096
"""The least number of receipts of logged messages to compare with those of others; the most is twice this."""
_TRIES = 4
"""How many syncs a participant sends because of one receipt: it may be of a message that it does not want."""


@lru_cache(4_096)  # many participants in one process need the same few receipts
def receipt(message_id: str) -> bytes:
    """The receipt of a message."""
    return hashlib.sha256(message_id.encode()).digest()[:RECEIPT_BYTES]


def write_receipts(message_ids: Iterable[str]) -> bytes:
    """A list of receipts as it travels."""
    return b"".join([receipt(message_id) for message_id in message_ids])


def read_receipts(data: bytes | None) -> frozenset[bytes]:
    """The receipts of a received list; none if the list is malformed or too long (C-302)."""
    if not data or len(data) % RECEIPT_BYTES or len(data) > _MAX_READ * RECEIPT_BYTES:
        return frozenset()
    return _split(data)


@lru_cache(64)  # a list comes from several relays, and to each participant in this process
def _split(data: bytes) -> frozenset[bytes]:
    return frozenset([data[at : at + RECEIPT_BYTES] for at in range(0, len(data), RECEIPT_BYTES)])


class Debts:
    """Received messages that nobody is known to have acknowledged, oldest first.

    A debt is paid by naming or listing the message, or by as many filters as its sender counts as an
    acknowledgement.
    """

    def __init__(self, filters_needed: int) -> None:
        self._filters_needed = filters_needed
        self._owed: dict[str, tuple[str, int]] = {}
        """The sender of each message, and how many more filters must carry the message."""
        self._by_receipt: dict[bytes, str] = {}
        self.overflown = False
        """Whether there were more debts than are kept, so that only a filter has them all."""

    def __len__(self) -> int:
        return len(self._owed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owed)

    def add(self, message_id: str, sender_id: str) -> None:
        """Add a message that was received, or that its sender has sent again."""
        if len(self._owed) >= _MAX_DEBTS and message_id not in self._owed:
            self.overflown = True
            return
        self._owed[message_id] = (sender_id, self._filters_needed)
        self._by_receipt[receipt(message_id)] = message_id

    def pay(self, message_ids: Iterable[str], *, payer: str | None = None) -> int:
        """Drop the debts for these messages, except those that `payer` sent; return how many were dropped."""
        paid = 0
        for message_id in message_ids:
            owed = self._owed.get(message_id)
            if owed is not None and owed[0] != payer:
                self._drop(message_id)
                paid += 1
        return paid

    def pay_listed(self, receipts: Collection[bytes], payer: str) -> int:
        """Do the same as `pay` for the messages of these receipts."""
        found = [self._by_receipt[each] for each in self._by_receipt.keys() & receipts]
        return self.pay(found, payer=payer)

    def filter_sent(self) -> None:
        """Note that one of our messages has carried the filter."""
        self.overflown = False
        for message_id, (sender_id, left) in list(self._owed.items()):
            if left > 1:
                self._owed[message_id] = (sender_id, left - 1)
            else:
                self._drop(message_id)

    def _drop(self, message_id: str) -> None:
        del self._owed[message_id]
        self._by_receipt.pop(receipt(message_id), None)


class Unheard:
    """Receipts that others list, of messages that this participant does not have.

    `grace` is how many milliseconds a message may take to arrive. None of this is stored.
    """

    def __init__(self, grace: int) -> None:
        self._grace = grace
        self._noticed: dict[bytes, None] = {}
        self._noticed_before: dict[bytes, None] = {}
        """Receipts of logged messages, in two parts: the older part is dropped when the newer one is full."""
        self._since: dict[bytes, tuple[int, int]] = {}
        """The time since which each receipt is unknown, and how many syncs were sent because of it."""

    def logged(self, message_id: str) -> None:
        """Note that a message was logged: its receipt is known."""
        noticed = receipt(message_id)
        if len(self._noticed) >= _NOTICED:
            self._noticed_before, self._noticed = self._noticed, {}
        self._noticed[noticed] = None
        self._since.pop(noticed, None)

    def listed(self, receipts: frozenset[bytes], now: int) -> None:
        """Note the receipts in another's sync, which lists all messages unreferenced for its sender."""
        unknown = receipts.difference(self._noticed).difference(self._noticed_before)
        # A sender that does not list one lacks it too, and its sync has just shown this to everybody.
        self._since = {each: kept for each, kept in self._since.items() if each in unknown}
        for each in unknown:
            if len(self._since) < _MAX_UNHEARD:
                self._since.setdefault(each, (now, 0))

    def is_due(self, now: int, sought: Iterable[str]) -> bool:
        """Whether to send a sync because a message is lacking that is none of `sought`."""
        if not self._due(now):
            return False
        for message_id in sought:
            self._since.pop(receipt(message_id), None)
        return bool(self._due(now))

    def said(self, now: int) -> None:
        """Note that we sent a sync: participants that have the messages see that we lack them."""
        for each in self._due(now):
            self._since[each] = (now, self._since[each][1] + 1)

    def _due(self, now: int) -> list[bytes]:
        grace = self._grace
        return [each for each, (at, said) in self._since.items() if now - at >= grace and said < _TRIES]
