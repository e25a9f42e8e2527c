"""Bounds on what a world may cost: traffic, reads, state and time.

A bound of None is not checked. Each kind of world has its own bounds (`strata_testkit.sim.worlds`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strata_testkit.sim.weighing import Weight

__all__ = ["Bounds", "Idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most that a world may cost."""

    agree_within: float = 3600.0
    """Virtual seconds from the last fault until all agree."""
    rest_minutes: float = 0.0
    """The quiet minutes before the counted ones."""
    idle_minutes: float = 0.0
    """The quiet minutes, after all agree, in which traffic is counted."""
    idle_syncs_per_minute: float | None = None
    """Sync messages per quiet minute, of all participants together."""
    idle_repeats_per_minute: float | None = None
    """Retransmissions and repairs per quiet minute, of all participants together."""
    idle_reads_per_minute: float | None = None
    """Messages read from the relays' stores per quiet minute."""
    sends_per_message: float | None = None
    """Transmissions of content per message, first ones and repeated ones."""
    syncs_per_message: float | None = None
    """Sync messages per message, while people talk."""
    syncs_at_first: float = 5.0
    """Additional sync messages, until people know how many they are."""
    reads_per_missed: float | None = None
    """Messages read from the relays' stores per message that a participant had to get from there."""
    entries: float | None = None
    """Items that a participant keeps, however much was said."""
    entries_per_message: float = 40.0
    """Additional items that a participant keeps per message."""
    state_bytes: float = 200_000
    """Bytes that a participant keeps, however much was said; checked only if `entries` is."""
    state_bytes_per_message: float = 6_000
    idle_growth: float | None = None
    """The growth of a participant's items over the quiet time."""
    says_synced_after: float | None = None
    """A channel that says it is synced has every message that its relays have had for this many seconds."""
    gaps_are_told: bool = False
    """Whether everyone who lacks a message that no relay has any more must be told so."""

    def of_idle(self, idle: Idle) -> Iterator[str]:
        """The bounds that a quiet time broke."""
        if not idle.minutes:
            return
        for what, count, most in (
            ("syncs", idle.syncs, self.idle_syncs_per_minute),
            ("repeats", idle.repeats, self.idle_repeats_per_minute),
            ("reads", idle.reads, self.idle_reads_per_minute),
        ):
            # One minute is added, since chance makes some minutes busier than others.
            if most is not None and count > most * (idle.minutes + 1):
                spent = f"{count} {what} in {idle.minutes:g} idle minutes of {idle.people}"
                yield f"{spent}: {most:g} a minute are allowed"

    def of_talk(self, messages: int, sends: int, syncs: int) -> Iterator[str]:
        """The bounds that the traffic for the messages broke."""
        for what, count, most, besides in (
            ("transmissions", sends, self.sends_per_message, 5.0),
            ("syncs", syncs, self.syncs_per_message, self.syncs_at_first),
        ):
            if most is not None and count > most * messages + besides:
                yield f"{count} {what} for {messages} messages: {most:g} for each are allowed"

    def of_reads(self, reads: int, missed: int) -> Iterator[str]:
        """The bounds that the reads of the relays' stores broke."""
        most = self.reads_per_missed
        if most is not None and reads > most * (missed + 200):
            yield f"{reads} messages read for {missed} that were missed: {most:g} for each are allowed"

    def of_state(self, name: str, weight: Weight, messages: int) -> Iterator[str]:
        """The bounds that the state of a participant broke."""
        if self.entries is None:
            return
        most = self.entries + self.entries_per_message * messages
        if weight.entries > most:
            yield f"{name} keeps {weight.entries} items for {messages} messages: {most:g} are allowed"
        most = self.state_bytes + self.state_bytes_per_message * messages
        if weight.size_bytes > most:
            yield f"{name} keeps {weight.size_bytes} bytes for {messages} messages: {most:g} are allowed"

    def of_growth(self, name: str, before: Weight, after: Weight) -> Iterator[str]:
        """The bounds that a participant's growth over a quiet time broke."""
        grown = after.entries - before.entries
        if self.idle_growth is not None and grown > self.idle_growth:
            yield f"{name} keeps {grown} items more after a quiet time: {self.idle_growth:g} are allowed"


@dataclass(frozen=True, slots=True)
class Idle:
    """The traffic of a quiet time: one in which nobody says anything."""

    people: int
    minutes: float
    syncs: int
    repeats: int
    reads: int
    bytes_handed_on: int
