"""The options of a relay connection, in one frozen value."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final, Literal
from urllib.parse import urlsplit

from strata.protocol.ids import is_did
from strata.relays.arguments import check_options, texts

__all__ = ["Options"]

_PROXIES: Final = ("http", "https", "socks4", "socks4a", "socks5", "socks5h")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a relay connection behaves. All times are seconds, all sizes bytes; for a time, None means "no
    limit", as `math.inf` does.

    Construction raises `ValueError` for a value that cannot work, and `TypeError` for one of another type.
    """

    connect_timeout: float = 10.0
    """How long opening may take in all, over several attempts, before it raises `ConnectionFailed`."""
    handshake_timeout: float = 10.0
    """How long one attempt may take: TCP, TLS and the WebSocket handshake."""
    manifest_timeout: float = 5.0
    """How long to wait for the relay's manifest; without it the relay counts as plain (R-139)."""
    close_timeout: float = 5.0
    """How long the closing handshake may take before the socket is dropped."""
    write_timeout: float = 60.0
    """How long a relay may accept no data from us before the connection counts as dead."""
    ping_interval: float | None = 30.0
    """How often an idle connection is pinged (R-130); one that is in doubt is pinged at once."""
    ping_timeout: float | None = 60.0
    """How long nothing may come after a ping before the connection counts as dead (R-130); 3 s in doubt."""

    backoff_base: float = 0.5
    """The longest wait before the first attempt to reconnect; it doubles with each attempt (R-339)."""
    backoff_cap: float = 30.0
    """The longest wait between attempts."""
    stable_after: float = 10.0
    """A connection that lasted this long resets the backoff."""

    authenticate: Literal["never", "when_needed", "always"] = "when_needed"
    """When to prove the connection's identity to the relay (R-267): never, once the relay refuses a request
    because the session is not authenticated, or on each connection before any request. Without an identity:
    never."""
    capabilities: tuple[str, ...] | None = None
    """The capabilities to request in AUTH (R-286); None requests all that the relay grants."""
    auth_timeout: float = 5.0
    """How long to wait for a challenge, and for the answer to AUTH, before the attempt fails (R-295)."""
    relay_id: str | None = None
    """The DID the relay must show before a challenge is signed (R-298). None holds the relay to the DID it
    showed first: for as long as the relay object lives, or permanently with a `PinFile`."""

    publish_timeout: float = 30.0
    """How long a publish may take in all, unless the call gives a timeout (R-193)."""
    ack_timeout: float = 15.0
    """How long to wait for an answer before the identical packet is sent again (R-194)."""
    max_in_flight: int = 256
    """The most publishes in progress; the next one waits for its turn."""

    queue_events: int = 1024
    """The most events one subscription holds for its consumer; when full, it leaves the relay's feed for a
    while."""
    queue_bytes: int = 8 * 2**20
    """The most bytes one subscription holds for its consumer."""
    page_events: int = 500
    """The most packets requested in one page of history (A-043)."""
    idle_timeout: float = 3.0
    """After this much silence a plain relay, which does not mark the end of history, counts as having sent
    all of it (A-047)."""
    history_timeout: float = 30.0
    """After this much silence a relay that does mark the end of history counts as having failed to."""
    dedup_packets: int = 16_384
    """How many of the latest packet ids a subscription remembers in order to drop repeats (R-116)."""

    resolve_keys: bool = True
    """Whether to ask the relay for authors' key events before their packets are judged (R-075). If False,
    only the key in an author's own DID counts: rotated keys are refused, revoked ones are not."""
    key_refresh_interval: float = 300.0
    """How long until the relay is asked again for an author's key events, so that revocations are noticed."""
    key_timeout: float = 30.0
    """How long the relay may take to answer a request for authors' keys."""
    key_authors: int = 16_384
    """How many authors' keys are remembered; those met least recently are forgotten first."""

    max_message_bytes: int = 3 * 1_048_576 + 65_536
    """The largest message accepted from a relay: the largest possible packet, annotations that quote its
    header and the origin in it (R-209), and an envelope."""
    compression: bool = False
    """Whether to offer permessage-deflate: it saves perhaps half the traffic for several times the CPU."""
    proxy: str | None = None
    """The URL of an HTTP or SOCKS proxy. The manifest is not fetched through a proxy, so the relay counts as
    plain until it announces its extensions on the connection."""

    def __post_init__(self) -> None:
        if self.authenticate not in ("never", "when_needed", "always"):
            raise ValueError(f"authenticate must be never, when_needed or always, not {self.authenticate!r}")
        for field in fields(self):
            if field.type == "float" and getattr(self, field.name) is None:
                object.__setattr__(self, field.name, math.inf)
        check_options(self)
        if isinstance(self.capabilities, str):
            raise TypeError(f"capabilities must be a tuple of strings, as ({self.capabilities!r},)")
        if self.capabilities is not None:
            object.__setattr__(self, "capabilities", texts("capabilities", self.capabilities))
        if self.relay_id is not None and not is_did(self.relay_id):
            raise ValueError(f"relay_id must be a DID, as did:strata:z6Mk…, not {self.relay_id!r}")
        if self.proxy is not None and not _is_proxy(self.proxy):
            raise ValueError(f"proxy must be a URL of {', '.join(_PROXIES)}, not {self.proxy!r}")
        if self.backoff_cap < self.backoff_base:
            raise ValueError("backoff_cap must not be below backoff_base")
        if self.page_events > self.queue_events:
            raise ValueError("page_events must not exceed queue_events: a page has to fit into the queue")
        if self.key_authors < 1024:
            raise ValueError("key_authors must be at least 1024: a queue of events may be by as many")
        if self.dedup_packets < 2:
            raise ValueError("dedup_packets must be at least 2")


def _is_proxy(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in _PROXIES and bool(parts.hostname)
