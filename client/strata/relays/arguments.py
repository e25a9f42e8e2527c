"""Checking the arguments of a program: an error names the argument and says what it must be.

Types are checked where a wrong one would be noticed late, elsewhere or never: a time as a float, a single
string instead of several, an option as text. `ValueError` is for values, `TypeError` for types.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any, cast

from strata.protocol import ids
from strata.protocol.packets import Packet

__all__ = [
    "authors_of",
    "check_authors",
    "check_connecting",
    "check_options",
    "check_packet",
    "check_text",
    "check_timeout",
    "check_whole",
    "texts",
]

_OPTIONS: dict[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("True or False", (bool,)),
    "float": ("a number", (int, float)),
    "float | None": ("a number or None", (int, float, type(None))),
    "int": ("a whole number", (int,)),
    "str | None": ("a string or None", (str, type(None))),
}
"""What an option's annotation requires, in words and in types. Options with other annotations are not checked
here."""


def texts(name: str, values: object) -> tuple[str, ...]:
    """The strings of an argument, each once; a single string means itself, not its letters.

    Raises `TypeError` for anything else.
    """
    if isinstance(values, str):
        return (values,)
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a string, or several in a list, not {_shown(values)}")
    several = tuple(dict.fromkeys(values))
    for value in several:
        if not isinstance(value, str):
            raise TypeError(f"{name} must be strings, and one of them is {_shown(value)}")
    return several


def check_authors(authors: Iterable[str], name: str = "authors") -> None:
    """Raise `ValueError` for an author that no packet can have."""
    for author in authors:
        if not ids.is_did(author):
            raise ValueError(f"{name} must be DIDs, as did:strata:z6Mk…, not {_shown(author)}")


def authors_of(name: str, authors: object) -> tuple[str, ...]:
    """The DIDs of an argument, each once; a single string is one DID.

    Raises `TypeError` for anything but strings, and `ValueError` for an author that no packet can have.
    """
    several = texts(name, authors)
    check_authors(several, name)
    return several


def check_connecting(url: object, identity: object) -> None:
    """Raise `TypeError` for arguments of the wrong type. Whether the URL is one is checked on opening."""
    if not isinstance(url, str):
        raise TypeError(f"url must be a string, as ws://127.0.0.1:7447/strata, not {_shown(url)}")
    if identity is not None and not (hasattr(identity, "did") and hasattr(identity, "sign")):
        raise TypeError(f"identity must be an Identity, as of Identity.load(path), not {_shown(identity)}")


def check_packet(packet: object) -> None:
    """Raise `TypeError` unless this is a packet."""
    if not isinstance(packet, Packet):
        raise TypeError(
            f"packet must be a Packet, not {type(packet).__name__}: `post` signs content, and `Packet.read` "
            "reads bytes"
        )


def check_timeout(timeout: object) -> None:
    """Raise `TypeError` or `ValueError` unless this is None or a number of seconds, which may be negative."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
        raise TypeError(f"timeout must be a number of seconds, not {_shown(timeout)}")
    if isinstance(timeout, float) and math.isnan(timeout):
        raise ValueError("timeout must be a number of seconds, not NaN")


def check_whole(name: str, value: int | None, what: str) -> None:
    """Raise `TypeError` unless the argument is a whole number or None."""
    if value is not None and type(value) is not int:
        hint = ": use int(…)" if isinstance(value, float) else ""
        raise TypeError(f"{name} must be {what} as a whole number, not {_shown(value)}{hint}")


def check_text(name: str, value: object, *, may_be_none: bool = True) -> None:
    """Raise `TypeError` unless the argument is a string, or None if `may_be_none`."""
    if not isinstance(value, str) and (value is not None or not may_be_none):
        raise TypeError(f"{name} must be a string, not {_shown(value)}")


def check_options(options: object, *, may_be_zero: Collection[str] = ()) -> None:
    """Check every option of a dataclass against its annotation; numbers must be positive.

    Raises `TypeError` and `ValueError`.
    """
    for field in fields(cast(Any, options)):
        value = getattr(options, field.name)
        wanted = _OPTIONS.get(str(field.type))
        if wanted is None:
            continue
        words, types = wanted
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(f"{field.name} must be {words}, not {_shown(value)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least = 0 if field.name in may_be_zero else math.ulp(0.0)
        if not value >= least:  # also refuses NaN
            raise ValueError(f"{field.name} must be positive, not {value}")


def _shown(value: object) -> str:
    """The value as text, cut to fit into a sentence."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
