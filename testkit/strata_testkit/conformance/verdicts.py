"""The verdicts of checks: the three ways not to pass, and how observed values are shown."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

__all__ = [
    "DECISIONS",
    "Failed",
    "Message",
    "Skipped",
    "Throttled",
    "expect",
    "expect_equal",
    "shorten",
]

Message = dict[str, Any]
"""One message from the relay, as decoded JSON."""

DECISIONS = "decisions"
"""The `extension` of a check on what the documents leave open and this project has decided.

Such a check applies to a relay that announces any of this project's extensions, and to no other.
"""

_SHORT = 300


class Failed(Exception):
    """The relay did something other than what the row says."""

    def __init__(self, expected: str, seen: str) -> None:
        super().__init__(expected, seen)
        self.expected = expected
        self.seen = seen

    def __str__(self) -> str:
        return f"expected {self.expected}; saw {self.seen}"


class Skipped(Exception):
    """The row cannot be judged here; the sentence says why."""


class Throttled(Exception):
    """The relay reported a rate limit: the check must run again after `pause` seconds."""

    def __init__(self, pause: int) -> None:
        super().__init__(pause)
        self.pause = pause


def expect(condition: object, expected: str, seen: object) -> None:
    """Fail unless `condition` is true; the failure shows `seen` shortened."""
    if not condition:
        _fail(expected, seen)


def expect_equal(seen: object, wanted: object, what: str) -> None:
    """Fail unless the two are equal."""
    if seen != wanted:
        raise Failed(f"{what}: {shorten(wanted)}", shorten(seen))


def shorten(value: object) -> str:
    """A value from the relay as text of bounded length."""
    if isinstance(value, str):
        text = value
    else:
        try:
            text = msgspec.json.encode(value).decode("utf-8", "replace")
        except (TypeError, ValueError, msgspec.MsgspecError, RecursionError):
            text = repr(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}…"


def _fail(expected: str, seen: object) -> NoReturn:
    raise Failed(expected, shorten(seen))
