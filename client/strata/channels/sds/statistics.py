"""Counts that a participant keeps."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Statistics"]


@dataclass(slots=True)
class Statistics:
    """Counts since the participant was made."""

    received: int = 0
    """Messages of this channel that could be read."""
    delivered: int = 0
    duplicates: int = 0
    own_echoes: int = 0
    other_channels: int = 0
    undecodable: int = 0
    """Not a message, of no kind, with unusable ids, or naming too many others."""
    oversized: int = 0
    refused_old: int = 0
    """From before the horizon: it may have been delivered already (`strata.channels.sds.log.KnownIds`)."""
    refused_full: int = 0
    """The incoming buffer had no room."""
    retransmissions: int = 0
    repairs_sent: int = 0
    syncs_sent: int = 0
