"""A session with a relay that lets this one replicate: which packets are there and not here?

    async with PeerSession("wss://relay.example/strata", identity, relay_id=did) as session:
        differences = await session.compare(items, since=…, until=…)

A connection of its own beside the one that reads, which asks one thing at a time (A-171).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl as ssl_module
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Final, Self

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, WebSocketException

from strata.protocol import wire
from strata.protocol.auth import answer_challenge, check_challenge
from strata.protocol.errors import ConnectionFailed, RequestRefused
from strata.protocol.ids import Signer
from strata.protocol.negentropy import ItemSet, NegentropyError, Reconciler
from strata.relays.connection.dialing import check_url, describe, hang_up, tls_context
from strata.relays.connection.dialing import dial as dial_relay
from strata.relays.connection.options import Options

__all__ = ["Differences", "PeerSession", "TooManyPackets"]

_FRAME_BYTES: Final = 30_000
"""Of a message before it is written in hex: fits into the smallest frame that a relay may insist on."""
_MOST_ROUNDS: Final = 5000
_CLOSE_SECONDS: Final = 5.0
_WANTED: Final = ("subscribe", "replicate")


class TooManyPackets(RequestRefused):
    """One comparison cannot hold all packets of this range: compare a shorter time."""


@dataclass(slots=True)
class Differences:
    """What one comparison has found, so far while it runs."""

    have: set[bytes] = field(default_factory=set)
    """Ids that are here and not there."""
    need: set[bytes] = field(default_factory=set)
    """Ids that are there and not here, by the other side's word."""
    rounds: int = 0
    bytes: int = 0
    """Of all messages, both ways."""
    is_cut: bool = False
    """The other side named more than may be taken: there are further differences."""


class PeerSession:
    """A session that asks for `replicate`. Open it with `async with`.

    `timeout`, in seconds, holds for opening and for each answer. `relay_id` is the DID the relay must have.
    """

    def __init__(
        self,
        url: str,
        signer: Signer,
        *,
        relay_id: str,
        ssl: ssl_module.SSLContext | None = None,
        timeout: float = 60.0,
    ) -> None:
        check_url(url)
        self._url = url
        self._signer = signer
        self._relay_id = relay_id
        self._ssl = tls_context(url, ssl)
        self._timeout = timeout
        self._socket: ClientConnection | None = None
        self._names = itertools.count(1)
        self.granted: tuple[str, ...] = ()
        """The capabilities that the relay has given this session."""
        self.extensions: frozenset[str] = frozenset()
        """The additions that the relay announces."""
        self.clock_ahead: int | None = None
        """How many seconds the clock of the relay is ahead, to a second or two; None: it does not say."""

    async def __aenter__(self) -> Self:
        """Connect and authenticate.

        Raises `ConnectionFailed`, `RequestRefused`, `InvalidMessage`, `IdentityError`. Cancelling closes the
        connection.
        """
        try:
            async with asyncio.timeout(self._timeout):
                socket, announced = await dial_relay(self._url, ssl=self._ssl, options=Options())
                self._socket, self.extensions = socket, frozenset(announced.extensions)
                self.clock_ahead = _ahead(socket)
                await self._authenticate(socket)
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

    async def compare(
        self,
        items: ItemSet,
        *,
        since: int,
        until: int,
        unexpired_at: int,
        types: tuple[str, ...] = (),
        authors: tuple[str, ...] = (),
        most_needed: int = 100_000,
        progress: Callable[[Differences], None] = lambda found: None,
    ) -> Differences:
        """Compare `items`, the packets here, with the relay's of the same range (`wire.Reconcile`).

        Ends early, with `is_cut`, once more than `most_needed` ids are wanted. Raises `TooManyPackets`,
        `RequestRefused`, `ConnectionFailed`, and `NegentropyError` for answers that are none. Cancelling ends
        it; the relay forgets the comparison after a while.
        """
        reconciler = Reconciler(items, max_frame_bytes=_FRAME_BYTES, shift=random.getrandbits(30))
        found = Differences()
        message: bytes | None = await asyncio.to_thread(reconciler.initiate)
        first = wire.Reconcile(
            message="",
            since=since,
            until=until,
            unexpired_at=unexpired_at,
            types=list(types) or None,
            authors=list(authors) or None,
        )
        while message is not None:
            if found.rounds >= _MOST_ROUNDS:
                raise NegentropyError("the other side never comes to an end")
            answer = await self._ask(message, first if not found.rounds else None)
            found.rounds += 1
            found.bytes += len(message) + len(answer)
            result = await asyncio.to_thread(reconciler.receive, answer)
            found.have.update(result.have)
            found.need.update(result.need)
            message = result.message
            if len(found.need) > most_needed:
                found.is_cut, message = True, None
            progress(found)
        return found

    async def newest(self) -> int | None:
        """When the relay received the last packet of its log, by its own clock; None for an empty log.

        Raises `RequestRefused` and `ConnectionFailed`.
        """
        name = f"n{next(self._names)}"
        filters = wire.Filters(limit=1, order="desc")
        ask = wire.Subscribe(subscription_id=name, filters=filters, history_marker=True, client_msg_id=name)
        newest: int | None = None
        try:
            async with asyncio.timeout(self._timeout):
                await self._send(wire.encode(ask))
                while True:
                    message = wire.decode_relay_message(await self._receive())
                    if isinstance(message, wire.Event) and message.subscription_id == name:
                        newest = message.received_at if newest is None else newest
                    elif isinstance(message, wire.EndOfHistory) and message.subscription_id == name:
                        break
                    elif isinstance(message, wire.Error) and message.client_msg_id == name:
                        raise RequestRefused(message.code, message.reason, detail=message.detail)
                await self._send(wire.encode(wire.Unsubscribe(subscription_id=name)))
        except (OSError, TimeoutError, ConnectionClosed) as error:
            raise describe(error, self._url) from error
        return newest

    async def _authenticate(self, socket: ClientConnection) -> None:
        while True:
            message = wire.decode_relay_message(await socket.recv())
            if isinstance(message, wire.AuthChallenge):
                check_challenge(message, expected_server_id=self._relay_id)
                self.extensions |= frozenset(message.extensions or ())
                answer = answer_challenge(message, self._signer, capabilities=_WANTED, client_msg_id="auth")
                await socket.send(wire.encode(answer).decode())
            elif isinstance(message, wire.AuthOk):
                self.granted = tuple(message.capabilities or ())
                self.extensions |= frozenset(message.extensions or ())
                return
            elif isinstance(message, wire.Error) and message.client_msg_id == "auth":
                raise RequestRefused(message.code, message.reason, detail=message.detail)

    async def _ask(self, message: bytes, first: wire.Reconcile | None) -> bytes:
        name = f"r{next(self._names)}"
        base = first or wire.Reconcile(message="")
        ask = wire.Reconcile(
            message=message.hex(),
            since=base.since,
            until=base.until,
            unexpired_at=base.unexpired_at,
            types=base.types,
            authors=base.authors,
            client_msg_id=name,
        )
        try:
            async with asyncio.timeout(self._timeout):
                await self._send(wire.encode(ask))
                while True:
                    answer = wire.decode_reconciled(await self._receive())
                    if answer is not None and answer.client_msg_id == name:
                        break
        except (OSError, TimeoutError, ConnectionClosed) as error:
            raise describe(error, self._url) from error
        if isinstance(answer, wire.Error):
            kind = TooManyPackets if answer.detail == "reconcile_too_large" else RequestRefused
            raise kind(answer.code, answer.reason, detail=answer.detail, retry_after=answer.wait_seconds)
        try:
            return bytes.fromhex(answer.message)
        except ValueError:
            raise NegentropyError("the answer is not in hex") from None

    async def _send(self, frame: bytes) -> None:
        await self._open_socket().send(frame.decode())

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


def _ahead(socket: ClientConnection) -> int | None:
    """By the date of the relay's handshake."""
    said = None if socket.response is None else socket.response.headers.get("Date")
    try:
        return None if said is None else round(parsedate_to_datetime(said).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
