"""The desk of one operator's session: MODERATE over the wire (decision 61).

A request reads or writes the database, and the session waits meanwhile: nothing more is read from it until
the answer is queued. So a session has one request at a time, and its answers come in order. A ruling made
here takes the same path as one made by the command, and goes to the same log, under the operator's DID.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import msgspec
from strata.protocol.errors import ErrorCode, InvalidMessage
from strata.protocol.wire import Moderate, Moderated, encode

from relayd.frames import text_frame
from relayd.moderation import Ban, ClosedSession, Ruled, SubjectKind, check_reason, subject_of
from relayd.relay import RunningRelay
from relayd.roll import MAX_SESSIONS, Question, session_id
from relayd.sessions.answers import error_payload
from relayd.sessions.session import Session
from relayd.sessions.websocket import WebSocket
from relayd.store.moderation import Ruling
from relayd.store.types import StoreError

__all__ = ["Desk"]

_PAGE: Final = 100
_NUL: Final = "no text here has a NUL"
_CURSOR: Final[msgspec.json.Decoder[tuple[str, str]]] = msgspec.json.Decoder(tuple[str, str])


class _Peer(Protocol):
    @property
    def id(self) -> int: ...

    def answer(self, payload: bytes, code: ErrorCode) -> None: ...

    def failed(self, place: str, error: Exception, reason: str, client_msg_id: str | None = None) -> None: ...


class Desk:
    """Takes one request at a time; `close` forgets a request under way, which may still take effect."""

    __slots__ = ("_connection", "_relay", "_session", "_socket", "_task")

    def __init__(self, relay: RunningRelay, connection: _Peer, socket: WebSocket, session: Session) -> None:
        self._relay = relay
        self._connection = connection
        self._socket = socket
        self._session = session
        self._task: asyncio.Task[None] | None = None

    def receive(self, message: Moderate) -> None:
        """Begin a request. Until it is answered, the connection is suspended."""
        self._socket.suspend()
        self._task = asyncio.create_task(self._run(message), name=f"moderate-{self._connection.id}")

    def close(self) -> None:
        """The connection has ended."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, message: Moderate) -> None:
        try:
            try:
                answer = await self._answer(message)
                self._socket.outbox.queue(text_frame(encode(answer)))
            except InvalidMessage as error:
                self._connection.answer(error_payload(error), error.code)
            except StoreError:
                away = _refused(message, "the database cannot be reached now", ErrorCode.INTERNAL_ERROR)
                self._connection.answer(error_payload(away), away.code)
            self._task = None
            self._socket.resume()
        except Exception as fault:
            self._task = None
            reason = "internal error; look at the log of rulings"
            self._connection.failed("message", fault, reason, message.client_msg_id)

    async def _answer(self, message: Moderate) -> Moderated:
        if "\x00" in (message.subject or "") + (message.after or ""):
            raise _refused(message, _NUL)
        match message.action:
            case "ban" | "unban":
                return await self._rule(message)
            case "list":
                return await self._list(message)
            case "sessions":
                return await self._sessions(message)
            case "close":
                return await self._close_session(message)
            case _:
                return await self._log(message)

    async def _rule(self, message: Moderate) -> Moderated:
        actor = self._session.identity
        assert actor is not None
        if message.kind is None or message.subject is None:
            raise _refused(message, "kind and subject are needed")
        try:
            kind = SubjectKind(message.kind)
            subject = subject_of(kind, message.subject)
            reason = check_reason(message.reason or "")
        except ValueError as error:
            raise _refused(message, str(error)) from None
        bans, now = message.action == "ban", self._relay.clock()
        if bans and subject in self._relay.access.grants.operators:
            raise _refused(message, "an operator is not banned over the wire", ErrorCode.POLICY_REJECTED)
        if bans and message.expires_at is not None and message.expires_at < now:
            raise _refused(message, "expires_at is over")
        ruling = Ruling(kind, subject, bans, reason, actor, "wire", message.expires_at if bans else None)
        (changed,) = await self._relay.store.moderation.rule([ruling], now)
        return Moderated(action=message.action, client_msg_id=message.client_msg_id, changed=changed)

    async def _list(self, message: Moderate) -> Moderated:
        limit, after = message.limit or _PAGE, ("", "")
        if message.after is not None:
            try:
                after = _CURSOR.decode(message.after)
            except msgspec.MsgspecError:
                raise _refused(message, "after is no `next` of a list") from None
            if "\x00" in "".join(after):  # JSON may write it as an escape
                raise _refused(message, _NUL)
        kind = None if message.kind is None else SubjectKind(message.kind)
        found = await self._relay.store.moderation.bans(
            self._relay.clock(), kind=kind, after=after, limit=limit
        )
        last = (
            msgspec.json.encode((found[-1].kind, found[-1].subject)).decode() if len(found) == limit else None
        )
        return _page(message, [ban._asdict() for ban in found], last)

    async def _sessions(self, message: Moderate) -> Moderated:
        store, kind = self._relay.store, message.kind
        if kind not in (None, "author", "network") or (kind is None) is not (message.subject is None):
            raise _refused(message, "sessions are of an author or of a network, with its subject, or all")
        try:
            question = Question(
                limit=min(message.limit or _PAGE, MAX_SESSIONS),
                after=message.after,
                identity=message.subject if kind == "author" else None,
                network=message.subject if kind == "network" else None,
            )
        except ValueError as error:
            raise _refused(message, str(error)) from None
        roll = await store.roll.ask(question)
        own = session_id(store.roll.process, self._connection.id)
        entries = [{**msgspec.structs.asdict(each), "own": each.id == own} for each in roll.sessions]
        page = _page(message, entries, roll.next)
        return msgspec.structs.replace(page, total=roll.total, silent=roll.silent)

    async def _close_session(self, message: Moderate) -> Moderated:
        actor, store = self._session.identity, self._relay.store
        assert actor is not None
        try:
            question = Question(session=message.subject or "")
            reason = check_reason(message.reason or "")
        except ValueError as error:
            raise _refused(message, str(error)) from None
        roll = await store.roll.ask(question)
        if roll.silent:
            late = "the process of that session does not answer now"
            raise _refused(message, late, ErrorCode.INTERNAL_ERROR)
        for session in roll.sessions:
            if session.identity != actor and session.identity in self._relay.access.grants.operators:
                whose = "an operator's session is not closed over the wire"
                raise _refused(message, whose, ErrorCode.POLICY_REJECTED)
            now = self._relay.clock()
            await store.moderation.close(session, reason=reason, actor=actor, via="wire", now=now)
        changed = bool(roll.sessions)
        return Moderated(action=message.action, client_msg_id=message.client_msg_id, changed=changed)

    async def _log(self, message: Moderate) -> Moderated:
        limit = message.limit or _PAGE
        try:
            before = None if message.after is None else int(message.after[:18])
        except ValueError:
            raise _refused(message, "after is no `next` of a log") from None
        found = await self._relay.store.moderation.log(before=before, subject=message.subject, limit=limit)
        last = str(found[-1].number) if len(found) == limit else None
        return _page(message, [_plain(line) for line in found], last)


def _page(message: Moderate, entries: list[dict[str, object]], last: str | None) -> Moderated:
    return Moderated(action=message.action, client_msg_id=message.client_msg_id, entries=entries, next=last)


def _plain(line: Ruled) -> dict[str, object]:
    def plain(ban: Ban | ClosedSession | None) -> dict[str, object] | None:
        return None if ban is None else ban._asdict()

    return {**line._asdict(), "before": plain(line.before), "after": plain(line.after)}


def _refused(message: Moderate, reason: str, code: ErrorCode = ErrorCode.INVALID_SCHEMA) -> InvalidMessage:
    return InvalidMessage(f"MODERATE: {reason}"[:300], code=code, client_msg_id=message.client_msg_id)
