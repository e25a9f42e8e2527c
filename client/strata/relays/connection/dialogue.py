"""A separate, authenticated connection to a relay that carries one request at a time.

No request is retried: a program that moderates a relay, or compares sets with it, must know what became of
each request. See `strata.relays.moderating` and `strata.relays.reconciling`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import ssl as ssl_module
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, WebSocketException

from strata.protocol import wire
from strata.protocol.auth import answer_challenge, check_address, check_challenge
from strata.protocol.errors import ConnectionFailed, IdentityError, RequestRefused
from strata.protocol.ids import Signer
from strata.relays.connection.dialing import check_url, describe, dial, hang_up, shown, tls_context
from strata.relays.connection.options import Options
from strata.relays.connection.pins import PinFile, address_of
from strata.relays.connection.values import Announced
from strata.relays.peer_timeout import PeerTimeout

__all__ = ["Dialogue"]

_log = logging.getLogger("strata.relay")

_CLOSE_SECONDS: Final = 5.0
_MOST_CHALLENGES: Final = 3
"""The challenges that are answered: a relay may send a fresh one with a refusal, but not for ever."""
_AUTH: Final = "auth"
_AUTH_OR_NONE: Final = (_AUTH, None)
"""What an answer to AUTH may name: a plain relay need not echo `client_msg_id` (R-136)."""

_Answer = TypeVar("_Answer", wire.Moderated, wire.Reconciled)


class Dialogue:
    """One session. Open it with `async with`.

    `timeout`, in seconds, applies to opening and to each answer. `relay_id` is the DID that the relay must
    have; None accepts the DID in the file `pins`, else any that the file does not have at another address,
    and writes it there. Without `pins`, None accepts any relay at the URL. `capabilities` are those to
    request; None requests all.
    """

    def __init__(
        self,
        url: str,
        signer: Signer,
        *,
        relay_id: str | None,
        ssl: ssl_module.SSLContext | None,
        timeout: float,
        capabilities: Sequence[str] | None = None,
        pins: str | os.PathLike[str] | None = None,
    ) -> None:
        check_url(url)
        self.granted: tuple[str, ...] = ()
        """The capabilities that the relay has granted this session."""
        self._announced = Announced()
        self._url = url
        self._signer = signer
        self._relay_id = relay_id
        self._pins = None if pins is None else PinFile(pins)
        self._met: Mapping[str, str] = {}
        self._ssl = tls_context(url, ssl)
        self._timeout = timeout
        self._capabilities = capabilities
        self._socket: ClientConnection | None = None
        self._names = itertools.count(1)

    async def __aenter__(self) -> Self:
        """Connect and authenticate.

        Raises `ConnectionFailed`, `RequestRefused`, `InvalidMessage`, any error of the signer, and
        `IdentityError` or `OSError` for a file of pins that cannot be read. Cancelling closes the connection.
        """
        await self._read_pins()
        try:
            async with PeerTimeout(self._timeout):
                self._socket, self._announced = await dial(self._url, ssl=self._ssl, options=Options())
                await self._authenticate(self._socket)
                await self._pin()
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

    @property
    def extensions(self) -> frozenset[str]:
        """The extensions that the relay announces."""
        return self._announced.extensions

    async def _read_pins(self) -> None:
        """Learn which DID this relay must have, and the addresses of others (R-298)."""
        if self._relay_id is None and self._pins is not None:
            self._relay_id = await asyncio.to_thread(self._pins.get, self._url)
            self._met = await asyncio.to_thread(self._pins.met)

    async def _pin(self) -> None:
        if self._pins is None or self._relay_id is None:
            return
        try:
            await asyncio.to_thread(self._pins.add, self._url, self._relay_id)
        except (OSError, IdentityError) as error:
            _log.warning("%s: the relay could not be pinned: %s", shown(self._url), error)

    async def _authenticate(self, socket: ClientConnection) -> None:
        challenges = 0
        while True:
            message = wire.decode_relay_message(await socket.recv())
            if isinstance(message, wire.AuthChallenge):
                challenges += 1
                if challenges > _MOST_CHALLENGES:
                    raise ConnectionFailed("the relay challenges again and again")
                check_challenge(message, expected_server_id=self._relay_id)
                if self._relay_id is None:
                    check_address(message.server_id, address_of(self._url), self._met)
                self._relay_id = message.server_id  # a later one of another relay would be forwarded
                self._announced = self._announced.learnt(message.extensions or ())
                answer = answer_challenge(
                    message, self._signer, capabilities=self._capabilities, client_msg_id=_AUTH
                )
                await socket.send(wire.encode(answer).decode())
            elif isinstance(message, wire.Error) and message.client_msg_id in _AUTH_OR_NONE:
                raise RequestRefused(message.code, message.reason, detail=message.detail)
            elif isinstance(message, wire.AuthOk) and message.client_msg_id in _AUTH_OR_NONE:
                if message.author_id != self._signer.did:
                    continue  # another identity's session is not ours
                self.granted = tuple(message.capabilities or ())
                self._announced = self._announced.learnt(message.extensions or ())
                return

    def _name(self) -> str:
        """A name for a request, unique in this session."""
        return f"q{next(self._names)}"

    async def _ask(
        self,
        message: wire.Moderate | wire.Reconcile,
        decode: Callable[[str | bytes], _Answer | wire.Error | None],
    ) -> _Answer | wire.Error:
        """Send a message under a new name and return its answer. Raises `ConnectionFailed`."""
        name = self._name()
        async with self._in_time():
            await self._send(msgspec.structs.replace(message, client_msg_id=name))
            while True:
                answer = decode(await self._receive())
                if answer is not None and answer.client_msg_id == name:
                    return answer

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """A block that raises `ConnectionFailed` if the connection breaks or if it takes longer than
        `timeout`."""
        try:
            async with PeerTimeout(self._timeout):
                yield
        except (OSError, TimeoutError, ConnectionClosed) as error:
            raise describe(error, self._url) from error

    async def _send(self, message: wire.ClientMessage) -> None:
        await self._open_socket().send(wire.encode(message).decode())

    async def _receive(self) -> str | bytes:
        return await self._open_socket().recv()

    def _open_socket(self) -> ClientConnection:
        if self._socket is None:
            raise ConnectionFailed("not connected")
        return self._socket

    async def _close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await hang_up(socket, _CLOSE_SECONDS)
