"""Comparing sets with relays that replicate: RECONCILE over the wire (A-171, decision 68).

A peer begins with a range of time. This relay reads the ids that it serves of that range, and answers each
negentropy message from them until the peer has heard enough. It names nothing else, because the peer takes
each id for a promise to send the packet (decision 69). The cost that a peer may cause is bounded:

- Each identity has one comparison, the newest, and a process has few (`comparisons`). Each comparison holds a
  limited number of items, and ends after a minute without a message, or once it has been open for long and
  another identity wants to compare.
- Pages of ids wait for the socket, the budgets and the account's turn at the database, as pages of history
  do. Sets are sorted and messages answered in a thread, and the account pays for the thread's time.
- A session has one request at a time: the answer is sent before the next request is taken.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final, Protocol

from strata.protocol.errors import ErrorCode, InvalidMessage
from strata.protocol.negentropy import ItemSet, NegentropyError, Reconciler
from strata.protocol.wire import Error, Reconcile, Reconciled, encode

from relayd.access.auth import REPLICATE
from relayd.frames import text_frame
from relayd.item_sets import TooManyItems, gather, in_thread
from relayd.relay import RunningRelay
from relayd.sessions.answers import error_payload, missing_payload
from relayd.sessions.session import Session
from relayd.sessions.websocket import WebSocket
from relayd.store.items import ItemRange
from relayd.store.payers import Asker
from relayd.store.types import StoreError

__all__ = ["Comparer"]

_MOST_VALUES: Final = 64
_ANSWER_BYTES: Final = 200_000
_IDLE_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 15
_ROW_BYTES: Final = 40
"""What an item counts for in the bytes of history that the account may read."""
_ITEM_BYTES: Final = 150


class _Peer(Asker, Protocol):
    @property
    def id(self) -> int: ...

    def answer(self, payload: bytes, code: ErrorCode) -> None: ...

    def failed(self, place: str, error: Exception, reason: str, client_msg_id: str | None = None) -> None: ...

    async def writable(self) -> None: ...

    def backfilled(self, sent_bytes: int) -> None: ...


class _Superseded(Exception):
    """Another session of the identity, or another identity, compares now."""


class Comparer:
    """The comparison of one session; `close` releases it."""

    __slots__ = (
        "_connection",
        "_has_made_way",
        "_held_bytes",
        "_idle",
        "_lost_place",
        "_reconciler",
        "_relay",
        "_session",
        "_socket",
        "_task",
    )

    def __init__(self, relay: RunningRelay, connection: _Peer, socket: WebSocket, session: Session) -> None:
        self._relay = relay
        self._connection = connection
        self._session = session
        self._socket = socket
        self._reconciler: Reconciler | None = None
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._held_bytes = 0
        self._has_made_way = False
        self._lost_place = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """The approximate memory of the set, in bytes."""
        return self._held_bytes if self._reconciler is not None else 0

    def receive(self, message: Reconcile) -> None:
        """Begin a request. A request that arrives while another is under way is refused."""
        if self._task is not None:
            self._refuse(message, "reconcile_busy", retry_after=1)
            return
        if self._idle is not None:
            self._idle.cancel()
        self._task = asyncio.create_task(self._run(message), name=f"reconcile-{self._connection.id}")

    def close(self) -> None:
        """Release the comparison. Idempotent."""
        self._drop()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def superseded(self) -> None:
        """Another session of the identity begins a comparison: end this one, and release its set at once."""
        self._lost_place.set()
        self._drop()

    def makes_way(self) -> None:
        """Another identity wants to compare: end this one, which may begin again later."""
        self._has_made_way = True
        self._lost_place.set()
        self._drop()

    def _drop(self) -> None:
        self._reconciler = None
        self._relay.comparisons.end(self)
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    async def _run(self, message: Reconcile) -> None:
        try:
            try:
                await self._answer(message)
            except InvalidMessage as error:
                self._connection.answer(error_payload(error), error.code)
            except _Superseded:
                self._refuse(message, "reconcile_busy", retry_after=_RETRY_SECONDS)
            except TooManyItems:
                self._drop()
                self._refuse(message, "reconcile_too_large", limit=self._relay.settings.reconcile_max_items)
            except StoreError:
                self._drop()
                away = _refused(message, "the database cannot be read now", ErrorCode.INTERNAL_ERROR)
                self._connection.answer(error_payload(away), away.code)
            self._task = None
            if self._reconciler is None:
                self._drop()  # a refused comparison holds no place
            else:
                self._idle = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._drop)
            self._socket.outbox.flush()
        except Exception as fault:
            self._task = None
            self._drop()
            reason = "internal error; compare again"
            self._connection.failed("message", fault, reason, message.client_msg_id)

    async def _answer(self, message: Reconcile) -> None:
        data = _bytes_of(message)
        if message.until is not None:
            self._reconciler = None
            if not self._begin():
                self._drop()
                self._refuse(message, "reconcile_busy", retry_after=_RETRY_SECONDS)
                return
            self._has_made_way = False
            self._lost_place.clear()
            items = await self._items(_range_of(message, self._relay.clock()))
            self._check_open()
            # The borders differ each time, so that nobody can hide a difference behind ids whose sums agree.
            shift = random.getrandbits(30)
            self._reconciler = Reconciler(items, max_frame_bytes=_ANSWER_BYTES, shift=shift)
        reconciler = self._reconciler
        if self._has_made_way:
            raise _Superseded
        if reconciler is None or not self._relay.comparisons.holds(self):
            self._drop()
            raise _refused(message, "no comparison is open: begin with `until`")
        await self._writable()
        try:
            answer = await in_thread(lambda: reconciler.respond(data), self._connection)
        except NegentropyError as error:
            self._drop()
            raise _refused(message, str(error)) from None
        if not self._session.may_reconcile:  # the session has lost the capability meanwhile
            self._drop()
            missing = missing_payload(REPLICATE, message.client_msg_id)
            self._connection.answer(missing, ErrorCode.UNAUTHENTICATED)
            return
        frame = text_frame(encode(Reconciled(message=answer.hex(), client_msg_id=message.client_msg_id)))
        self._connection.backfilled(len(frame))
        self._socket.outbox.queue(frame)

    async def _pace(self) -> None:
        self._check_open()
        await self._writable()

    async def _writable(self) -> None:
        """Wait until the peer takes what it was sent. Raises `_Superseded` once the comparison has lost its
        place: a peer that reads nothing must not have the set held meanwhile."""
        waits = [
            asyncio.ensure_future(wait) for wait in (self._connection.writable(), self._lost_place.wait())
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not waits[0].done() or waits[0].cancelled():
            raise _Superseded
        waits[0].result()

    def _check_open(self) -> None:
        if not self._relay.comparisons.holds(self):
            raise _Superseded

    def _begin(self) -> bool:
        identity = self._session.identity
        assert identity is not None  # only such a session may replicate
        return self._relay.comparisons.begin(identity, self, asyncio.get_running_loop().time())

    async def _items(self, span: ItemRange) -> ItemSet:
        relay, connection = self._relay, self._connection
        most = relay.settings.reconcile_max_items
        items = await gather(relay.store, span, max_items=most, asker=connection, pace=self._pace)
        connection.backfilled(_ROW_BYTES * len(items))
        self._held_bytes = _ITEM_BYTES * len(items)
        return items

    def _refuse(
        self, message: Reconcile, detail: str, *, retry_after: int | None = None, limit: int | None = None
    ) -> None:
        reasons = {
            "reconcile_busy": "other comparisons are under way",
            "reconcile_too_large": "one comparison cannot hold so many packets; compare a shorter time",
        }
        error = Error(
            code=ErrorCode.RATE_LIMITED,
            reason=reasons[detail],
            detail=detail,
            client_msg_id=message.client_msg_id,
            retry_after=retry_after,
            limit=limit,
        )
        self._relay.metrics.rate_limited["reconcile"].inc()
        self._connection.answer(encode(error), ErrorCode.RATE_LIMITED)


def _bytes_of(message: Reconcile) -> bytes:
    try:
        return bytes.fromhex(message.message)
    except ValueError:
        raise _refused(message, "message is not in hex") from None


def _range_of(message: Reconcile, now: int) -> ItemRange:
    types, authors = tuple(set(message.types or ())), tuple(set(message.authors or ()))
    if len(types) + len(authors) > _MOST_VALUES:
        raise _refused(message, f"more than {_MOST_VALUES} types and authors")
    assert message.until is not None
    return ItemRange(message.since or 0, message.until, max(message.unexpired_at or 0, now), types, authors)


def _refused(message: Reconcile, reason: str, code: ErrorCode = ErrorCode.INVALID_SCHEMA) -> InvalidMessage:
    return InvalidMessage(f"RECONCILE: {reason}"[:300], code=code, client_msg_id=message.client_msg_id)
