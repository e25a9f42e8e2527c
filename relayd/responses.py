"""Complete plain HTTP responses, without a socket. An error is `{"error": code, "reason": sentence}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import msgspec

__all__ = [
    "JSON",
    "NO_STORE",
    "PUBLIC",
    "Response",
    "error_response",
    "items_of",
    "json_response",
    "kept_for",
    "unless_known",
]

JSON: Final = "application/json"
NO_STORE: Final[Mapping[str, str]] = MappingProxyType({"Cache-Control": "no-store"})
PUBLIC: Final[Mapping[str, str]] = MappingProxyType({"Access-Control-Allow-Origin": "*"})
"""Any web page may read these responses: they are public, and no cookie or address reveals more."""

_LONGEST_HEADER: Final = 1000
_NOT_WANTED: Final = re.compile(r"[qQ]=0(\.0{0,3})?")
"""The weight of an item that a client refuses (RFC 9110 section 12.4.2)."""
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
    """A refusal; one with status 503 says that it may be tried again in a second.

    Any web page may read it: otherwise a page could not tell a packet that is not there from a relay that is
    not there.
    """
    again = {"Retry-After": "1"} if status == 503 else {}
    said = {**again, **NO_STORE, **PUBLIC, **(headers or {})}
    if "Retry-After" in said:
        said["Access-Control-Expose-Headers"] = "Retry-After"
    return json_response(status, {"error": error, "reason": reason}, said)


def items_of(lines: Sequence[str]) -> set[str]:
    """The items of a list in a header, without their parameters; only the first of a long list."""
    line = ",".join(lines[:4])[:_LONGEST_HEADER]
    items = (item.partition(";") for item in line.split(","))
    return {
        head.strip().removeprefix("W/")
        for head, _, rest in items
        if not _NOT_WANTED.fullmatch(rest.replace(" ", ""))
    }


def unless_known(answer: Response, if_none_match: Sequence[str]) -> Response:
    """This answer, or 304 if the client already has what it would get (RFC 9110 section 13.1.2)."""
    tag = answer.headers.get("ETag")
    if answer.status != 200 or tag is None or not {tag, "*"} & items_of(if_none_match):
        return answer
    return replace(answer, status=304, body=b"")
