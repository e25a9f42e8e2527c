"""Moderating a relay over the wire, as one of its operators (decision 61).

    async with Moderator("wss://relay.example/strata", identity) as moderator:
        await moderator.ban("author", did, reason="spam")

No request is retried, because an operator must know what became of each ruling. If an answer is lost, the
relay's log of rulings shows the outcome.
"""

from __future__ import annotations

import os
import ssl as ssl_module
from collections.abc import AsyncIterator
from typing import Final, Literal

import msgspec
from websockets.asyncio.client import ClientConnection

from strata.protocol import wire
from strata.protocol.errors import ConnectionFailed, RequestRefused
from strata.protocol.ids import Signer
from strata.relays.circles import Circle
from strata.relays.connection.dialogue import Dialogue

__all__ = ["ModeratedKind", "Moderator"]

ModeratedKind = Literal["author", "packet", "media", "type", "network"]

_PAGE: Final = 500
_SESSIONS: Final = 200
_OPERATE: Final = "operate"


class Moderator(Dialogue):
    """An operator's session. Open it with `async with`, which raises `RequestRefused` (`unauthenticated`) if
    this identity is not one of the relay's operators.

    `timeout`, in seconds, applies to opening and to each request. `relay_id` is the DID that the relay must
    have. Without it, the relay must have the DID that the file `pins` has for its address; one that was not
    met before is written there. Without both, any relay at the URL is accepted.
    """

    def __init__(
        self,
        url: str,
        signer: Signer,
        *,
        relay_id: str | None = None,
        ssl: ssl_module.SSLContext | None = None,
        timeout: float = 20.0,
        pins: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(url, signer, relay_id=relay_id, ssl=ssl, timeout=timeout, pins=pins)

    async def ban(
        self, kind: ModeratedKind, subject: str, *, reason: str, expires_at: int | None = None
    ) -> bool:
        """Ban a subject, or remove a packet (kind `packet`); return whether that changed anything.

        `expires_at` is the last Unix second of the ban. Raises `RequestRefused` and `ConnectionFailed`; after
        the latter, or after cancellation, the ruling may have taken effect.
        """
        message = wire.Moderate(
            action="ban", kind=kind, subject=subject, reason=reason, expires_at=expires_at
        )
        return bool((await self._rule(message)).changed)

    async def unban(self, kind: ModeratedKind, subject: str, *, reason: str) -> bool:
        """Lift a ban, or restore a packet; return whether there was one. Raises as `ban` does."""
        message = wire.Moderate(action="unban", kind=kind, subject=subject, reason=reason)
        return bool((await self._rule(message)).changed)

    async def bans(self, kind: ModeratedKind | None = None) -> AsyncIterator[dict[str, object]]:
        """Yield the bans in force, read page by page. Raises as `ban` does, and `ConnectionFailed` for pages
        in a circle.
        """
        async for entry in self._pages(wire.Moderate(action="list", kind=kind, limit=_PAGE)):
            yield entry

    async def log(self, subject: str | None = None) -> AsyncIterator[dict[str, object]]:
        """Yield the log of rulings, newest first. Raises as `bans` does."""
        async for entry in self._pages(wire.Moderate(action="log", subject=subject, limit=_PAGE)):
            yield entry

    async def sessions(
        self, kind: Literal["author", "network"] | None = None, subject: str | None = None
    ) -> AsyncIterator[dict[str, object]]:
        """Yield the open sessions of all processes of the relay; with `kind` and `subject`, only those of a
        DID or a network. A process that does not answer in time is left out. Raises as `bans` does."""
        message = wire.Moderate(action="sessions", kind=kind, subject=subject, limit=_SESSIONS)
        async for entry in self._pages(message):
            yield entry

    async def close_session(self, session: str, *, reason: str) -> bool:
        """Close the session with this id, in any process; return whether there was one.

        The session ends within two seconds. Its client may reconnect; only a ban keeps it out. Raises as
        `ban` does.
        """
        message = wire.Moderate(action="close", subject=session, reason=reason)
        return bool((await self._rule(message)).changed)

    async def _pages(self, message: wire.Moderate) -> AsyncIterator[dict[str, object]]:
        after: str | None = None
        circle = Circle()
        while True:
            answer = await self._rule(msgspec.structs.replace(message, after=after))
            for entry in answer.entries or ():
                yield entry
            after = answer.next
            if after is None:
                return
            # A relay whose pages go in a circle, or are empty, would be asked forever.
            if not answer.entries or circle.closes(after):
                raise ConnectionFailed("the relay gives its pages in a circle, or pages of nothing")

    async def _authenticate(self, socket: ClientConnection) -> None:
        await super()._authenticate(socket)
        if _OPERATE not in self.granted:
            raise RequestRefused("unauthenticated", "this identity is not an operator of the relay")

    async def _rule(self, message: wire.Moderate) -> wire.Moderated:
        answer = await self._ask(message, wire.decode_moderated)
        if isinstance(answer, wire.Error):
            raise RequestRefused(answer.code, answer.reason, detail=answer.detail)
        return answer
