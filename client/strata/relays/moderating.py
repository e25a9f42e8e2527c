"""Moderate a relay over the wire, as one of its operators (decision 61).

    async with Moderator("wss://relay.example/strata", identity) as moderator:
        await moderator.ban("author", did, reason="spam")

A connection of its own, which asks one thing at a time: nothing is tried twice, for an operator wants to
know what became of each ruling. The relay's log of rulings says so if an answer is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl as ssl_module
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final, Literal, Self

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, WebSocketException

from strata.protocol import wire
from strata.protocol.auth import answer_challenge, check_challenge
from strata.protocol.errors import ConnectionFailed, RequestRefused
from strata.protocol.ids import Signer
from strata.relays.connection.dialing import check_url, describe, hang_up, tls_context
from strata.relays.connection.dialing import dial as dial_relay
from strata.relays.connection.options import Options

__all__ = ["ModeratedKind", "Moderator"]

ModeratedKind = Literal["author", "packet", "media", "type", "network"]

_PAGE: Final = 500
_SESSIONS: Final = 200
_CLOSE_SECONDS: Final = 5.0
_OPERATE: Final = "operate"


class Moderator:
    """A session of an operator. Open it with `async with`.

    `timeout`, in seconds, holds for opening and for each request. `relay_id` is the DID that the relay must
    have; without it, whoever answers at the URL is believed to be the relay.
    """

    def __init__(
        self,
        url: str,
        signer: Signer,
        *,
        relay_id: str | None = None,
        ssl: ssl_module.SSLContext | None = None,
        timeout: float = 20.0,
    ) -> None:
        check_url(url)
        self._url = url
        self._signer = signer
        self._relay_id = relay_id
        self._ssl = tls_context(url, ssl)
        self._timeout = timeout
        self._socket: ClientConnection | None = None
        self._names = itertools.count(1)

    async def __aenter__(self) -> Self:
        """Connect and authenticate.

        Raises `ConnectionFailed`, `RequestRefused` (`unauthenticated` where the relay does not have this
        identity among its operators), `InvalidMessage`. Cancelling closes the connection.
        """
        try:
            async with asyncio.timeout(self._timeout):
                self._socket, _ = await dial_relay(self._url, ssl=self._ssl, options=Options())
                await self._authenticate(self._socket)
        except (OSError, TimeoutError, WebSocketException) as error:
            await self._close()
            raise describe(error, self._url) from error
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def ban(
        self, kind: ModeratedKind, subject: str, *, reason: str, expires_at: int | None = None
    ) -> bool:
        """Ban a subject, or remove a packet (kind `packet`); whether that changed anything.

        `expires_at` is the last Unix second of the ban. Raises `RequestRefused` and `ConnectionFailed`; after
        the latter, as after cancelling, the ruling may have taken effect.
        """
        message = wire.Moderate(
            action="ban", kind=kind, subject=subject, reason=reason, expires_at=expires_at
        )
        return bool((await self._ask(message)).changed)

    async def unban(self, kind: ModeratedKind, subject: str, *, reason: str) -> bool:
        """Lift a ban, or restore a packet; whether there was one. Raises as `ban` does."""
        message = wire.Moderate(action="unban", kind=kind, subject=subject, reason=reason)
        return bool((await self._ask(message)).changed)

    async def bans(self, kind: ModeratedKind | None = None) -> AsyncIterator[dict[str, object]]:
        """The bans in force, page by page. Raises as `ban` does."""
        async for entry in self._pages(wire.Moderate(action="list", kind=kind, limit=_PAGE)):
            yield entry

    async def log(self, subject: str | None = None) -> AsyncIterator[dict[str, object]]:
        """The log of rulings, the newest first. Raises as `ban` does."""
        async for entry in self._pages(wire.Moderate(action="log", subject=subject, limit=_PAGE)):
            yield entry

    async def sessions(
        self, kind: Literal["author", "network"] | None = None, subject: str | None = None
    ) -> AsyncIterator[dict[str, object]]:
        """The open sessions, of all processes of the relay; of a DID or a network alone with `kind` and
        `subject`. A process that does not answer in time is left out. Raises as `ban` does."""
        message = wire.Moderate(action="sessions", kind=kind, subject=subject, limit=_SESSIONS)
        async for entry in self._pages(message):
            yield entry

    async def close_session(self, session: str, *, reason: str) -> bool:
        """Close the session of this id, whichever process has it; whether there was one.

        It ends within two seconds, and its client may come back: a ban keeps it out. Raises as `ban` does.
        """
        message = wire.Moderate(action="close", subject=session, reason=reason)
        return bool((await self._ask(message)).changed)

    async def _pages(self, message: wire.Moderate) -> AsyncIterator[dict[str, object]]:
        after: str | None = None
        while True:
            answer = await self._ask(_with(message, after=after))
            for entry in answer.entries or ():
                yield entry
            if answer.next is None or answer.next == after:
                return
            after = answer.next

    async def _authenticate(self, socket: ClientConnection) -> None:
        while True:
            message = wire.decode_relay_message(await socket.recv())
            if isinstance(message, wire.AuthChallenge):
                check_challenge(message, expected_server_id=self._relay_id)
                answer = answer_challenge(message, self._signer, client_msg_id="auth")
                await socket.send(wire.encode(answer).decode())
            elif isinstance(message, wire.AuthOk):
                if _OPERATE not in (message.capabilities or ()):
                    raise RequestRefused("unauthenticated", "this identity is no operator of the relay")
                return
            elif isinstance(message, wire.Error) and message.client_msg_id == "auth":
                raise RequestRefused(message.code, message.reason, detail=message.detail)

    async def _ask(self, message: wire.Moderate) -> wire.Moderated:
        socket = self._socket
        if socket is None:
            raise ConnectionFailed("not connected")
        name = f"m{next(self._names)}"
        try:
            async with asyncio.timeout(self._timeout):
                await socket.send(wire.encode(_with(message, client_msg_id=name)).decode())
                while True:
                    answer = wire.decode_moderated(await socket.recv())
                    if answer is None or answer.client_msg_id != name:
                        continue
                    if isinstance(answer, wire.Error):
                        raise RequestRefused(answer.code, answer.reason, detail=answer.detail)
                    return answer
        except (OSError, TimeoutError, ConnectionClosed) as error:
            raise describe(error, self._url) from error

    async def _close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await hang_up(socket, _CLOSE_SECONDS)


def _with(message: wire.Moderate, **members: str | None) -> wire.Moderate:
    return msgspec.structs.replace(message, **members)
