"""Members of a JSON object that must have a certain form; null means the same as absence (R-032, A-004).

Each function returns the member or refuses the object with `invalid_schema`. A refusal names the member and
never quotes its value.
"""

from __future__ import annotations

from typing import NoReturn

from strata.protocol import fields
from strata.protocol.errors import ErrorCode, InvalidPacket

__all__ = ["integer", "optional_integer", "optional_text", "optional_texts", "refuse", "text"]


def refuse(reason: str, detail: str | None = None) -> NoReturn:
    """Raise `InvalidPacket` with `invalid_schema`."""
    raise InvalidPacket(ErrorCode.INVALID_SCHEMA, reason, detail=detail)


def text(members: dict[str, object], name: str) -> str:
    """A required string."""
    value = optional_text(members, name)
    if value is None:
        refuse(f"{name} is missing")
    return value


def optional_text(members: dict[str, object], name: str) -> str | None:
    """A string, or None."""
    value = members.get(name)
    if value is not None and type(value) is not str:
        refuse(f"{name} is not a string")
    return value


def integer(members: dict[str, object], name: str) -> int:
    """A required integer from 0 up."""
    value = optional_integer(members, name)
    if value is None:
        refuse(f"{name} is missing")
    return value


def optional_integer(members: dict[str, object], name: str) -> int | None:
    """An integer from 0 up, or None."""
    value = members.get(name)
    if value is None:
        return None
    number = fields.integer(value)
    if number is None or number < 0:
        refuse(f"{name} is not an integer from 0 up")
    return number


def optional_texts(members: dict[str, object], name: str) -> tuple[str, ...] | None:
    """An array of strings, or None."""
    value = members.get(name)
    if value is None:
        return None
    if type(value) is not list or not all(type(item) is str for item in value):
        refuse(f"{name} is not an array of strings")
    return tuple(value)
