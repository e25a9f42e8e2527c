"""What can be set (T-041, T-050, T-056, T-065, T-076, T-099), in code or in the environment.

`ChannelSettings()` are the defaults; `ChannelSettings.from_environment()` reads `STRATA_CHANNEL_` and the
name in capitals, such as `STRATA_CHANNEL_MESSAGE_DELIVERY_TIMEOUT=10`. `dial` and `serve` read the
environment when they are given no settings. Both ends should have the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["ENVIRONMENT_PREFIX", "ChannelSettings"]

ENVIRONMENT_PREFIX = "STRATA_CHANNEL_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """Sizes in bytes, durations in seconds. Raises `ValueError` for what cannot be meant."""

    codec_max_frame_length: int = 64 * 2**20
    """The largest frame, sent or received."""
    message_ack_every_n_messages: int = 1000
    """An acknowledgement goes out after so many messages at the latest …"""
    message_ack_time_interval: float = 0.5
    """… or after so long."""
    message_ack_eagerly: bool = True
    """Acknowledge whatever arrived together at once; the two above are bounds then."""
    message_delivery_timeout: float = 30.0
    """The oldest message that has not been acknowledged may become so old; then the channel is closed."""
    queue_capacity: int = 1024
    """Messages that wait for `recv` at a server, of all its senders together."""
    outbox_limit: int | None = None
    """Messages that may wait at a sender, or any number."""
    session_timeout: float = 120.0
    """How long a session without a connection is remembered; longer than its sender's delivery timeout."""
    max_sessions: int = 10_000
    """Sessions a server remembers; a further one is refused."""
    max_connections: int = 1000
    """Connections a server has at once; a further one is closed at once."""
    link_timeout: float = 10.0
    """A connection that brings no acknowledgement for so long, while some are due, is taken to be dead."""
    idle_frame_timeout: float = 30.0
    """A frame, or the beginning of a connection, of which nothing more comes for so long is given up."""
    connect_timeout: float = 10.0
    """One attempt to connect takes no longer."""
    backoff_base: float = 0.001
    """The first wait between attempts; it doubles …"""
    backoff_cap: float = 1.0
    """… up to this."""
    tls_certificate: Path | None = None
    """PEM file with the certificate, and those between it and the authority."""
    tls_key: Path | None = None
    """PEM file with its key."""
    tls_authorities: Path | None = None
    """PEM file with the authorities that peers' certificates must come from; the system's own by default."""
    tls_mutual: bool = False
    """A server demands a certificate of its clients."""

    def __post_init__(self) -> None:
        for name in ("message_ack_every_n_messages", "queue_capacity", "max_sessions", "max_connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} has to be at least 1")
        for name in _DURATIONS:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} has to be a number of seconds above 0")
        if not 64 <= self.codec_max_frame_length < 2**63:
            raise ValueError("codec_max_frame_length has to be at least 64, and below 2**63")
        if self.outbox_limit is not None and self.outbox_limit < 1:
            raise ValueError("outbox_limit has to be at least 1")
        if self.session_timeout <= self.message_delivery_timeout:
            # Else a sender could come back with messages that a forgotten session has taken already.
            raise ValueError("session_timeout has to be longer than message_delivery_timeout")
        if self.backoff_cap < self.backoff_base:
            raise ValueError("backoff_cap has to be at least backoff_base")
        if (self.tls_key is None) != (self.tls_certificate is None):
            raise ValueError("tls_certificate and tls_key go together")

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **settings: Any
    ) -> ChannelSettings:
        """The settings that the environment names, and those given, which go before. Raises `ValueError`."""
        found: dict[str, Any] = {}
        for field in fields(cls):
            name = ENVIRONMENT_PREFIX + field.name.upper()
            text = (os.environ if environment is None else environment).get(name)
            if text is not None:
                try:
                    found[field.name] = _READERS[str(field.type)](text)
                except ValueError:
                    raise ValueError(f"{name}={text!r} is no {_NAMES[str(field.type)]}") from None
        return cls(**(found | settings))


_DURATIONS = (
    *("message_ack_time_interval", "message_delivery_timeout", "session_timeout", "link_timeout"),
    *("idle_frame_timeout", "connect_timeout", "backoff_base", "backoff_cap"),
)


def _boolean(text: str) -> bool:
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
    raise ValueError(text)


_READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "int | None": lambda text: int(text) if text else None,
    "float": float,
    "bool": _boolean,
    "Path | None": lambda text: Path(text) if text else None,
}
_NAMES = {
    "int": "whole number",
    "int | None": "whole number",
    "float": "number of seconds",
    "bool": "true or false",
    "Path | None": "path",
}
