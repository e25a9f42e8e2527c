"""Times and durations as users type them."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

__all__ = ["duration", "moment"]

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_is_duration = re.compile(r"([0-9]{1,9})([smhdw])").fullmatch
_is_unix_time = re.compile(r"[0-9]{1,12}").fullmatch


def duration(text: str) -> int:
    """The seconds of `90s`, `30m`, `12h`, `7d` or `2w`, at least one. Raises `ValueError`."""
    found = _is_duration(text)
    if found is None or not int(found[1]):
        raise ValueError(f"not a duration: {text!r}; try 90s, 30m, 12h, 7d or 2w")
    return int(found[1]) * _UNITS[found[2]]


def moment(text: str, now: float) -> int:
    """Unix seconds, at least 0, from `now`, an age (`10m`), Unix seconds or ISO 8601. Raises `ValueError`.

    A time without a zone is in UTC.
    """
    if text == "now":
        return int(now)
    if age := _is_duration(text):
        return max(0, int(now) - int(age[1]) * _UNITS[age[2]])
    if _is_unix_time(text):
        return int(text)
    try:
        parsed = datetime.fromisoformat(text)
        return max(0, int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()))
    except (ValueError, OverflowError):
        raise ValueError(f"not a time: {text!r}; try 2h, now, 1760000000 or 2026-01-31T12:00:00Z") from None
