"""The identity of a session and its capabilities: challenges and AUTH (RFC-0004 §3.7, §8).

    ANONYMOUS ──AUTH──► (keys are looked up) ──► AUTHENTICATED as A ──AUTH──► … as B
        ▲                        │
        └──── failed ────────────┘   the session stays as it was (R-283)

No I/O, clock or randomness: times are passed in, in Unix seconds, and so are a challenge's random bytes. A
challenge belongs to the `Authentication` that issued it, which belongs to one connection, so no other session
can answer it. It is forgotten at the first AUTH that names it, so it cannot be answered twice (R-268). It is
signed together with the relay's DID, so an answer that was made for one relay verifies at no other.

The grounds on which a session was admitted must hold for as long as it is open: `Proof` names the key, and
says when that key may no longer authenticate. Then the connection ends, and authentication with it (R-284,
decision 41).

An AUTH fails with `unauthenticated` (the challenge is unknown or expired, or the identity is unknown) or with
`invalid_signature`; further knowledge goes into `detail` (A-025). Each failure is followed by a fresh
challenge, the fifth in a row by the end of the connection (R-282). No challenge follows success: a client
that answers every challenge would never stop. A session that wants another identity sends an AUTH with the
challenge it has, and gets a fresh challenge with the refusal.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from strata.protocol.auth import signing_input
from strata.protocol.errors import ErrorCode, InvalidMessage, InvalidPacket
from strata.protocol.ids import is_did
from strata.protocol.wire import EXTENSIONS, Auth, AuthChallenge

__all__ = [
    "CAPABILITIES",
    "CHALLENGE_BYTES",
    "MAX_FAILURES",
    "OPERATE",
    "PUBLISH",
    "REPLICATE",
    "SUBSCRIBE",
    "AuthAttempt",
    "AuthKeys",
    "Authentication",
    "Grants",
    "Proof",
    "verify_attempt",
]

PUBLISH: Final = "publish"
SUBSCRIBE: Final = "subscribe"
REPLICATE: Final = "replicate"
CAPABILITIES: Final = (PUBLISH, SUBSCRIBE, REPLICATE)
"""The capabilities of every relay, in the order in which AUTH_OK lists them; others are ignored (R-287)."""

OPERATE: Final = "operate"
"""The capability of a relay's operators, if it has any (decision 61): to moderate over the wire."""

CHALLENGE_BYTES: Final = 32
"""The number of random bytes of a challenge (R-268)."""

MAX_FAILURES: Final = 5
"""The number of failures in a row that ends the connection (R-282)."""

_SIGNATURE = re.compile(r"0x[0-9a-fA-F]{128}")


class AuthKeys(Protocol):
    """The keys of one identity; `strata.protocol.keys.KeyChain` is one."""

    def verify_auth(self, message: bytes, signature: bytes, at: int) -> bytes:
        """Raise `InvalidPacket` with `invalid_signature` and a detail, unless a key that may authenticate at
        `at` has signed `message`; return that key."""

    def check_auth_key(self, public_key: bytes, at: int) -> None:
        """Raise the same error if this key may not authenticate at `at`."""


@dataclass(frozen=True, slots=True)
class Grants:
    """The capabilities that the settings grant.

    `require_auth` names what an anonymous session may not do (R-292). If there are `members`, only they and
    `peers` gain from authenticating; otherwise everybody does. `peers` may replicate (R-290), and `operators`
    may moderate.
    """

    require_auth: frozenset[str] = frozenset()
    members: frozenset[str] = frozenset()
    peers: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()
    anonymous: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "anonymous", frozenset({PUBLISH, SUBSCRIBE}) - self.require_auth)

    def of(self, did: str) -> frozenset[str]:
        """All capabilities of this identity, once it has proved itself."""
        granted = self.anonymous
        if not self.members or did in self.members or did in self.peers or did in self.operators:
            granted |= {PUBLISH, SUBSCRIBE}
        if did in self.operators:
            granted |= {OPERATE}
        return granted | {REPLICATE} if did in self.peers else granted

    def effective(self, did: str, requested: Iterable[str] | None) -> tuple[str, ...]:
        """The capabilities of a session of this identity: those both requested and granted (R-286, A-074)."""
        granted = self.of(did)
        wanted = granted if requested is None else granted.intersection(requested)
        return tuple(name for name in (*CAPABILITIES, OPERATE) if name in wanted)


@dataclass(frozen=True, slots=True)
class AuthAttempt:
    """An AUTH that answers a challenge of this session in time; its signature is still to be checked."""

    author_id: str
    signature: bytes
    messages: tuple[bytes, ...]
    requested: tuple[str, ...] | None
    client_msg_id: str | None


@dataclass(frozen=True, slots=True)
class Proof:
    """The key whose signature admitted a session."""

    key: bytes

    def broken(self, keys: AuthKeys, now: int) -> InvalidMessage | None:
        """Why the session must end, if its key may no longer authenticate (R-277); else None."""
        try:
            keys.check_auth_key(self.key, now)
        except InvalidPacket as error:
            reason = "the key that this session was authenticated with may authenticate no more"
            return _refused(reason, error.detail, None)
        return None


class Authentication:
    """The challenges and the identity of one session."""

    __slots__ = ("_challenge", "_expired", "_expires_at", "_failures", "_lifetime", "_server_id", "identity")

    def __init__(self, server_id: str, lifetime: int) -> None:
        self.identity: str | None = None
        self._server_id = server_id
        self._lifetime = lifetime
        self._challenge: str | None = None
        self._expires_at = 0
        self._expired: str | None = None
        self._failures = 0

    def issue(self, random: bytes, now: int) -> AuthChallenge:
        """Create a new challenge, which replaces an unused one."""
        assert len(random) >= CHALLENGE_BYTES
        self._challenge = base64.b64encode(random).decode()
        self._expires_at = now + self._lifetime
        return AuthChallenge(
            challenge=self._challenge,
            server_id=self._server_id,
            expires_at=self._expires_at,
            extensions=list(EXTENSIONS),
        )

    def wants_challenge(self, now: int) -> bool:
        """Whether an anonymous session's unused challenge has expired, so that a new one is due (R-282)."""
        if self._challenge is None or now <= self._expires_at or self.identity is not None:
            return False
        # An answer to the old challenge may be on its way, and should be refused as late.
        self._expired, self._challenge = self._challenge, None
        return True

    def begin(self, message: Auth, now: int) -> AuthAttempt:
        """Take an AUTH; the challenge it names cannot be answered again. Raises `InvalidMessage`."""
        expired, self._expired = self._expired, None
        if message.challenge == expired:
            raise _refused("the challenge has expired", "challenge_expired", message.client_msg_id)
        if self._challenge is None or message.challenge != self._challenge:
            raise _refused(
                "this challenge was not given to this session, or has been used",
                "challenge_unknown",
                message.client_msg_id,
            )
        challenge, self._challenge = self._challenge, None
        if now > self._expires_at:
            raise _refused("the challenge has expired", "challenge_expired", message.client_msg_id)
        if not is_did(message.author_id):
            raise _refused("author_id is not a DID", "unresolved_key", message.client_msg_id)
        if _SIGNATURE.fullmatch(message.signature) is None:
            raise _refused(
                "the signature is not 0x and 128 hex digits",
                None,
                message.client_msg_id,
                ErrorCode.INVALID_SIGNATURE,
            )
        return AuthAttempt(
            author_id=message.author_id,
            signature=bytes.fromhex(message.signature[2:]),
            messages=self._signed_forms(challenge),
            requested=None if message.capabilities is None else tuple(message.capabilities),
            client_msg_id=message.client_msg_id,
        )

    def succeeded(self, author_id: str) -> None:
        """The session now speaks for this identity."""
        self.identity = author_id
        self._failures = 0

    def failed(self) -> bool:
        """Count a failed AUTH. Returns whether the limit of failures is reached."""
        self._failures += 1
        return self._failures >= MAX_FAILURES

    def _signed_forms(self, challenge: str) -> tuple[bytes, ...]:
        """The forms that may have been signed: the challenge (R-275), or the bytes it encodes (R-276)."""
        return (
            signing_input(challenge, self._server_id),
            base64.b64decode(challenge) + self._server_id.encode(),
        )


def verify_attempt(attempt: AuthAttempt, keys: AuthKeys, now: int) -> Proof:
    """The key that has signed. Raises `InvalidMessage` unless it is the identity's and valid now (R-277)."""
    fault: InvalidPacket | None = None
    for message in attempt.messages:
        try:
            return Proof(keys.verify_auth(message, attempt.signature, now))
        except InvalidPacket as error:
            if fault is None or error.detail is not None:
                fault = error  # this error says more about the key
    assert fault is not None
    if fault.detail == "unresolved_key":
        raise _refused(fault.reason, fault.detail, attempt.client_msg_id)
    # plain clients understand this code, whatever the state of the key.
    raise _refused(fault.reason, fault.detail, attempt.client_msg_id, ErrorCode.INVALID_SIGNATURE)


def _refused(
    reason: str,
    detail: str | None,
    client_msg_id: str | None,
    code: ErrorCode = ErrorCode.UNAUTHENTICATED,
) -> InvalidMessage:
    return InvalidMessage(reason, code=code, detail=detail, client_msg_id=client_msg_id)
