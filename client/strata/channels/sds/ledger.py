"""Everything a participant holds of the channel's past, within its bounds: log, ids, bytes, filter, tips."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from strata.channels.sds.bloom import BloomParameters, RollingFilter
from strata.channels.sds.bodies import Archive, Body
from strata.channels.sds.config import SdsConfig
from strata.channels.sds.log import Entry, KnownIds, Log
from strata.channels.sds.outgoing import OutgoingBuffer
from strata.channels.sds.tips import Tips

__all__ = ["Ledger"]


class Ledger:
    """The log and what goes with it.

    `mark` takes the kind and key of each record that changes. Own unacknowledged messages keep their bytes
    when the log lets go of them, which is why the outgoing buffer is needed here.
    """

    def __init__(
        self,
        config: SdsConfig,
        parameters: BloomParameters,
        outgoing: OutgoingBuffer,
        mark: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._outgoing = outgoing
        self._mark = mark
        self.log = Log()
        self.known = KnownIds(config.max_known_ids)
        self.archive = Archive()
        self.filter = RollingFilter(parameters)
        self.tips = Tips(
            self.log,
            parameters,
            2 * config.acknowledgement_timeout_ms,
            limit=config.max_repair_requests,
            mark=mark,
        )

    def add(
        self,
        message_id: str,
        sender_id: str,
        lamport: int,
        body: Body,
        history: Sequence[str],
        *,
        clock: int,
        now: int,
        hint: bytes | None = None,
        own: int = 0,
    ) -> None:
        """Log a message. `own` is its number among one's own, `clock` one's own Lamport time."""
        floor, run = self._follows(history, own)
        entry = Entry(
            *(message_id, sender_id, lamport, body),
            arrival=self.log.last_arrival + 1,
            hint=hint,
            own=own,
            floor=floor,
            run=run,
            dispatched=not own,
        )
        self.log.add(entry)
        self.known.add(message_id, lamport, entry.arrival)
        self.tips.logged(message_id, history, now)
        self._mark("log", message_id)
        while len(self.log) > self._config.max_history or (
            self.archive.size_bytes > self._config.max_history_bytes and len(self.log) > 1
        ):
            self._evict(self.log.first_logged())
        for forgotten in self.known.trim(clock):
            self._mark("known", forgotten)

    def _follows(self, history: Iterable[str], own: int) -> tuple[int, int]:
        """`Entry.floor` and `Entry.run` of a message with this history."""
        named = [entry for entry in map(self.log.get, history) if entry is not None]
        floor, run = max(((entry.floor, entry.run) for entry in named), default=(0, 0))
        if own:
            # The run goes on if this message follows the own one just before it.
            return own, run if run and floor == own - 1 else own
        return floor, run

    def dispatched(self, entry: Entry) -> None:
        """An own message is out: others may have it, so the filter has it from now on (C-110)."""
        if not entry.dispatched:
            entry.dispatched = True
            self.filter.insert(entry.message_id)
            self._mark("log", entry.message_id)

    def learn_hint(self, entry: Entry, hint: bytes | None) -> None:
        """What a message can be fetched by."""
        if hint is not None and hint != entry.hint:
            entry.hint = hint
            self._mark("log", entry.message_id)

    def withdraw(self, entry: Entry) -> None:
        """Take an own message out that never was (C-110)."""
        self.log.remove(entry.message_id)
        self.known.discard(entry.message_id)
        self.tips.discard(entry.message_id)
        self.archive.release(entry.body)
        self._mark("log", entry.message_id)

    def _evict(self, entry: Entry) -> None:
        """The log is full: let a message go, but know its id."""
        self.log.remove(entry.message_id)
        self.tips.discard(entry.message_id)
        outgoing = self._outgoing.get(entry.message_id)
        if outgoing is not None:
            outgoing.owns_body = True
            self._mark("outgoing", entry.message_id)
        else:
            self.archive.release(entry.body)
        self._mark("log", entry.message_id)
        self._mark("known", entry.message_id)
