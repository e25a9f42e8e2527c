"""The interfaces of a program's own encoder and decoder for transport messages (C-010, A-103)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Decoder", "Encoder"]


@runtime_checkable
class Encoder(Protocol):
    """Gives bytes the form in which the transport carries them.

    An attribute `overhead` may give the number of bytes that this adds.
    """

    @property
    def content_topic(self) -> str:
        """The topic of every message."""
        ...

    def encode(self, payload: bytes, /) -> bytes:
        """Return the bytes to send."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """Undoes what the encoder did."""

    def decode(self, payload: bytes, /) -> bytes | None:
        """Return the bytes inside; for a payload of another channel return None, or raise anything."""
        ...
