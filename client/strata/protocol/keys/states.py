"""One key at one moment: its window, its uses, and why a use is refused."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from strata.protocol.documents import Custody
from strata.protocol.errors import ErrorCode, InvalidPacket

__all__ = [
    "DEFAULT_CLOCK_SKEW_SECONDS",
    "MAX_DEAD_KEYS_TRIED",
    "KeyRules",
    "KeyStanding",
    "KeyState",
    "Use",
    "allowed_clock_skew",
    "explain",
    "newest_first",
    "refused",
]

DEFAULT_CLOCK_SKEW_SECONDS = 300
_ALLOWED_CLOCK_SKEWS = range(60, 301)

MAX_DEAD_KEYS_TRIED = 16
"""How many keys that may not sign are tried, newest first, to explain why a signature fails (R-067)."""

SignedBy = Callable[[bytes], bool]
"""Whether the signature in question verifies under a public key."""


class Use(enum.Enum):
    """What a signature is for (R-061)."""

    PACKET = "packet"
    AUTH = "auth"


class KeyStanding(enum.Enum):
    """The status of a key at a moment, by its window."""

    VALID = "valid"
    NOT_YET_VALID = "not_yet_valid"
    EXPIRED = "expired"
    REVOKED = "revoked"


def allowed_clock_skew(wanted: int) -> int:
    """The clock skew to use for a configured one: anything not from 60 to 300 counts as 300 (R-064)."""
    return wanted if wanted in _ALLOWED_CLOCK_SKEWS else DEFAULT_CLOCK_SKEW_SECONDS


@dataclass(frozen=True, slots=True)
class KeyRules:
    """The settings that key validity depends on (R-064, R-086)."""

    clock_skew_seconds: int = DEFAULT_CLOCK_SKEW_SECONDS
    recovery_delay_seconds: int = 86_400


@dataclass(frozen=True, slots=True)
class KeyState:
    """One key of a chain. Times are Unix seconds; None means no end."""

    key_id: str
    public_key: bytes
    valid_from: int
    valid_until: int | None = None
    revoked_at: int | None = None
    recovery: bool = False
    custody: Custody = "unknown"
    authentication: bool = True
    assertion: bool = True
    introduced_by: str | None = None
    """The `packet_id` of the KEY_EVENT or DID_DOCUMENT; None for a key known in advance."""

    def standing(self, at: int, skew: int) -> KeyStanding:
        """The key's status at `at`: both ends are inclusive (R-062); a revocation has no skew (R-076)."""
        if self.revoked_at is not None and at > self.revoked_at:
            return KeyStanding.REVOKED
        if self.valid_until is not None and at > self.valid_until + skew:
            return KeyStanding.EXPIRED
        if at < self.valid_from - skew:
            return KeyStanding.NOT_YET_VALID
        return KeyStanding.VALID

    def is_over(self, at: int, skew: int) -> bool:
        """Whether the key can never be valid again."""
        return self.standing(at, skew) in (KeyStanding.REVOKED, KeyStanding.EXPIRED)

    def may(self, use: Use) -> bool:
        """Whether the key has the role that `use` requires, regardless of its window (R-061, R-080)."""
        return not self.recovery and (self.assertion if use is Use.PACKET else self.authentication)

    def edges(self, skew: int) -> Iterable[int]:
        """The seconds at which `standing` may change."""
        yield self.valid_from - skew
        if self.valid_until is not None:
            yield self.valid_until + skew + 1
        if self.revoked_at is not None:
            yield self.revoked_at + 1


def newest_first(keys: Iterable[KeyState]) -> list[KeyState]:
    """The keys in the order in which they are tried, from keys in order of introduction (R-066)."""
    return sorted(reversed(list(keys)), key=lambda key: -key.valid_from)


def explain(keys: Iterable[KeyState], at: int, skew: int, use: Use, signed_by: SignedBy) -> InvalidPacket:
    """The error that explains why a signature by no valid key does not count (R-067, R-080, A-025).

    For AUTH the code is always `invalid_signature`, with the precise reason as its detail (R-281).
    """
    dead = 0
    for key in newest_first(keys):
        if not key.recovery:
            dead += 1
            if dead > MAX_DEAD_KEYS_TRIED:
                continue
        if signed_by(key.public_key):
            return _explained_by(key, at, skew, use)
    return refused("the signature is not the author's")


def refused(reason: str, detail: str | None = None) -> InvalidPacket:
    """An `invalid_signature` for the caller to raise."""
    return InvalidPacket(ErrorCode.INVALID_SIGNATURE, reason, detail=detail)


_STANDING_CODES = {
    KeyStanding.REVOKED: (ErrorCode.KEY_REVOKED, "the signing key is revoked"),
    KeyStanding.EXPIRED: (ErrorCode.KEY_EXPIRED, "the signing key has expired"),
    KeyStanding.NOT_YET_VALID: (ErrorCode.KEY_NOT_YET_VALID, "the signing key is not valid yet"),
}


def _explained_by(key: KeyState, at: int, skew: int, use: Use) -> InvalidPacket:
    if (found := _STANDING_CODES.get(key.standing(at, skew))) is not None:
        code, reason = found
        if use is Use.AUTH:
            return refused(reason, code.value)
        return InvalidPacket(code, reason)
    if key.recovery:
        return refused("a recovery key signs recovery packets alone", "recovery_key_not_allowed")
    return refused("the author's document does not let this key sign here", "key_use_not_allowed")
