"""Complete plain HTTP responses, without a socket. An error is `{"error": code, "reason": sentence}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import msgspec

__all__ = ["JSON", "NO_STORE", "PUBLIC", "Response", "error_response", "json_response", "kept_for"]

JSON: Final = "application/json"
NO_STORE: Final[Mapping[str, str]] = MappingProxyType({"Cache-Control": "no-store"})
PUBLIC: Final[Mapping[str, str]] = MappingProxyType({"Access-Control-Allow-Origin": "*"})
"""Any web page may read these responses: they are public, and no cookie or address reveals more."""

_ENCODE = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Response:
    """One HTTP response; the shell adds Content-Length, Content-Type and Connection."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def kept_for(seconds: int, expires_at: int | None, now: int) -> dict[str, str]:
    """Headers that let anybody cache an answer for `seconds`, but never past the second in which its contents
    expire (R-100): a cache does not ask the relay before it serves the answer."""
    if expires_at is not None:
        seconds = max(0, min(seconds, expires_at - now))
    return {"Cache-Control": f"public, max-age={seconds}", **PUBLIC}


def json_response(status: int, value: object, headers: Mapping[str, str] = NO_STORE) -> Response:
    """A response whose body is this value as JSON."""
    return Response(status, JSON, _ENCODE(value), headers)


def error_response(
    status: int, error: str, reason: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A refusal; one with status 503 says that it may be tried again in a second."""
    again = {"Retry-After": "1"} if status == 503 else {}
    return json_response(status, {"error": error, "reason": reason}, {**again, **NO_STORE, **(headers or {})})
