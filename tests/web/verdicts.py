"""The verdicts of checks, in a form that JSON can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata.protocol.errors import InvalidInput

__all__ = ["verdict"]


def verdict(check: Callable[..., object], *arguments: object, **named: object) -> dict[str, Any]:
    """The verdict of a check: nothing, or the code and detail of its refusal."""
    try:
        check(*arguments, **named)
    except InvalidInput as refusal:
        return {"code": str(refusal.code), "detail": refusal.detail}
    return {"code": None, "detail": None}
