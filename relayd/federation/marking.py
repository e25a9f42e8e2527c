"""How far a peer was read: stored with each batch of its packets, else from time to time (R-364)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection

from relayd.federation.intake import Intake, Item
from relayd.federation.mesh import Mesh
from relayd.federation.peers_file import Upstream
from relayd.federation.selection import stream_of
from relayd.store.peers import PeerPlace
from relayd.store.types import PeerMark, StoreError

__all__ = ["Marking"]

_FLUSH_SECONDS = 1.0


class Marking:
    """The place of one link in its peer's log; `intake` is the window now being read into."""

    def __init__(
        self,
        peer: Upstream,
        peer_id: int,
        fence: int,
        place: PeerPlace,
        mesh: Mesh,
        store_mark: Callable[[PeerMark], Awaitable[None]],
    ) -> None:
        self._peer = peer
        self._peer_id = peer_id
        self._fence = fence
        self._place = place
        self._mesh = mesh
        self._store_mark = store_mark
        self._stored: PeerMark | None = None
        self._offered: PeerMark | None = None
        self.intake = self.begin(place.cursor)

    def begin(self, cursor: str | None) -> Intake:
        """Read on from this cursor, into a new window."""
        place = self._place
        self.intake = Intake(cursor, last_witness=place.last_witness)
        return self.intake

    def offer(self, batch: Collection[Item]) -> PeerMark:
        """How far the peer was read once these items are stored."""
        self._offered = self._mark(batch)
        return self._offered

    def stored(self) -> None:
        """The offered mark is in the database."""
        self._stored = self._offered

    async def flush(self) -> None:
        """Store the mark from time to time if no packet was stored with it, until cancelled."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            mark = self._mark(())
            if mark != self._stored and mark.cursor is not None:
                with contextlib.suppress(StoreError):  # it is tried again next time
                    await self._store_mark(mark)
                    self._stored = mark

    def _mark(self, batch: Collection[Item]) -> PeerMark:
        intake = self.intake
        safe = self._mesh.to_store(
            self._peer.relay_id, intake.cursor, time.monotonic(), with_batch=intake.cursor_with(batch)
        )
        return PeerMark(
            self._peer_id,
            self._fence,
            stream_of(self._peer),
            safe,
            intake.last_witness,
        )
