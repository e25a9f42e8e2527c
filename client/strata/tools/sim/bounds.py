"""What a world may cost: traffic, reads, state and time. Nothing is lost, and this says at what price.

A bound of None is not looked at. Each kind of world has bounds of its own (`strata.tools.sim.worlds`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strata.tools.sim.weighing import Weight

__all__ = ["Bounds", "Idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The price of a world, at most."""

    agree_within: float = 3600.0
    """Virtual seconds from the last fault until all agree."""
    rest_minutes: float = 0.0
    """How long nobody says anything before the quiet minutes are counted."""
    idle_minutes: float = 0.0
    """For how long, after all agree, nobody says anything while the traffic is counted."""
    idle_syncs_per_minute: float | None = None
    """Sync messages a minute of all participants together."""
    idle_repeats_per_minute: float | None = None
    """Retransmissions and repairs a minute of all participants together, while nobody says anything."""
    idle_reads_per_minute: float | None = None
    """Messages read from the relays' stores a minute while nobody says anything."""
    sends_per_message: float | None = None
    """Transmissions of content, first ones and repeated ones, for each message."""
    syncs_per_message: float | None = None
    """Sync messages for each message, while people talk."""
    syncs_at_first: float = 5.0
    """Sync messages besides, until people know how many they are."""
    reads_per_missed: float | None = None
    """Messages read from the relays' stores for each that a participant had to get from there."""
    entries: float | None = None
    """Items that a participant keeps, whatever was said."""
    entries_per_message: float = 40.0
    """Items that a participant keeps besides, for each message."""
    state_bytes: float = 200_000
    """Bytes that a participant keeps, whatever was said; looked at with `entries`."""
    state_bytes_per_message: float = 6_000
    idle_growth: float | None = None
    """Items that a participant may keep more after the idle time than before."""
    says_synced_after: float | None = None
    """A channel that says it is synced has every message that its relays have had for so many seconds."""
    gaps_are_told: bool = False
    """What no relay has any more is told to everybody who lacks it."""

    def of_idle(self, idle: Idle) -> Iterator[str]:
        """What a quiet time broke."""
        if not idle.minutes:
            return
        for what, count, most in (
            ("syncs", idle.syncs, self.idle_syncs_per_minute),
            ("repeats", idle.repeats, self.idle_repeats_per_minute),
            ("reads", idle.reads, self.idle_reads_per_minute),
        ):
            # A minute more: chance makes one minute busier than another.
            if most is not None and count > most * (idle.minutes + 1):
                spent = f"{count} {what} in {idle.minutes:g} idle minutes of {idle.people}"
                yield f"{spent}: {most:g} a minute are allowed"

    def of_talk(self, messages: int, sends: int, syncs: int) -> Iterator[str]:
        """What the traffic for the messages broke."""
        for what, count, most, besides in (
            ("transmissions", sends, self.sends_per_message, 5.0),
            ("syncs", syncs, self.syncs_per_message, self.syncs_at_first),
        ):
            if most is not None and count > most * messages + besides:
                yield f"{count} {what} for {messages} messages: {most:g} for each are allowed"

    def of_reads(self, reads: int, missed: int) -> Iterator[str]:
        """What the reads of the relays' stores broke."""
        most = self.reads_per_missed
        if most is not None and reads > most * (missed + 200):
            yield f"{reads} messages read for {missed} that were missed: {most:g} for each are allowed"

    def of_state(self, name: str, weight: Weight, messages: int) -> Iterator[str]:
        """What the state of a participant broke."""
        if self.entries is None:
            return
        most = self.entries + self.entries_per_message * messages
        if weight.entries > most:
            yield f"{name} keeps {weight.entries} items for {messages} messages: {most:g} are allowed"
        most = self.state_bytes + self.state_bytes_per_message * messages
        if weight.size_bytes > most:
            yield f"{name} keeps {weight.size_bytes} bytes for {messages} messages: {most:g} are allowed"

    def of_growth(self, name: str, before: Weight, after: Weight) -> Iterator[str]:
        """What a participant kept of a time in which nothing was said."""
        grown = after.entries - before.entries
        if self.idle_growth is not None and grown > self.idle_growth:
            yield f"{name} keeps {grown} items more after a quiet time: {self.idle_growth:g} are allowed"


@dataclass(frozen=True, slots=True)
class Idle:
    """The traffic of a time in which nobody said anything."""

    people: int
    minutes: float
    syncs: int
    repeats: int
    reads: int
    bytes_handed_on: int
