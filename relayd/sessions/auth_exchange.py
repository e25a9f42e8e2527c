"""AUTH on one connection: the asyncio part, as an identity's keys may have to be read from the log first.

During the read, the messages behind the AUTH wait, and nothing more is read from the peer. So an AUTH and the
PUBLISH behind it may travel together, and the PUBLISH meets the outcome (R-133). The bytes that wait are
those that the socket had already delivered, a few hundred kilobytes at most.

If an identity cannot be looked up in time, this does not count as a failure of the peer: the peer receives
`internal_error`, keeps its count of failures, and gets a fresh challenge.

About once a second `review` checks whether the grounds on which the session was admitted still hold: its key,
its place among members and peers, the origin of the web page that opened it (decision 41). While a changed
chain cannot be read, the session stays: the feed, which brings every revocation, is then at a standstill too.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from typing import Final, Protocol

from strata.protocol.errors import ErrorCode, InvalidMessage
from strata.protocol.keys import KeyChain, Use
from strata.protocol.wire import Auth, encode

from relayd import failpoints
from relayd.access.auth import CHALLENGE_BYTES, AuthAttempt, Proof, verify_attempt
from relayd.access.gate import Visitor
from relayd.frames import text_frame
from relayd.relay import RunningRelay
from relayd.sessions.actions import (
    AuthAccepted,
    AuthRefused,
    CloseConnection,
    Reply,
)
from relayd.sessions.answers import error_payload
from relayd.sessions.session import Session
from relayd.sessions.websocket import WebSocket
from relayd.store.payers import Asker
from relayd.store.types import StoreError

__all__ = ["AuthExchange", "AuthenticatingPeer"]

_RESOLVE_TIMEOUT: Final = 4.0
"""How long looking up an identity may take: less than clients wait for an answer (R-280, R-295)."""


class AuthenticatingPeer(Asker, Protocol):
    """A connection, as seen by its AUTHs."""

    @property
    def id(self) -> int:
        """The connection's number in the logs."""

    def answer(self, payload: bytes, code: ErrorCode) -> None:
        """Queue an ERROR."""

    def failed(self, place: str, error: Exception, reason: str, client_msg_id: str | None = None) -> None:
        """Report a fault of ours on a message to the peer, and end the connection."""

    async def authenticated(self, outcome: AuthAccepted) -> None:
        """The session now speaks for another identity. Cancel this only if the connection has ended."""

    def regranted(self) -> None:
        """The settings have changed: update what the session may do."""


class AuthExchange:
    """The challenges sent and the AUTHs received on one connection."""

    __slots__ = (
        "_connection",
        "_generation",
        "_holds_since",
        "_holds_until",
        "_proof",
        "_relay",
        "_review",
        "_revision",
        "_session",
        "_socket",
        "_task",
        "_visitor",
    )

    def __init__(
        self,
        relay: RunningRelay,
        connection: AuthenticatingPeer,
        socket: WebSocket,
        session: Session,
        visitor: Visitor,
    ) -> None:
        self._relay = relay
        self._connection = connection
        self._socket = socket
        self._session = session
        self._visitor = visitor
        self._task: asyncio.Task[None] | None = None
        self._revision = relay.access.revision
        self._proof: Proof | None = None
        # The key was good in this generation of the directory, and is until this second if no packet comes.
        self._generation = 0
        self._holds_since, self._holds_until = 0, math.inf
        self._review: asyncio.Task[None] | None = None

    def challenge(self) -> None:
        """Queue a new challenge (R-266, R-268)."""
        random = secrets.token_bytes(CHALLENGE_BYTES)
        message = self._session.authentication.issue(random, self._relay.clock())
        self._socket.outbox.queue(text_frame(encode(message)))

    def check_deadline(self) -> None:
        """Give an anonymous session a new challenge if its current one is too old (R-282)."""
        if self._session.authentication.wants_challenge(self._relay.clock()):
            self.challenge()

    def review(self) -> None:
        """Apply to the session what has changed since it was admitted. Called about once a second."""
        revision = self._relay.access.revision
        if revision != self._revision:
            is_over = self._follow()
            self._revision = revision  # last, so that whatever has failed on the way is tried again
            if is_over:
                return
        if self._proof is not None and self._review is None and self._is_doubtful():
            self._review_key(self._proof)

    def _follow(self) -> bool:
        """Apply the current bans and settings to the session, and return whether it is over."""
        access = self._relay.access
        if not access.takes_origin(self._visitor):
            error = InvalidMessage(
                "this relay takes no connections from that origin any more",
                code=ErrorCode.POLICY_REJECTED,
                detail="origin",
            )
            self._withdraw(error)
            return True
        if access.is_banned_address(self._visitor):
            self._withdraw(
                InvalidMessage(
                    "this relay takes no connections from that address any more",
                    code=ErrorCode.POLICY_REJECTED,
                    detail="banned_address",
                )
            )
            return True
        if (identity := self._session.identity) is not None:
            if access.is_banned_author(identity):
                self._withdraw(_banned(None))
                return True
            access.reconsider(self._visitor, identity, time.monotonic())
        self._connection.regranted()
        return False

    def _is_doubtful(self) -> bool:
        """Whether the key may have become invalid since it was looked up."""
        identities, identity = self._relay.identities, self._session.identity
        assert identity is not None
        if not self._holds_since <= self._relay.clock() < self._holds_until:
            return True
        generation = identities.generation
        if generation == self._generation:
            return False
        if not identities.is_plain(identity) and identities.changed_since(identity, self._generation):
            return True
        self._generation = generation
        return False

    def _review_key(self, proof: Proof) -> None:
        identity = self._session.identity
        assert identity is not None
        chain = self._relay.identities.chain(identity)
        if chain is not None:
            self._judge(proof, chain)
        else:
            self._review = asyncio.create_task(
                self._load(proof, identity), name=f"keys-{self._connection.id}"
            )

    async def _load(self, proof: Proof, identity: str) -> None:
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT):
                # Not in the peer's turn: its AUTHs would put off the end of a session whose key is revoked.
                chain = await self._relay.identities.resolve(identity, self._connection, in_turn=False)
        except (StoreError, TimeoutError):
            return  # the next review asks again
        except Exception as error:
            self._relay.faults.caught("auth", error)
            return
        finally:
            self._review = None
        if proof is self._proof:  # the session has not authenticated again meanwhile
            self._judge(proof, chain)

    def _judge(self, proof: Proof, chain: KeyChain) -> None:
        now = self._relay.clock()
        broken = proof.broken(chain, now)
        if broken is not None:
            self._withdraw(broken)
        else:
            self._proved(proof, chain, now)

    def _proved(self, proof: Proof, chain: KeyChain, now: int) -> None:
        self._proof = proof
        self._generation = self._relay.identities.generation
        self._holds_since, self._holds_until = now, chain.holds_until(now, Use.AUTH)

    def _withdraw(self, error: InvalidMessage) -> None:
        """End the connection: the grounds on which it was admitted no longer hold."""
        self._proof = None
        self._connection.answer(error_payload(error), error.code)
        self._socket.close(1008, error.reason, "withdrawn")

    def receive(self, message: Auth, now: float) -> None:
        """Take an AUTH. The connection is suspended while the AUTH's signature is checked."""
        begun = self._session.begin_auth(message, now, self._relay.clock())
        if isinstance(begun, AuthAttempt):
            self._socket.suspend()
            self._task = asyncio.create_task(self._run(begun), name=f"auth-{self._connection.id}")
        else:
            self._apply(begun)

    def close(self) -> None:
        """The connection has ended: forget any AUTH under way."""
        for task in (self._task, self._review):
            if task is not None:
                task.cancel()
        self._task = self._review = None

    async def _run(self, attempt: AuthAttempt) -> None:
        """Report the outcome to the peer in every case: the connection is suspended until then."""
        try:
            outcome = await self._outcome(attempt)
            if isinstance(outcome, AuthAccepted):
                self._relay.metrics.auths["ok"].inc()
                await self._connection.authenticated(outcome)
                self._task = None
            else:
                self._task = None
                self._apply(outcome)
            self._socket.resume()
        except Exception as error:
            self._task = None
            reason = "internal error; authenticate again"
            self._connection.failed("auth", error, reason, attempt.client_msg_id)

    async def _outcome(self, attempt: AuthAttempt) -> AuthAccepted | AuthRefused | CloseConnection:
        relay = self._relay
        try:
            if failpoints.ARMED:
                await failpoints.reached("sessions.auth")
            async with asyncio.timeout(_RESOLVE_TIMEOUT):
                keys = await relay.identities.resolve(attempt.author_id, self._connection)
            now = relay.clock()
            proof = verify_attempt(attempt, keys, now)
            self._proved(proof, keys, now)
        except InvalidMessage as error:
            return self._session.auth_failed(error)
        except (StoreError, TimeoutError):
            return _unavailable(attempt)
        except Exception as error:
            relay.faults.caught("auth", error)
            return _unavailable(attempt)
        if relay.access.is_banned_author(attempt.author_id):
            self._proof = None
            refusal = _banned(attempt.client_msg_id)
            return CloseConnection(error_payload(refusal), refusal.code, 1008, refusal.reason, "banned")
        capabilities = relay.access.grants.effective(attempt.author_id, attempt.requested)
        relay.access.authenticated(self._visitor, attempt.author_id, time.monotonic())
        return self._session.authenticated(attempt, capabilities)

    def _apply(self, outcome: Reply | AuthRefused | CloseConnection) -> None:
        metrics = self._relay.metrics
        metrics.auths[outcome.code].inc()
        self._connection.answer(outcome.payload, outcome.code)
        match outcome:
            case AuthRefused():
                self.challenge()
            case CloseConnection():
                self._socket.close(outcome.close_code, outcome.reason, outcome.cause)
            case Reply():
                metrics.rate_limited["auth"].inc()


def _banned(client_msg_id: str | None) -> InvalidMessage:
    """The refusal of a banned author, with the same code as for the author's packets (R-186)."""
    return InvalidMessage(
        "this relay serves no sessions of this author",
        code=ErrorCode.BLOCKED_AUTHOR,
        client_msg_id=client_msg_id,
    )


def _unavailable(attempt: AuthAttempt) -> AuthRefused:
    error = InvalidMessage(
        "the identity could not be looked up now; authenticate again",
        code=ErrorCode.INTERNAL_ERROR,
        detail="store_unavailable",
        client_msg_id=attempt.client_msg_id,
    )
    return AuthRefused(error_payload(error), error.code)
