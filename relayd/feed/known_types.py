"""The content types that the log holds, so that it is not searched for types that are not there.

A filter may name a thousand types, and a log has a few dozen. To find that no packet has one of a thousand
types, PostgreSQL looks at ten thousand packets and then a thousand times into an index; a set in memory
gives the answer at once. The set is built at the start, in pages, and then the feed adds the types that it
passes on. So it holds every type of the log up to the feed's position, and perhaps some that retention has
removed since. Until the last page has arrived, or if there are more types than it may hold, it narrows no
query.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Final, Protocol

from strata.protocol.columns import HASHED

from relayd.faults import FaultLog
from relayd.logs import get_logger, problem_of
from relayd.pauses import Pauses
from relayd.store.types import LogEntry, LogQuery, StoreError

__all__ = ["KnownTypes", "LogOfTypes"]

_log = get_logger("relayd.feed")

_MOST_TYPES: Final = 2048
"""With more types the set is given up: a publisher of ever new types must not fill memory."""
_LONGEST_TYPE: Final = 128
"""In characters. Longer types are not kept, and are searched for whenever they are requested."""
_PAGE_TYPES: Final = 64
_RETRY_SECONDS: Final = (0.1, 5.0)


class LogOfTypes(Protocol):
    """The part of the store that this module needs; it may raise `StoreError`."""

    async def types(self, start: bytes, most: int) -> list[bytes]: ...


class KnownTypes:
    """The types of the log up to the feed's position, once all pages have been read."""

    def __init__(self, log: LogOfTypes, faults: FaultLog | None = None) -> None:
        self._log = log
        self._faults = faults or FaultLog()
        self._types: set[str] = set()
        self._is_complete = self._is_given_up = False
        self._learning: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._types)

    def open(self) -> None:
        """Begin to learn. The feed must start no later than the current end of the log."""
        self._learning = asyncio.create_task(self._learn(), name="types")

    async def close(self) -> None:
        """Stop learning from the log."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)

    def observe(self, entries: Sequence[LogEntry]) -> None:
        """Take the log's next entries, without a gap; called by the feed. Never raises."""
        try:
            if not self._is_given_up:
                self._add({entry.packet.content_type for entry in entries})
        except Exception as error:
            self._give_up()
            self._faults.caught("feed", error)

    def narrowed(self, query: LogQuery) -> LogQuery | None:
        """The same query without types that the log does not hold; None if nothing can match.

        The query must not extend beyond the feed's position.
        """
        if not query.types or query.up_to is None or not self._is_complete:
            return query
        held = query.types & self._types
        if max(map(len, query.types)) > _LONGEST_TYPE:
            held |= {type_ for type_ in query.types if len(type_) > _LONGEST_TYPE}
        if len(held) == len(query.types):
            return query
        return dataclasses.replace(query, types=held) if held else None

    async def _learn(self) -> None:
        try:
            await self._read_all()
        except Exception as error:
            self._give_up()
            self._faults.caught("feed", error)

    async def _read_all(self) -> None:
        place, pauses = b"", Pauses(*_RETRY_SECONDS)
        while not self._is_given_up:
            try:
                keys = await self._log.types(place, _PAGE_TYPES)
            except StoreError as error:
                _log.warning("types_unread", problem=problem_of(error), retry_in=pauses.next)
                await pauses.wait()
                continue
            self._add({key.decode() for key in keys if not key.startswith(HASHED)})
            if len(keys) < _PAGE_TYPES:
                self._is_complete = not self._is_given_up
                return
            place = keys[-1] + b"\0"  # the smallest possible next key

    def _add(self, types: set[str]) -> None:
        if types <= self._types:  # nearly always
            return
        self._types |= {type_ for type_ in types if len(type_) <= _LONGEST_TYPE}
        if len(self._types) > _MOST_TYPES:
            self._give_up()

    def _give_up(self) -> None:
        self._is_given_up, self._is_complete = True, False
        self._types = set()
