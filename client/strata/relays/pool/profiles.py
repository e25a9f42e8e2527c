"""Privacy profiles: the one that a program requests, and the one that its relays allow (R-403…R-408). Pure.

| profile  | relays for reading and publishing | delay before each copy | proxy    | filters |
|----------|-----------------------------------|------------------------|----------|---------|
| STANDARD | as the options say                | none                   | optional | exact   |
| SHIELDED | at least two                      | 200–1200 ms            | optional | coarse  |
| HARDENED | three if available, at least two  | 800–2500 ms            | required | coarse  |

A profile that is not possible falls back to a weaker one, with a warning. The requested profile stays stored
(R-407), so it takes effect by itself once there are enough relays or a proxy.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["PROFILE_NOTICE", "EffectiveProfile", "Profile", "effective_profile", "publish_delay"]

_MIN_RELAYS = 2
_HARDENED_RELAYS = 3

PROFILE_NOTICE = """\
Profiles make it harder, not impossible, to tie your reading and publishing together. Relays still see what
they see, several of them now; a proxy hides your address from relays and shows your connections to whoever
runs it. SHIELDED and HARDENED cost delay in publishing, and traffic for packets you then leave aside. Use
separate identities for separate contexts, or the signatures tie together what the profile keeps apart.
"""
"""R-408: the limits and the cost of metadata privacy, in English, for programs to show."""


class Profile(enum.StrEnum):
    """How much speed and traffic a client gives up in order to reveal less to relays."""

    STANDARD = "STANDARD"
    SHIELDED = "SHIELDED"
    HARDENED = "HARDENED"


@dataclass(frozen=True, slots=True)
class EffectiveProfile:
    """The profile in force, and the one requested."""

    stored: Profile
    """The profile requested; never changed by circumstances (R-407)."""
    profile: Profile
    """The profile in force."""
    warnings: tuple[str, ...]
    """Why the profile in force is weaker than requested or than recommended, as sentences for users."""
    min_relays: int
    """The fewest relays that each feed and each publish use (R-404)."""
    publish_delay: tuple[float, float] | None
    """The bounds, in seconds, of the random wait before each copy of a publish (R-405, R-406)."""
    coarse_filters: bool
    """Whether relays are asked for more than is wanted, and the surplus is discarded here (R-405)."""

    @property
    def notice(self) -> str:
        """The text about the profile that a program should show (R-408)."""
        return "\n".join((PROFILE_NOTICE, *self.warnings))


def effective_profile(stored: Profile, *, relays: int, has_proxy: bool) -> EffectiveProfile:
    """The profile that the number of usable relays, and `has_proxy`, allow (R-404, R-406, R-407)."""
    profile, warnings = stored, []
    if profile is Profile.HARDENED and not has_proxy:
        profile = Profile.SHIELDED
        warnings.append("HARDENED needs a proxy and none is set: SHIELDED is in force instead")
    if profile is not Profile.STANDARD and relays < _MIN_RELAYS:
        warnings.append(f"{profile} needs two relays and there is {relays}: STANDARD is in force instead")
        profile = Profile.STANDARD
    match profile:
        case Profile.STANDARD:
            return EffectiveProfile(stored, profile, tuple(warnings), 1, None, False)
        case Profile.SHIELDED:
            return EffectiveProfile(stored, profile, tuple(warnings), _MIN_RELAYS, (0.2, 1.2), True)
        case Profile.HARDENED:
            if relays < _HARDENED_RELAYS:
                warnings.append(f"HARDENED is best with three relays and there are {relays}")
            wanted = min(_HARDENED_RELAYS, relays)
            return EffectiveProfile(stored, profile, tuple(warnings), wanted, (0.8, 2.5), True)


def publish_delay(profile: EffectiveProfile, *, random: Callable[[], float]) -> float:
    """Seconds to wait before one copy is sent: drawn for each copy, so that their times do not link them."""
    if profile.publish_delay is None:
        return 0.0
    low, high = profile.publish_delay
    return low + (high - low) * random()
