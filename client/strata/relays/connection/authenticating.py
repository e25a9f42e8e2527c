"""One relay session's authentication, seen from the client: no I/O, no clock (RFC-0004 §3.7).

    UNAUTHENTICATED ──AUTH──▶ AUTHENTICATING ──AUTH_OK──▶ AUTHENTICATED
           ▲                        │                          │
           ├─── ERROR, silence ─────┘                          │
           └─────────────────────── connection lost ───────────┘

Only AUTH_OK leads to AUTHENTICATED (R-293): the absence of an ERROR is no success (R-297), and neither is an
answer that comes too late. Authentication ends with the connection (R-284).

A relay sends challenges when it likes, and the client keeps the latest. A challenge is answered once, and
only after `check_challenge`. Authentication is *wanted* from the moment somebody asks for it, over all
further connections. While it is wanted and undecided the machine is *pending*: it waits for a challenge, for
the relay's answer, or for the end of a backoff, each with a deadline. It ends in `Authenticated` or in the
error that says why not; after that, this connection is left as it is unless somebody asks again.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

from strata.protocol import auth, wire
from strata.protocol.errors import (
    ErrorCode,
    IdentityError,
    InvalidMessage,
    MissingCapability,
    RequestRefused,
    RequestTimeout,
    Retry,
    StrataError,
)
from strata.protocol.ids import Signer
from strata.relays.backoff import MAX_RETRY_AFTER_SECONDS, retry_delay
from strata.relays.connection.options import Options
from strata.relays.connection.values import Authenticated, Statistics

__all__ = ["AuthState", "Authenticating"]

_MAX_ATTEMPTS = 3
"""AUTHs sent on one connection. A relay closes for good after five failures (R-282)."""

_CLOCK_ERROR_SECONDS = 5.0
"""How far our clock and the way here may shorten a lifetime before the relay is blamed for it (R-273)."""


class AuthState(enum.Enum):
    """Where authentication stands, by the relay's word alone (R-293)."""

    UNAUTHENTICATED = "unauthenticated"
    AUTHENTICATING = "authenticating"
    AUTHENTICATED = "authenticated"


_MOVES: dict[AuthState, frozenset[AuthState]] = {
    AuthState.UNAUTHENTICATED: frozenset({AuthState.AUTHENTICATING}),
    AuthState.AUTHENTICATING: frozenset({AuthState.UNAUTHENTICATED, AuthState.AUTHENTICATED}),
    AuthState.AUTHENTICATED: frozenset({AuthState.UNAUTHENTICATED}),
}


@dataclass(frozen=True, slots=True)
class _Challenge:
    """The latest challenge and until when, on our clock, there is a point in answering it."""

    message: wire.AuthChallenge
    usable_until: float


class Authenticating:
    """Answers challenges for one relay, across connections; appends frames to `outbox`.

    `signer` None means that there is no identity to authenticate as. `server_id` is the DID the relay must
    show (R-298); None takes the first one shown, and holds the relay to it from then on. `met` holds the DIDs
    of relays met before, each with its address: one of them, shown at this `address` for the first time, is
    somebody who passes on that relay's challenge, so nothing is signed. `random` gives values in [0, 1), for
    jitter.
    """

    def __init__(
        self,
        signer: Signer | None,
        options: Options,
        statistics: Statistics,
        *,
        server_id: str | None,
        address: str,
        met: MutableMapping[str, str],
        random: Callable[[], float],
        outbox: list[bytes],
    ) -> None:
        self.state = AuthState.UNAUTHENTICATED
        self.session: Authenticated | None = None
        """Whom the relay takes this session for, and what it may do; None unless AUTHENTICATED."""
        self.error: StrataError | None = None
        """Why authentication failed on this connection; None while it has not."""
        self.server_id = server_id
        """The DID the relay is held to; None while nothing is known."""
        self.wake_at = math.inf
        """When `handle_timer` has work to do."""
        self.is_pending = False
        """Whether authentication is under way: asked for, possible, and neither granted nor failed."""
        self.decisions = 0
        """How often it has been granted or has failed; the owner compares."""
        self.relay_ahead: float | None = None
        """How far the relay's clock, in Unix seconds, is ahead of our monotonic one, at the most.

        None while it has sent no challenge."""
        self._address = address
        self._met = met
        self._signer = signer
        self._capabilities: Sequence[str] | None = options.capabilities
        self._options = options
        self._statistics = statistics
        self._random = random
        self._outbox = outbox
        self._wanted = options.authenticate == "always"
        self._connected = False
        self._claimed: str | None = None  # the manifest's relay_id
        self._clock_offset = 0.0  # Unix time minus our monotonic time
        self._challenge: _Challenge | None = None
        self._answered: _Challenge | None = None
        self._request: str | None = None
        self._requests = 0
        self._attempts = 0
        self._retry_at = -math.inf
        self._patience_ends_at = math.inf

    # What is asked for.

    def want(self, now: float) -> bool:
        """Somebody needs the session authenticated. Returns whether that is decided yet to come.

        False means that asking changes nothing: there is no identity, the session is authenticated already,
        or it has failed and the relay has sent no new challenge to try.
        """
        if self._signer is None or self.state is AuthState.AUTHENTICATED:
            return False
        self._wanted = True
        if not self._connected or self.is_pending:
            return True
        if self.error is not None and (self._challenge is None or self._attempts >= _MAX_ATTEMPTS):
            return False
        self._begin(now)
        return self.is_pending

    def obstacle(self, capability: str) -> StrataError | None:
        """Why an action that needs `capability` must not be attempted on this session, or None (R-291)."""
        if self.session is not None:
            if self.session.allows(capability):
                return None
            return MissingCapability(capability, self.session.capabilities or frozenset())
        return self.error if self._options.authenticate == "always" else None

    # What the connection brings.

    def connection_made(self, claimed_server_id: str | None, now: float, unix_now: float) -> None:
        """A new connection, anonymous like every one. What was wanted before is wanted here first (R-339).

        `claimed_server_id` is what the relay's manifest says; it can contradict a pin and never make one
        (R-346, R-390).
        """
        self._connected = True
        self._claimed = claimed_server_id
        self._clock_offset = unix_now - now
        if self._wanted and self._signer is not None:
            self._begin(now)

    def connection_lost(self) -> None:
        """Whatever the session was, it is no more."""
        if self.state is not AuthState.UNAUTHENTICATED:
            self._move(AuthState.UNAUTHENTICATED)
        self._connected = self.is_pending = False
        self.session = self.error = None
        self._challenge = self._answered = self._request = None
        self._attempts = 0
        self._retry_at = -math.inf
        self.wake_at = math.inf

    def receive_challenge(self, message: wire.AuthChallenge, now: float) -> float | None:
        """Keep a challenge, and answer it if authentication waits for one.

        Returns the seconds it leaves if they are fewer than a relay owes (R-273).
        """
        expires_at = min(
            max(message.expires_at, 0), 2**53
        )  # of what a hostile relay sends, a float holds that
        left = expires_at - (now + self._clock_offset)
        is_short = left < auth.MIN_LIFETIME_SECONDS - _CLOCK_ERROR_SECONDS
        self._statistics.challenges_short += is_short
        # A relay gives at least this long for an answer.
        self.relay_ahead = expires_at - auth.MIN_LIFETIME_SECONDS - now
        # The relay owes us the least lifetime. If there seems to be less our clock may be wrong, and trying
        # costs one attempt.
        lifetime = min(max(left, auth.MIN_LIFETIME_SECONDS), auth.MAX_LIFETIME_SECONDS)
        self._challenge = _Challenge(message, now + lifetime)
        if self.is_pending and self.state is AuthState.UNAUTHENTICATED:
            self._proceed(now)
        return left if is_short else None

    def receive_ok(self, message: wire.AuthOk) -> bool:
        """The relay's word that the session is authenticated; false if it answers no AUTH of ours."""
        if self.state is not AuthState.AUTHENTICATING or not self._answers(message.client_msg_id):
            return False
        if self._signer is None or message.author_id != self._signer.did:
            return False  # somebody else's session is not ours; silence will be judged in time
        self._move(AuthState.AUTHENTICATED)
        self._request = None
        self.is_pending = False
        self.wake_at = math.inf
        granted = message.capabilities
        self.session = Authenticated(message.author_id, None if granted is None else frozenset(granted))
        self._statistics.authentications += 1
        self.decisions += 1
        return True

    def receive_error(self, message: wire.Error, refusal: RequestRefused, now: float) -> bool:
        """The relay refused AUTH (R-294); false if the ERROR is about something else.

        A plain relay need not echo `client_msg_id`: then the two codes that AUTH is answered with are taken
        for its answer while one is awaited.
        """
        if self.state is not AuthState.AUTHENTICATING:
            return self._request is not None and message.client_msg_id == self._request
        if message.client_msg_id is None:
            codes = (ErrorCode.UNAUTHENTICATED, ErrorCode.INVALID_SIGNATURE)
            if message.code not in codes or message.subscription_id is not None:
                return False
        elif message.client_msg_id != self._request:
            return False
        self._statistics.authentications_refused += 1
        self._attempt_failed(refusal, now)
        return True

    def handle_timer(self, now: float) -> None:
        """Give up an attempt that has taken too long; go on after a backoff that is over."""
        if now < self.wake_at:
            return
        self.wake_at = math.inf
        if self.state is AuthState.AUTHENTICATING:
            # silence is a failure.
            self._statistics.authentications_timed_out += 1
            self._attempt_failed(RequestTimeout("AUTH", self._options.auth_timeout), now)
        elif self.is_pending:
            self._proceed(now)

    # Moves.

    def _move(self, state: AuthState) -> None:
        assert state in _MOVES[self.state], f"{self.state} -> {state}"
        self.state = state

    def _begin(self, now: float) -> None:
        self.is_pending = True
        self.error = None
        self._patience_ends_at = now + self._options.auth_timeout
        self._proceed(now)

    def _proceed(self, now: float) -> None:
        """Send AUTH if it is time and there is a challenge; else wait for the one or the other."""
        if now < self._retry_at:
            self.wake_at = self._retry_at
        elif self._challenge is not None and now <= self._challenge.usable_until:
            self._answer(self._challenge, now)
        elif now < self._patience_ends_at:
            self.wake_at = self._patience_ends_at
        else:
            self._fail(
                self.error or RequestTimeout("the wait for AUTH_CHALLENGE", self._options.auth_timeout)
            )

    def _answer(self, taken: _Challenge, now: float) -> None:
        assert self._signer is not None
        challenge = taken.message
        self._challenge, self._answered = None, taken  # a challenge is used once
        try:
            auth.check_challenge(challenge, self.server_id)
            self._check_acquaintance(challenge.server_id)
        except InvalidMessage as error:
            self._statistics.challenges_refused += 1
            self._fail(error)
            return
        self._requests += 1
        self._request = f"a{self._requests}"
        try:
            answer = auth.answer_challenge(
                challenge, self._signer, capabilities=self._capabilities, client_msg_id=self._request
            )
        except Exception as error:  # a signer may be a device, and fail as devices do
            failure = IdentityError("the signer could not sign the relay's challenge")
            failure.__cause__ = error
            self._fail(failure)
            return
        self.server_id = challenge.server_id  # first use pins
        self._met.setdefault(challenge.server_id, self._address)
        self._outbox.append(wire.encode(answer))
        self._attempts += 1
        self._move(AuthState.AUTHENTICATING)
        self.wake_at = now + self._options.auth_timeout

    def _check_acquaintance(self, shown: str) -> None:
        """Raise `InvalidMessage` where what is known of relays speaks against the DID that this one shows."""
        if self.server_id is None:
            other = self._met.get(shown, self._address)
            if other != self._address:
                raise InvalidMessage(
                    f"this is the DID of the relay at {other}; where both are one relay, say so by relay_id",
                    code=ErrorCode.UNAUTHENTICATED,
                    detail="server_id_elsewhere",
                )
        elif self._claimed not in (None, self.server_id):
            raise InvalidMessage(
                "the relay's manifest names another relay than the one expected",
                code=ErrorCode.UNAUTHENTICATED,
                detail="server_id_unexpected",
            )

    def _attempt_failed(self, error: StrataError, now: float) -> None:
        """R-294…R-296: back to the start, and a fresh challenge after a backoff where that can help."""
        self._move(AuthState.UNAUTHENTICATED)
        self.error = error
        if self._attempts >= _MAX_ATTEMPTS or not _may_pass(error):
            self._fail(error)
            return
        if isinstance(error, RequestRefused) and error.retry is Retry.LATER and self._challenge is None:
            self._challenge = self._answered  # the relay has not looked at it yet
        options = self._options
        self._retry_at = now + retry_delay(
            self._attempts,
            error.retry_after if isinstance(error, RequestRefused) else None,
            base=options.backoff_base,
            cap=options.backoff_cap,
            random=self._random,
        )
        self._patience_ends_at = self._retry_at + options.auth_timeout
        self._proceed(now)

    def _fail(self, error: StrataError) -> None:
        self.error = error
        self.is_pending = False
        self.wake_at = math.inf
        self.decisions += 1

    def _answers(self, client_msg_id: str | None) -> bool:
        return client_msg_id is None or client_msg_id == self._request


def _may_pass(error: StrataError) -> bool:
    """Whether another AUTH by the same key, over a fresh challenge, may go better than this one did."""
    if not isinstance(error, RequestRefused):
        return True
    if error.retry_after is not None:
        return error.retry_after <= MAX_RETRY_AFTER_SECONDS
    if error.code == ErrorCode.UNAUTHENTICATED:
        return error.detail in (None, "challenge_expired", "challenge_unknown")
    return error.retry in (Retry.AGAIN, Retry.LATER)
