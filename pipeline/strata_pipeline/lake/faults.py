"""What is found wrong with the files of a lake. No I/O."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Fault"]


class Fault(NamedTuple):
    """One fault of the files."""

    about: str
    """`batch`, `row`, `folder` or `file`."""
    reason: str
    detail: str
    sequence: int | None = None
    packet_id: bytes | None = None
    file: str | None = None
    row: int | None = None
    """The number in its file, from 0."""
