"""An encoder and decoder of the program's own around every transport message (C-010, A-103)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Decoder", "Encoder"]


@runtime_checkable
class Encoder(Protocol):
    """Gives bytes the form in which the transport carries them. `overhead` may say by how much they grow."""

    @property
    def content_topic(self) -> str:
        """The topic of every message."""
        ...

    def encode(self, payload: bytes, /) -> bytes:
        """The bytes to send."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """Undoes what the encoder did."""

    def decode(self, payload: bytes, /) -> bytes | None:
        """The bytes inside; None, or any exception, for a payload that does not belong to this channel."""
        ...
