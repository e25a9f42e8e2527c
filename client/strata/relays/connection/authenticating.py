"""The client's side of authenticating one relay session: no I/O, no clock (RFC-0004 §3.7).

    UNAUTHENTICATED ──AUTH──▶ AUTHENTICATING ──AUTH_OK──▶ AUTHENTICATED
           ▲                        │                          │
           ├─── ERROR, silence ─────┘                          │
           └─────────────────────── connection lost ───────────┘

Only AUTH_OK leads to AUTHENTICATED (R-293): neither the absence of an ERROR (R-297) nor an answer that comes
too late is a success. Authentication ends with the connection (R-284).

A relay may send a challenge at any time, and the client keeps the latest. A challenge is answered once, and
only after `check_challenge`. Authentication is *wanted* from the first request for it on, over all further
connections. While it is wanted and undecided, the machine is *pending*: it waits for a challenge, for the
relay's answer, or for the end of a backoff, each with a deadline. It ends in `Authenticated` or in the error
that says why not. After that, this connection stays as it is until authentication is requested again.
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
"""The most AUTHs sent on one connection. After five failures a relay closes with 1008, which is final
(R-282)."""

_CLOCK_ERROR_SECONDS = 5.0
"""How much our clock and the transmission may shorten a lifetime before the relay is blamed (R-273)."""


class AuthState(enum.Enum):
    """The state of authentication, as confirmed by the relay (R-293)."""

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
    """The latest challenge, and until when, on our clock, it is worth answering."""

    message: wire.AuthChallenge
    usable_until: float


class Authenticating:
    """Answers challenges of one relay, across connections; appends frames to `outbox`.

    If `signer` is None, there is no identity to authenticate as. `server_id` is the DID the relay must show
    (R-298); None accepts the first one shown, and holds the relay to it from then on. `met` holds the DIDs of
    relays met before, each with its address. A relay that is not held to a DID yet, and shows one that was
    met at another address than `address`, is forwarding a challenge, so nothing is signed. `random` gives
    values in [0, 1), for jitter.
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
        """The identity and capabilities the relay has confirmed; None unless AUTHENTICATED."""
        self.error: StrataError | None = None
        """Why authentication failed on this connection; None if it has not failed."""
        self.server_id = server_id
        """The DID the relay is held to; None until one is known."""
        self.wake_at = math.inf
        """When `handle_timer` has work to do."""
        self.is_pending = False
        """Whether authentication is under way: wanted, possible, and neither granted nor failed."""
        self.decisions = 0
        """How often it has been granted or has failed; the owner compares this to notice a decision."""
        self.relay_ahead: float | None = None
        """An upper bound of the relay's Unix time minus our monotonic time, in seconds.

        None until the relay has sent a challenge."""
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

    # Requests.

    def want(self, now: float) -> bool:
        """Request an authenticated session. Returns whether a decision is still to come.

        False means that the request changes nothing: there is no identity, the session is already
        authenticated, or authentication has failed and there is no new challenge or no attempt left.
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
        """Note a new connection, anonymous at first; if authentication is wanted, begin it at once (R-339).

        `claimed_server_id` is the DID in the relay's manifest. It can contradict a pin but never creates one
        (R-346, R-390).
        """
        self._connected = True
        self._claimed = claimed_server_id
        self._clock_offset = unix_now - now
        if self._wanted and self._signer is not None:
            self._begin(now)

    def connection_lost(self) -> None:
        """Note the end of the connection, and with it of the session."""
        if self.state is not AuthState.UNAUTHENTICATED:
            self._move(AuthState.UNAUTHENTICATED)
        self._connected = self.is_pending = False
        self.session = self.error = None
        self._challenge = self._answered = self._request = None
        self._attempts = 0
        self._retry_at = -math.inf
        self.wake_at = math.inf

    def receive_challenge(self, message: wire.AuthChallenge, now: float) -> float | None:
        """Keep a challenge, and answer it if authentication is waiting for one.

        Returns how many seconds it leaves for an answer if a relay must leave more (R-273), else None.
        """
        expires_at = min(
            max(message.expires_at, 0), 2**53
        )  # a hostile relay may send any integer; a float holds these
        left = expires_at - (now + self._clock_offset)
        is_short = left < auth.MIN_LIFETIME_SECONDS - _CLOCK_ERROR_SECONDS
        self._statistics.challenges_short += is_short
        # A relay leaves at least this long for an answer.
        self.relay_ahead = expires_at - auth.MIN_LIFETIME_SECONDS - now
        # If less than the minimum lifetime seems left, our clock may be wrong. Trying costs one attempt.
        lifetime = min(max(left, auth.MIN_LIFETIME_SECONDS), auth.MAX_LIFETIME_SECONDS)
        self._challenge = _Challenge(message, now + lifetime)
        if self.is_pending and self.state is AuthState.UNAUTHENTICATED:
            self._proceed(now)
        return left if is_short else None

    def receive_ok(self, message: wire.AuthOk) -> bool:
        """Accept AUTH_OK; false if it does not answer an AUTH of ours."""
        if self.state is not AuthState.AUTHENTICATING or not self._answers(message.client_msg_id):
            return False
        if self._signer is None or message.author_id != self._signer.did:
            return False  # another identity's session is not ours; the timeout will decide
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
        """Handle a refusal of AUTH (R-294); false if the ERROR is about something else.

        A plain relay need not echo `client_msg_id`. Without it, either of the two codes that can answer AUTH
        counts as the answer while one is awaited.
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
        """Give up an attempt that has taken too long; continue after a backoff."""
        if now < self.wake_at:
            return
        self.wake_at = math.inf
        if self.state is AuthState.AUTHENTICATING:
            # silence is a failure.
            self._statistics.authentications_timed_out += 1
            self._attempt_failed(RequestTimeout("AUTH", self._options.auth_timeout), now)
        elif self.is_pending:
            self._proceed(now)

    def postpone(self, by: float) -> None:
        """Nobody looked for `by` seconds: the relay has that much more time."""
        self._patience_ends_at += by
        if self.state is AuthState.AUTHENTICATING:
            self.wake_at += by

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
        """Send AUTH if it is due and there is a challenge; otherwise wait."""
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
        except Exception as error:  # a signer may be a device, which can fail in any way
            failure = IdentityError("the signer could not sign the relay's challenge")
            failure.__cause__ = error
            self._fail(failure)
            return
        self.server_id = challenge.server_id  # the first use pins the DID
        self._met.setdefault(challenge.server_id, self._address)
        self._outbox.append(wire.encode(answer))
        self._attempts += 1
        self._move(AuthState.AUTHENTICATING)
        self.wake_at = now + self._options.auth_timeout

    def _check_acquaintance(self, shown: str) -> None:
        """Raise `InvalidMessage` if the DID that this relay shows contradicts what is known of relays."""
        if self.server_id is None:
            auth.check_address(shown, self._address, self._met)
        elif self._claimed not in (None, self.server_id):
            raise InvalidMessage(
                "the relay's manifest names another relay than the one expected",
                code=ErrorCode.UNAUTHENTICATED,
                detail="server_id_unexpected",
            )

    def _attempt_failed(self, error: StrataError, now: float) -> None:
        """Return to UNAUTHENTICATED; if that can help, retry after a backoff, with a fresh challenge
        (R-294…R-296)."""
        self._move(AuthState.UNAUTHENTICATED)
        self.error = error
        if self._attempts >= _MAX_ATTEMPTS or not _may_pass(error):
            self._fail(error)
            return
        if isinstance(error, RequestRefused) and error.retry is Retry.LATER and self._challenge is None:
            self._challenge = self._answered  # the relay has not examined it yet
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
    """Whether another AUTH with the same key, over a fresh challenge, may succeed."""
    if not isinstance(error, RequestRefused):
        return True
    if error.retry_after is not None:
        return error.retry_after <= MAX_RETRY_AFTER_SECONDS
    if error.code == ErrorCode.UNAUTHENTICATED:
        return error.detail in (None, "challenge_expired", "challenge_unknown")
    return error.retry in (Retry.AGAIN, Retry.LATER)
