"""The four origins that a provenance header may claim, in order of the proof they need (RFC-0002 §5, §10)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Final

__all__ = [
    "AI_MODEL",
    "HARDWARE",
    "HIGH_TRUST",
    "ORIGIN_TYPES",
    "SOFTWARE",
    "UNKNOWN",
    "header_of",
    "lower",
    "read_origin",
]

UNKNOWN: Final = "UNKNOWN"
SOFTWARE: Final = "SOFTWARE"
AI_MODEL: Final = "AI_MODEL"
HARDWARE: Final = "HARDWARE_SECURE_ENCLAVE"

ORIGIN_TYPES = (UNKNOWN, SOFTWARE, AI_MODEL, HARDWARE)
"""The weakest claim first."""

HIGH_TRUST = frozenset({AI_MODEL, HARDWARE})
"""Claims that a relay refuses, rather than downgrades, if their proof fails (R-214, R-215)."""

_RANK = {origin: rank for rank, origin in enumerate(ORIGIN_TYPES)}


def header_of(packet: dict[str, object]) -> dict[str, object] | None:
    """The provenance header of a decoded packet; null means the same as absence (A-004)."""
    header = packet.get("provenance_header")
    return header if type(header) is dict else None


def read_origin(value: object) -> str:
    """The origin that a header member names: `UNKNOWN` for anything but the four (R-036, R-204)."""
    return value if type(value) is str and value in _RANK else UNKNOWN


def lower(first: str, second: str) -> str:
    """The weaker of two origins (R-212)."""
    return min(first, second, key=lambda origin: _RANK.get(origin, 0))
