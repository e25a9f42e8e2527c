"""An encoder and decoder of the program's own around every transport message (C-010, A-103)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Protocol, runtime_checkable

from strata.channels.reliable.errors import EncodingFailed

__all__ = ["CodecPair", "Decoder", "Encoder"]


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


class CodecPair:
    """An encoder and its decoder, or neither: then payloads stay as they are."""

    def __init__(self, encoder: Encoder | None, decoder: Decoder | None) -> None:
        """Raises `ValueError` for one without the other."""
        if (encoder is None) != (decoder is None):
            raise ValueError("an encoder needs its decoder, and the other way round")
        self._encoder = encoder
        self._decoder = decoder
        self.overhead = int(getattr(encoder, "overhead", 0))

    @property
    def content_topic(self) -> str | None:
        """The topic the encoder names."""
        return None if self._encoder is None else self._encoder.content_topic

    def encode(self, payload: bytes) -> bytes:
        """The bytes to send. Raises `EncodingFailed` whatever the encoder raised."""
        if self._encoder is None:
            return payload
        try:
            return self._encoder.encode(payload)
        except Exception as error:
            raise EncodingFailed from error

    def decode(self, payload: bytes) -> bytes | None:
        """The bytes inside, None if there are none. Never raises for them."""
        if self._decoder is None:
            return payload
        try:
            return self._decoder.decode(payload)
        except Exception:
            return None
