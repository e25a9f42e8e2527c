"""Faults in the files of a lake. No I/O."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["About", "Fault"]

About: TypeAlias = Literal["batch", "row", "packet", "log", "folder", "file", "erasure", "witness"]
"""What a fault, and thus a finding of an audit, can be about."""


class Fault(NamedTuple):
    """One fault in the files."""

    about: About
    reason: str
    detail: str
    sequence: int | None = None
    packet_id: bytes | None = None
    file: str | None = None
    row: int | None = None
    """The number of the row in its file, from 0."""
