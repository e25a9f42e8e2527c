"""Comparing packets with a relay that lets this one replicate: which packets are there and not here?

    async with PeerSession("wss://relay.example/strata", identity, relay_id=did) as session:
        differences = await session.compare(items, since=…, until=…)

The session is a separate connection, beside the one that reads, with one request at a time (A-171).
"""

from __future__ import annotations

import asyncio
import random
import ssl as ssl_module
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final

import msgspec
from websockets.asyncio.client import ClientConnection

from strata.protocol import wire
from strata.protocol.errors import RequestRefused
from strata.protocol.ids import Signer
from strata.protocol.negentropy import ItemSet, NegentropyError, Reconciler
from strata.relays.connection.dialogue import Dialogue

__all__ = ["Differences", "PeerSession", "TooManyPackets"]

_FRAME_BYTES: Final = 30_000
"""The largest message before hex encoding: it fits the smallest frame limit that a relay may have."""
_MOST_ROUNDS: Final = 5000
_WANTED: Final = ("subscribe", "replicate")


class TooManyPackets(RequestRefused):
    """The range has too many packets for one comparison: compare a shorter time."""


@dataclass(slots=True)
class Differences:
    """What one comparison has found; while it runs, so far."""

    have: set[bytes] = field(default_factory=set)
    """Ids that are here and not there."""
    need: set[bytes] = field(default_factory=set)
    """Ids that, according to the other side, are there and not here."""
    rounds: int = 0
    bytes: int = 0
    """The size of all messages in both directions."""
    is_cut: bool = False
    """Whether the comparison ended early, because the other side named too many ids: there may be further
    differences."""


class PeerSession(Dialogue):
    """A session that requests the capability `replicate`. Open it with `async with`.

    `timeout`, in seconds, applies to opening and to each answer. `relay_id` is the DID the relay must have.
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
        super().__init__(url, signer, relay_id=relay_id, ssl=ssl, timeout=timeout, capabilities=_WANTED)
        self.clock_ahead: int | None = None
        """How many seconds the relay's clock is ahead, to within a second or two; None if it does not say."""

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
        """Compare `items`, the packets here, with the relay's packets of the same range (`wire.Reconcile`).

        Ends early, with `is_cut`, once more than `most_needed` ids are needed. Raises `TooManyPackets`,
        `RequestRefused`, `ConnectionFailed`, and `NegentropyError` for invalid answers. Cancelling ends the
        comparison; the relay forgets it after a while.
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
            answer = await self._exchange(message, wire.Reconcile(message="") if found.rounds else first)
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

    async def newest(
        self, *, types: Sequence[str] = (), authors: Sequence[str] = (), not_via: Sequence[str] = ()
    ) -> int | None:
        """Return when a relay first received the last packet of this relay's log; None if there is none.

        `types`, `authors` and `not_via` restrict the packets as in a `Query`. Raises `RequestRefused` and
        `ConnectionFailed`.
        """
        name = self._name()
        filters = wire.Filters(
            limit=1,
            order="desc",
            types=list(types) or None,
            authors=list(authors) or None,
            not_via=list(not_via) or None if "not_via" in self.extensions else None,
        )
        ask = wire.Subscribe(subscription_id=name, filters=filters, history_marker=True, client_msg_id=name)
        newest: int | None = None
        async with self._in_time():
            await self._send(ask)
            while True:
                message = wire.decode_relay_message(await self._receive())
                if isinstance(message, wire.Event) and message.subscription_id == name:
                    newest = message.received_at if newest is None else newest
                elif isinstance(message, wire.EndOfHistory) and message.subscription_id == name:
                    break
                elif isinstance(message, wire.Error) and message.client_msg_id == name:
                    raise RequestRefused(message.code, message.reason, detail=message.detail)
            await self._send(wire.Unsubscribe(subscription_id=name))
        return newest

    async def _authenticate(self, socket: ClientConnection) -> None:
        self.clock_ahead = _ahead(socket)  # first, because authenticating takes time
        await super()._authenticate(socket)

    async def _exchange(self, message: bytes, comparison: wire.Reconcile) -> bytes:
        """Send a message of a comparison in `comparison`, which begins or continues it; return the answer."""
        asked = msgspec.structs.replace(comparison, message=message.hex())
        answer = await self._ask(asked, wire.decode_reconciled)
        if isinstance(answer, wire.Error):
            kind = TooManyPackets if answer.detail == "reconcile_too_large" else RequestRefused
            raise kind(answer.code, answer.reason, detail=answer.detail, retry_after=answer.wait_seconds)
        try:
            return bytes.fromhex(answer.message)
        except ValueError:
            raise NegentropyError("the answer is not in hex") from None


def _ahead(socket: ClientConnection) -> int | None:
    """How far the relay's clock is ahead, in seconds, by the date of its handshake."""
    said = None if socket.response is None else socket.response.headers.get("Date")
    try:
        return None if said is None else round(parsedate_to_datetime(said).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
