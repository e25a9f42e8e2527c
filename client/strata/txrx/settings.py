"""Settings of Tx and Rx (T-041, T-050, T-056, T-065, T-076, T-099), in code or in the environment.

`TxRxSettings()` has the defaults. `TxRxSettings.from_environment()` reads variables named `STRATA_CHANNEL_`
and the setting in capitals, such as `STRATA_CHANNEL_MESSAGE_DELIVERY_TIMEOUT=10`. `dial` and `serve` read the
environment if no settings are passed. Both ends should have the same settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict, Unpack

__all__ = ["ENVIRONMENT_PREFIX", "TxRxOptions", "TxRxSettings"]

ENVIRONMENT_PREFIX = "STRATA_CHANNEL_"


class TxRxOptions(TypedDict, total=False):
    """The fields of `TxRxSettings`, as keyword arguments."""

    codec_max_frame_length: int
    message_ack_every_n_messages: int
    message_ack_time_interval: float
    message_ack_eagerly: bool
    message_delivery_timeout: float
    queue_capacity: int
    outbox_limit: int | None
    session_timeout: float
    max_sessions: int
    max_connections: int
    link_timeout: float
    idle_frame_timeout: float
    connect_timeout: float
    backoff_base: float
    backoff_cap: float
    tls_certificate: Path | None
    tls_key: Path | None
    tls_authorities: Path | None
    tls_mutual: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TxRxSettings:
    """The settings of an end: sizes in bytes, durations in seconds. Raises `ValueError` for bad values."""

    codec_max_frame_length: int = 64 * 2**20
    """The largest frame, sent or received."""
    message_ack_every_n_messages: int = 1000
    """An acknowledgement is sent after this many messages at the latest …"""
    message_ack_time_interval: float = 0.5
    """… or after this time."""
    message_ack_eagerly: bool = True
    """Acknowledge messages that arrived together at once; the two settings above are then bounds."""
    message_delivery_timeout: float = 30.0
    """The greatest age of an unacknowledged message; beyond it the Tx is closed."""
    queue_capacity: int = 1024
    """The most messages, of all senders together, that may wait for `recv` at a server."""
    outbox_limit: int | None = None
    """The most messages that may wait at a sender; None means no limit."""
    session_timeout: float = 120.0
    """How long a server remembers a session without a connection; longer than the delivery timeout."""
    max_sessions: int = 10_000
    """The most sessions that a server remembers; a further session is refused."""
    max_connections: int = 1000
    """The most connections of a server at one time; a further connection is closed at once."""
    link_timeout: float = 10.0
    """A connection counts as dead if acknowledgements are due and nothing has arrived for this long."""
    idle_frame_timeout: float = 30.0
    """A connection that stalls for this long within a frame or its header is closed."""
    connect_timeout: float = 10.0
    """The longest time for one attempt to connect."""
    backoff_base: float = 0.001
    """The first wait between attempts; it doubles …"""
    backoff_cap: float = 1.0
    """… up to this limit."""
    tls_certificate: Path | None = None
    """The PEM file with the certificate, and the certificates between it and the authority."""
    tls_key: Path | None = None
    """The PEM file with the key of `tls_certificate`."""
    tls_authorities: Path | None = None
    """The PEM file with the authorities that must have signed peers' certificates; None: the system's own."""
    tls_mutual: bool = False
    """Whether a server requires a certificate from its clients."""

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
            # Otherwise a sender could return with messages that a forgotten session has already accepted.
            raise ValueError("session_timeout has to be longer than message_delivery_timeout")
        if self.backoff_cap < self.backoff_base:
            raise ValueError("backoff_cap has to be at least backoff_base")
        if (self.tls_key is None) != (self.tls_certificate is None):
            raise ValueError("tls_certificate and tls_key go together")

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **settings: Unpack[TxRxOptions]
    ) -> TxRxSettings:
        """The settings in the environment, overridden by `settings`. Raises `ValueError` for bad values."""
        found: dict[str, Any] = {}
        for field in fields(cls):
            name = ENVIRONMENT_PREFIX + field.name.upper()
            text = (os.environ if environment is None else environment).get(name)
            if text is not None:
                try:
                    found[field.name] = _READERS[str(field.type)](text)
                except ValueError:
                    raise ValueError(f"{name}={text!r} is not {_NAMES[str(field.type)]}") from None
        return cls(**{**found, **settings})


_DURATIONS = (
    "message_ack_time_interval",
    "message_delivery_timeout",
    "session_timeout",
    "link_timeout",
    "idle_frame_timeout",
    "connect_timeout",
    "backoff_base",
    "backoff_cap",
)


def _boolean(text: str) -> bool:
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
    raise ValueError(text)


_READERS: dict[str, Callable[[str], object]] = {
    "int": int,
    "int | None": lambda text: int(text) if text else None,
    "float": float,
    "bool": _boolean,
    "Path | None": lambda text: Path(text) if text else None,
}
_NAMES = {
    "int": "a whole number",
    "int | None": "a whole number",
    "float": "a number of seconds",
    "bool": "true or false",
    "Path | None": "a path",
}
