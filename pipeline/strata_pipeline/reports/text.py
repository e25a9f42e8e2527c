"""Text for reports, much of which comes from strangers."""

from __future__ import annotations

import datetime
import html
import unicodedata

__all__ = [
    "count_text",
    "date_text",
    "escaped",
    "hour_text",
    "seconds_text",
    "share_text",
    "shortened",
    "size_text",
    "visible",
]

_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def escaped(text: str) -> str:
    """A `visible` text, escaped for HTML and SVG."""
    return html.escape(visible(text), quote=True)


def visible(text: str) -> str:
    """A text in which U+FFFD replaces invisible characters, including line ends.

    So it can neither change the direction of the text around it nor steer a terminal.
    """
    return "".join("\ufffd" if unicodedata.category(letter) in _UNSEEN else letter for letter in text)


def shortened(text: str, characters: int) -> str:
    """A text of at most `characters` characters: the beginning and the end, where DIDs and topics differ."""
    if len(text) <= characters:
        return text
    end = characters // 3
    return f"{text[: characters - end - 1]}…{text[-end:]}"


def count_text(number: float | None) -> str:
    """12,345; an en dash for None."""
    return "–" if number is None else f"{number:,.10g}"


def seconds_text(seconds: float | None) -> str:
    """0 s, 1.5 s, 90 s, 3 min, 2 h, 4 d; -2 h."""
    if seconds is None:
        return "–"
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length or seconds == length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def share_text(share: float | None) -> str:
    """12.3 %."""
    return "–" if share is None else f"{100 * share:.1f} %"


def size_text(size: float | None) -> str:
    """512 B, 1.5 KiB, 2.3 GiB."""
    if size is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} TiB"


def hour_text(at: int) -> str:
    """Unix seconds as 2026-11-21 13:00, in UTC; seconds outside the calendar as a number."""
    try:
        return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return f"{at} s"


def date_text(at: int) -> str:
    """The day of Unix seconds, as 2026-11-21."""
    return hour_text(at).split(" ")[0]
