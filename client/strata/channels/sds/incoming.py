"""Messages held until what they follow is there, and the messages that are missed for it."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Iterable

from strata.channels.sds.bodies import Body
from strata.channels.sds.config import SdsConfig
from strata.channels.sds.events import Lost
from strata.channels.sds.messages import HistoryEntry

__all__ = ["IncomingBuffer", "Missing", "Waiting"]


class Waiting:
    """A received message some of whose dependencies are not in the log."""

    __slots__ = ("body", "hint", "lamport", "message_id", "received_at", "sender_id", "unmet")

    def __init__(
        self,
        message_id: str,
        sender_id: str,
        lamport: int,
        body: Body,
        unmet: set[str],
        *,
        hint: bytes | None,
        received_at: int,
    ) -> None:
        self.message_id = message_id
        self.sender_id = sender_id
        self.lamport = lamport
        self.body = body
        self.unmet = unmet
        self.hint = hint
        self.received_at = received_at


class Missing:
    """A message that others name and that is not here."""

    __slots__ = ("entry", "first_missing_at", "waited_from")

    def __init__(self, entry: HistoryEntry, first_missing_at: int, waited_from: int | None = None) -> None:
        self.entry = entry
        self.first_missing_at = first_missing_at
        self.waited_from = first_missing_at if waited_from is None else waited_from
        """From when the time to give up counts: at the earliest from the present start, for nobody could
        look for the message while the program did not run."""


class IncomingBuffer:
    """Who waits for whom. Its size is bounded by the settings; what does not fit is refused by `has_room`."""

    def __init__(self, config: SdsConfig) -> None:
        self._config = config
        self.waiting: dict[str, Waiting] = {}
        self.missing: dict[str, Missing] = {}
        """In the order they were found missing."""
        self.lost: dict[str, None] = {}
        """Given up: dependencies that count as met."""
        self._waiters: dict[str, dict[str, None]] = {}
        self._waiting_bytes = 0

    def has_room(self, size_bytes: int, unmet: int) -> bool:
        """Whether a message of this size with so many unmet dependencies can be held."""
        config = self._config
        return (
            len(self.waiting) < config.max_waiting
            and self._waiting_bytes + size_bytes <= config.max_waiting_bytes
            and len(self.missing) + unmet <= config.max_missing
        )

    def hold(self, waiting: Waiting) -> None:
        """Keep a message until its dependencies are met."""
        self.waiting[waiting.message_id] = waiting
        self._waiting_bytes += waiting.body.size_bytes
        for message_id in waiting.unmet:
            self._waiters.setdefault(message_id, {})[waiting.message_id] = None

    def miss(self, entries: Iterable[HistoryEntry], now: int, *, limit: int) -> list[HistoryEntry]:
        """Track these as missing while there are fewer than `limit`; returns what is news about them."""
        news: list[HistoryEntry] = []
        for entry in entries:
            known = self.missing.get(entry.message_id)
            if known is None:
                if len(self.missing) < limit and entry.message_id not in self.waiting:
                    self.missing[entry.message_id] = Missing(entry, now)
                    news.append(entry)
            elif known.entry.retrieval_hint is None and entry.retrieval_hint is not None:
                sender_id = known.entry.sender_id or entry.sender_id
                known.entry = HistoryEntry(entry.message_id, entry.retrieval_hint, sender_id)
                news.append(known.entry)
        return news

    def met(self, message_id: str) -> list[Waiting]:
        """A dependency is met; returns the messages that wait for nothing any more."""
        ready: list[Waiting] = []
        for waiter in self._waiters.pop(message_id, ()):
            waiting = self.waiting[waiter]
            waiting.unmet.discard(message_id)
            if not waiting.unmet:
                ready.append(self._release(waiter))
        return ready

    def recheck(self, is_met: Callable[[str], bool]) -> list[Waiting]:
        """Look at every dependency again (C-124); returns the messages that wait for nothing any more."""
        ready: list[Waiting] = []
        for message_id in [message_id for message_id in self._waiters if is_met(message_id)]:
            ready += self.met(message_id)
        ready += [self._release(each.message_id) for each in list(self.waiting.values()) if not each.unmet]
        return ready

    def give_up(self, now: int) -> list[Lost]:
        """Mark as lost what has been missing for too long (C-126)."""
        timeout = self._config.lost_message_timeout_ms
        lost: list[Lost] = []
        if timeout:
            for message_id, missing in list(self.missing.items()):
                if now - missing.waited_from < timeout:
                    break
                del self.missing[message_id]
                self.lost[message_id] = None
                lost.append(Lost(missing.entry, missing.first_missing_at))
        return lost

    def forget_lost(self) -> list[str]:
        """Drop the oldest of what is marked as lost when there is too much of it; returns their ids."""
        excess = len(self.lost) - self._config.max_missing
        forgotten = list(self.lost)[:excess] if excess > 0 else []
        for message_id in forgotten:
            del self.lost[message_id]
        return forgotten

    def break_cycle(self, now: int) -> list[Waiting]:
        """Messages that wait for each other alone, and have for too long: the first of them, freed.

        Only a forger makes such, since a message names what came before it.
        """
        timeout = self._config.lost_message_timeout_ms
        if not timeout or not any(now - each.received_at >= timeout for each in self.waiting.values()):
            return []
        hopeful: set[str] = set()
        reached = list(self.missing)
        while reached:
            for waiter in self._waiters.get(reached.pop(), ()):
                if waiter not in hopeful:
                    hopeful.add(waiter)
                    reached.append(waiter)
        stuck = [each for each in self.waiting.values() if each.message_id not in hopeful]
        if not stuck:
            return []
        first = min(stuck, key=lambda each: (each.lamport, each.message_id))
        for message_id in first.unmet:
            self._waiters[message_id].pop(first.message_id)
        first.unmet.clear()
        return [self._release(first.message_id)]

    def _release(self, message_id: str) -> Waiting:
        waiting = self.waiting.pop(message_id)
        self._waiting_bytes -= waiting.body.size_bytes
        return waiting
