"""Parsing of times and contents given to the commands."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec

__all__ = ["content_of", "content_of_line", "moment"]

_is_age = re.compile(r"(\d+)([smhd])").fullmatch
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def moment(text: str, now: float) -> int:
    """Unix seconds of `now`, an age (`10m`), Unix seconds or ISO 8601 (UTC unless it says otherwise).

    Raises `ValueError`.
    """
    if text == "now":
        return int(now)
    if age := _is_age(text):
        return int(now) - int(age[1]) * _UNITS[age[2]]
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"not a time: {text!r}; try 2h, now, 1760000000 or 2026-01-31T12:00:00Z") from None
    return int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())


def content_of(text: str, type: str) -> dict[str, object]:
    """The content in a JSON object, with `type` where it has none. Raises `ValueError`."""
    try:
        content = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        raise ValueError("the content is not JSON") from None
    if not isinstance(content, dict):
        raise ValueError("the content is not a JSON object")
    return {"type": type, **content}


def content_of_line(line: str, type: str) -> dict[str, object]:
    """The content in a line of input: a JSON object as it is, anything else as text.

    Raises `ValueError` for a line that begins with { and is no object.
    """
    return content_of(line, type) if line.lstrip().startswith("{") else {"type": type, "text": line}
