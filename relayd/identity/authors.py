"""The authors who have published anything about themselves: read from the log at start, then from the feed.

The log is read in pages, and the relay serves meanwhile. Until the last page has arrived, every author is
looked up in the log, like one who has a chain.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Final, Protocol

from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.provenance.manifest import CLIENT_MANIFEST

from relayd.faults import FaultLog
from relayd.identity.names import Names
from relayd.logs import get_logger, problem_of
from relayd.pauses import Pauses
from relayd.store.identities import AuthorsPage
from relayd.store.types import StoreError

__all__ = ["DECISIVE_TYPES", "Authors", "LogOfAuthors"]

_log = get_logger("relayd.identity.directory")

DECISIVE_TYPES: Final = IDENTITY_TYPES | {CLIENT_MANIFEST}
"""Packets that affect the judgement of later ones."""
_START_PATIENCE: Final = 5.0
"""How long a start waits for the names of all identities, in seconds; then the relay serves without them."""
_NAMES_PER_STEP: Final = 500
_STEP_PAUSE: Final = 0.001
"""The pause after the names of one step, which take half a millisecond, so that others have their turn."""
_RETRY_SECONDS: Final = (0.1, 5.0)


class LogOfAuthors(Protocol):
    """The part of the store that this module needs; it may raise `StoreError`."""

    async def authors(self, type_: str, after: int = ...) -> AuthorsPage: ...


class Authors:
    """The DIDs about which the log says anything, or the operator does: `special`."""

    def __init__(self, log: LogOfAuthors, special: Iterable[str], faults: FaultLog) -> None:
        self._log = log
        self._faults = faults
        self._special = Names(special)
        self._publishers = Names()
        self._is_complete = True
        """Whether these two sets hold every name of the log. True while there is no log yet, see `open`."""
        self._has_begun = False
        self._learning: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to learn the names, and wait a while for the end. Raises `StoreError` if the log cannot be
        read. Cancelling it leaves the reading to `close`."""
        self._is_complete = False
        self._learning = learning = asyncio.create_task(self._learn(), name="identities")
        learning.add_done_callback(self._ended)
        done, _ = await asyncio.wait({learning}, timeout=_START_PATIENCE)
        if done:
            learning.result()
        else:
            learning.add_done_callback(self._failed_late)
            _log.info("identities_loading", consequence="authors are looked up one by one until it is done")

    async def close(self) -> None:
        """Stop learning from the log."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)

    def is_plain(self, did: str) -> bool:
        """Whether the DID is known to stand for itself, with nothing published about it: the usual case."""
        return did not in self._special and self._is_complete

    def is_no_client(self, did: str) -> bool:
        """Whether this DID is known to have published no manifest."""
        return did not in self._publishers and self._is_complete

    def add(self, did: str, type_: str) -> None:
        """The log has a packet of this type, one of `DECISIVE_TYPES`, by this DID."""
        self._names_of(type_).add(did)

    def _names_of(self, type_: str) -> Names:
        return self._publishers if type_ == CLIENT_MANIFEST else self._special

    def _ended(self, learning: asyncio.Task[None]) -> None:
        self._learning = None

    def _failed_late(self, learning: asyncio.Task[None]) -> None:
        if not learning.cancelled() and (error := learning.exception()) is not None:
            self._faults.caught("identity", error)  # authors are looked up one by one until a restart

    async def _learn(self) -> None:
        for type_ in sorted(DECISIVE_TYPES):
            names = self._names_of(type_)
            place: int | None = 0
            while place is not None:
                page = await self._page(type_, place)
                left = iter(page.names)
                while some := list(itertools.islice(left, _NAMES_PER_STEP)):
                    names.update(some)
                    await asyncio.sleep(_STEP_PAUSE)
                place = page.next
        self._is_complete = True
        _log.info("identities_known", authors=len(self._special), clients=len(self._publishers))

    async def _page(self, type_: str, place: int) -> AuthorsPage:
        """A page of names. An error on the first page is raised; later pages are retried until they come."""
        pauses = Pauses(*_RETRY_SECONDS)
        while True:
            try:
                page = await self._log.authors(type_, place)
            except StoreError as error:
                if not self._has_begun:
                    raise
                _log.warning("identities_unread", problem=problem_of(error), retry_in=pauses.next)
                await pauses.wait()
            else:
                self._has_begun = True
                return page
