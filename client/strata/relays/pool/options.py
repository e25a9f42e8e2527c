"""The options of a pool of relays, in one frozen value."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from strata.relays.arguments import check_options
from strata.relays.connection.options import Options
from strata.relays.pool.profiles import Profile

__all__ = ["PoolOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How a pool behaves. All times are seconds; None switches a check off (C-279).

    Construction raises `ValueError` for a value that cannot work, and `TypeError` for one of another type.
    """

    relay: Options = field(default_factory=Options)
    """How the connection to each relay behaves."""
    profile: Profile = Profile.STANDARD
    """The privacy profile requested; `Pool.profile` is the one in force (R-403)."""

    connections: int = 4
    """The most relays connected at once; the others wait their turn."""
    replace_after: float = 2.0
    """How long a relay may be unreachable before another takes its place (C-272)."""
    revive_after: float = 60.0
    """After this long without success, a lost connection is abandoned and a new one is opened."""
    reconnect_base: float = 1.0
    """The longest wait after the first failed attempt to connect; it doubles with each attempt."""
    reconnect_cap: float = 60.0
    """The longest wait between attempts."""

    copies: int = 2
    """How many relays each packet is published to (C-270)."""
    confirmations: int = 1
    """How many of them must have said OK before `publish` returns; the others continue in the background."""
    publish_timeout: float = 30.0
    """How long a publish may take in all, unless the call gives a timeout."""
    retry_interval: float = 1.0
    """After this long without all its copies a publish goes to one more relay, after twice as long to
    another one, and so on (C-273)."""
    retry_cap: float = 30.0
    """The longest of those waits."""
    max_in_flight: int = 256
    """The most publishes waiting for their confirmations; the next one waits for its turn."""
    max_background: int = 1024
    """How many copies may be under way; beyond it, those of the oldest confirmed publish are abandoned."""

    readers: int = 2
    """How many relays each subscription reads from (C-271)."""
    queue_packets: int = 256
    """The most packets a subscription holds for its consumer; when full, its readers wait."""
    dedup_packets: int = 65_536
    """How many of the latest packet ids a subscription holds in memory, about 300 bytes each. Older ones go
    to a temporary file and are looked up there, so repeats are dropped however many packets there are."""
    hold_back: float = 0.0
    """How long a packet waits for its copies from the other readers, in order to have the earliest
    `received_at` (R-106). With 0 the first copy is delivered at once."""
    overlap: int = 300
    """How far before the last packet of the relay it replaces a new reader starts (C-278)."""

    presence_delay: float | None = 2.0
    """How long after its OK a relay is asked whether it has the packet (C-274)."""
    presence_attempts: int = 5
    """The most rounds of this check for one packet; after the last one the check gives up."""
    presence_packets: int = 4096
    """The most packets under this check; when full, `publish` waits for room."""
    sweep_interval: float | None = 60.0
    """How often all relays are asked for what a subscription may have missed (C-275)."""
    ping_interval: float | None = 60.0
    """How often each connected relay is pinged (C-277)."""
    ping_timeout: float = 10.0
    """How long a ping may take."""
    ping_failures: int = 2
    """How many failed pings in a row cause a relay to be replaced."""
    probe_interval: float | None = 300.0
    """How often a relay is asked for a random packet that it should have (R-343)."""
    sample_interval: float | None = 3600.0
    """How often a relay that is not in use is tried (R-345)."""
    request_timeout: float = 30.0
    """How long one check may take at one relay."""

    scores: Path | None = None
    """The SQLite file that keeps what is known about relays; None keeps it only as long as the pool lives."""

    def __post_init__(self) -> None:
        if not isinstance(self.relay, Options):
            raise TypeError(f"relay must be Options, not {type(self.relay).__name__}")
        if self.scores is not None and not isinstance(self.scores, Path):
            raise TypeError(f"scores must be a Path or None, not {self.scores!r}")
        object.__setattr__(self, "profile", Profile(self.profile))  # the name of one may be given as text
        check_options(self, may_be_zero=("hold_back", "overlap"))
        if self.confirmations > self.copies:
            raise ValueError("confirmations must not exceed copies")
        if self.connections < max(self.copies, self.readers):
            raise ValueError("connections must not be below copies or readers")
