"""Parsing of the commands' arguments and input lines: contents and payloads."""

from __future__ import annotations

import base64
import binascii

import msgspec

__all__ = ["content_of", "content_of_line", "payload_of_line"]


def content_of(text: str, type: str) -> dict[str, object]:
    """The content in a JSON object; `type` is added if it has none. Raises `ValueError`."""
    try:
        content = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        raise ValueError("the content is not JSON") from None
    if not isinstance(content, dict):
        raise ValueError("the content is not a JSON object")
    return {"type": type, **content}


def content_of_line(line: str, type: str) -> dict[str, object]:
    """The content in a line of input: a JSON object as it is (see `content_of`), anything else as text.

    Raises `ValueError` for a line that begins with { and is not a JSON object.
    """
    return content_of(line, type) if line.lstrip().startswith("{") else {"type": type, "text": line}


def payload_of_line(line: bytes, *, as_json: bool) -> bytes:
    """The message in a line of input; empty for an empty line. Raises `ValueError`."""
    line = line.rstrip(b"\r")
    if as_json and line.lstrip().startswith(b"{"):
        try:
            given = msgspec.json.decode(line, type=_Line)
            if (given.text is None) == (given.base64 is None):
                raise ValueError
            return given.text.encode() if given.text is not None else _from_base64(given.base64 or "")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise ValueError(
                'a line that begins with { must be {"text": "…"} or {"base64": "…"}; anything else is text'
            ) from None
    try:
        line.decode()
    except UnicodeDecodeError:
        raise ValueError('the line is not UTF-8; with --json, send bytes as {"base64": "…"}') from None
    return line


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    text: str | None = None
    base64: str | None = None


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
