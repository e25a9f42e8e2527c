"""Takes messages from the transport: the hook decrypts them, and the engine takes them while there is room.

A channel without room holds back the node, and so the reading: the relays' stores are the buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from strata.channels.encryption import DecryptionFailed
from strata.channels.messaging.values import NodeMessageReceived
from strata.channels.reliable.engine import ChannelEngine
from strata.channels.reliable.events import InboxFull
from strata.channels.reliable.handover import Handover
from strata.channels.reliable.payloads import Payloads
from strata.channels.reliable.sealed import Sealed
from strata.channels.sds import SdsMessage

__all__ = ["Receiving"]

_log = logging.getLogger("strata.reliable")


class Receiving:
    """Takes messages for one channel, one at a time."""

    def __init__(
        self,
        channel_id: str,
        engine: ChannelEngine,
        payloads: Payloads,
        handover: Handover,
        *,
        works: Callable[[], bool],
        has_failed: Callable[[], bool],
        is_behind: Callable[[], bool],
        flush: Callable[[], None],
        read_again: Callable[[], None],
        now_ms: Callable[[], int],
    ) -> None:
        """`works`: the channel is started. `is_behind`: its store has too much to write. `read_again` is
        called when messages must be read again because the hook can decrypt them now."""
        self.sealed = Sealed(channel_id, engine.catching_up, opens=payloads.opens, changed=read_again)
        self._channel_id = channel_id
        self._engine = engine
        self._payloads = payloads
        self._handover = handover
        self._works = works
        self._has_failed = has_failed
        self._is_behind = is_behind
        self._flush = flush
        self._now_ms = now_ms
        self._taking = asyncio.Lock()
        self._room = asyncio.Event()
        self._told_full = False

    @property
    def is_full(self) -> bool:
        """Whether a message must wait for room."""
        return self._engine.inbox.is_full or self._is_behind()

    def make_room(self) -> None:
        """There may be room, or no need for any; waiting calls check again."""
        self._room.set()

    def program_took(self) -> None:
        """The program has taken a message. Once it has taken all, a full inbox is reported again."""
        self._told_full = self._told_full and len(self._engine.inbox) > 0

    async def take(self, event: NodeMessageReceived, *, stored: bool) -> SdsMessage | None:
        """Take a message once there is room for it. Returns None if it is not taken."""
        async with self._taking:
            if self.is_full:
                await self._wait_for_room(stored=stored)
            if not self._works():
                return None
            try:
                data = await self._payloads.open(event.message.payload)
            except DecryptionFailed:
                self._tell_sealed(event.message.payload)
                return None
            if data is None or self._has_failed():
                return None
            message = self._engine.receive(
                data,
                self._now_ms(),
                hint=event.message_hash,
                author=event.message.author,
                sent_at=event.message.timestamp,
                meta=event.message.meta,
                stored=stored,
                stored_at=event.received_at,
            )
            own = message is not None and message.sender_id == self._engine.sds.sender_id
            if self._payloads.has_hook and not own:
                await self.sealed.opened()
            if not stored:
                self._flush()
            return message

    async def _wait_for_room(self, *, stored: bool) -> None:
        """Wait until a message can be taken. Nothing is given up meanwhile: it may be what waits here."""
        self._engine.set_hearing(False, self._now_ms())
        try:
            while self._works() and self.is_full:
                if stored:
                    self._flush()  # only messages that reach the program can make room
                self.tell_full()
                self._room.clear()
                await self._room.wait()
        finally:
            self._engine.set_hearing(True, self._now_ms())

    async def take_stored(self, event: NodeMessageReceived) -> SdsMessage | None:
        """As `take`, for a message read from a store; the reader flushes, so that a page is one step."""
        return await self.take(event, stored=True)

    async def pass_over(self, event: NodeMessageReceived) -> None:
        """Skip a stored message from before this participant joined the channel."""
        data = await self._payloads.read(event.message.payload)
        if data is not None:
            self._engine.pass_over(data, self._now_ms())
            self._flush()

    def _tell_sealed(self, payload: bytes) -> None:
        told = self.sealed.note(payload, self._now_ms())
        if told is not None:
            _log.warning("%s: %d messages cannot be decrypted", self._channel_id, told.count)
            self._handover.tell([told], 0, self._engine.inbox.newest)

    def tell_full(self) -> None:
        """Report, once, that the program takes no messages."""
        inbox = self._engine.inbox
        if inbox.is_full and not self._told_full:
            self._told_full = True
            event = InboxFull(messages=len(inbox), size_bytes=inbox.size_bytes)
            _log.warning(
                "%s: %d received messages wait for the program, and no further one is read or acknowledged; "
                "a program that only sends says receive=False",
                self._channel_id,
                event.messages,
            )
            self._handover.tell([event], 0, inbox.newest)
