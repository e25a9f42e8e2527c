"""The decisions before a session exists: addresses, origins, connection limits (RFC-0004 §8; R-321).

A socket counts for its address from the moment it is accepted, whether it says anything or not. At the
opening handshake the address may turn out to be another one, behind a proxy that is trusted; then that one
counts. So no address holds more than `max_connections_per_address` sessions, and twice as many sockets at
most.

`unlimited_addresses` are networks that no rate limit and no connection cap holds for, by default the machine
itself. A request that names somebody it speaks for never belongs to them: behind a proxy that nobody
declared, all clients share that proxy's budgets, rather than being free of any.

No I/O: the shell passes what the socket and the request say, and the time in monotonic seconds.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from relayd.access.auth import Grants
from relayd.access.limits import Limits, Quota, Quotas
from relayd.addresses import (
    FORWARDING_HEADERS,
    Address,
    Networks,
    address_key,
    client_address,
    parse_address,
)
from relayd.config import Settings

__all__ = ["Access", "RequestHeaders", "Turnaway", "Visitor", "grants_of"]

_SPARE_SOCKETS: Final = 1024
"""Sockets beyond `max_connections` that may be open for a refusal or a plain HTTP request."""

_MAX_ORIGIN: Final = 300
"""Characters of an origin that are kept: more than `https://`, a host of 253 characters and a port."""


class RequestHeaders(Protocol):
    """The headers of an opening handshake, names in any case."""

    def get_all(self, name: str, /) -> Sequence[str]: ...


@dataclass(slots=True)
class Visitor:
    """Where one socket comes from, and what its requests are charged to.

    `quota` is its address's, and None for an address without limits. `identity_quota` is that of the identity
    the session has proved to speak for, which then counts instead (R-316).
    """

    peer: Address | None = None
    address: Address | None = None
    quota: Quota | None = None
    identity_quota: Quota | None = None
    origins: tuple[str, ...] = ()
    """The web page that connected, as its browser names it; programs name none."""

    @property
    def charged(self) -> Quota | None:
        """What PUBLISH, SUBSCRIBE and history are charged to; None sets no limit."""
        return self.identity_quota or self.quota

    @property
    def key(self) -> str | None:
        """The address, as far as budgets tell addresses apart."""
        return None if self.address is None else address_key(self.address)


@dataclass(frozen=True, slots=True)
class Turnaway:
    """A handshake that is refused: the HTTP status, a sentence, and the reason counted."""

    status: int
    sentence: str
    reason: str
    retry_after: int | None = None


def grants_of(settings: Settings) -> Grants:
    """The grants of these settings."""
    return Grants(
        require_auth=frozenset(settings.require_auth),
        members=frozenset(settings.members),
        peers=frozenset(settings.replication_peers),
    )


def _origins_of(headers: RequestHeaders) -> tuple[str, ...]:
    """The origins a handshake names: a browser names one, so no more than two are kept, and no long one."""
    return tuple(origin[:_MAX_ORIGIN].lower() for origin in headers.get_all("Origin")[:2])


class Access:
    """The doors of one process: quotas of addresses and of identities, origins, grants."""

    def __init__(self, settings: Settings) -> None:
        window = settings.limit_window_seconds
        anonymous = Limits(
            publishes=settings.anonymous_publish_limit,
            subscribes=settings.anonymous_subscribe_limit,
            backfill_bytes=settings.anonymous_backfill_limit_bytes,
            auths=settings.auth_limit,
            connects=settings.connection_limit,
            window_seconds=window,
        )
        authenticated = Limits(
            publishes=settings.publish_limit,
            subscribes=settings.subscribe_limit,
            backfill_bytes=settings.backfill_limit_bytes,
            window_seconds=window,
        )
        self.addresses = Quotas(anonymous)
        self.identities = Quotas(authenticated)
        self.revision = 0
        """Rises with every change that open sessions must follow."""
        self._restricted: frozenset[str] = frozenset()
        self._restricted_quotas = Quotas(anonymous)
        self._max_sockets = settings.max_connections + _SPARE_SOCKETS
        self._per_address = settings.max_connections_per_address
        self._trusted = Networks(settings.trusted_proxies)
        self._unlimited = Networks(settings.unlimited_addresses)
        self._header = settings.forwarded_header
        self._log_addresses = settings.log_addresses
        self._knows_of_proxy = False
        self.reload(settings)

    def reload(self, settings: Settings) -> None:
        """Take over the settings that may change while running; open sessions see it by `revision`."""
        self.grants = grants_of(settings)
        self._origins = frozenset(origin.lower() for origin in settings.allowed_origins)
        self.revision += 1

    @property
    def restricted(self) -> frozenset[str]:
        """Identities held to the limits of anonymous sessions, even when they authenticate."""
        return self._restricted

    @restricted.setter
    def restricted(self, identities: frozenset[str]) -> None:
        if identities != self._restricted:
            self._restricted = identities
            self.revision += 1

    def arrive(self, visitor: Visitor, peer: str | None, open_sockets: int, now: float) -> bool:
        """A socket was accepted. False: there are too many, and it is dropped without a word."""
        if open_sockets > self._max_sockets:
            return False
        address = visitor.peer = visitor.address = None if peer is None else parse_address(peer)
        if address is None or address in self._trusted or address in self._unlimited:
            return True
        visitor.quota = self.addresses.hold(address_key(address))
        return not self._per_address or visitor.quota.holders <= 2 * self._per_address

    def leave(self, visitor: Visitor, now: float) -> None:
        """The socket has closed."""
        self._release_identity(visitor, now)
        self._release_address(visitor, now)

    def identify(self, visitor: Visitor, headers: RequestHeaders, now: float) -> bool:
        """The request is there: settle whose address counts.

        True the first time that an address without limits turns out to be an undeclared proxy.
        """
        hops = headers.get_all(self._header)
        address = client_address(visitor.peer, hops, self._header, self._trusted)
        if address is None:
            return False
        spoken_for = any(headers.get_all(name) for name in FORWARDING_HEADERS)
        is_limited = spoken_for or address not in self._unlimited
        if address != visitor.address or (is_limited and visitor.quota is None):
            self._release_address(visitor, now)
            visitor.address = address
            if is_limited:
                visitor.quota = self.addresses.hold(address_key(address))
        undeclared = spoken_for and address in self._unlimited and visitor.peer not in self._trusted
        if undeclared and not self._knows_of_proxy:
            self._knows_of_proxy = True
            return True
        return False

    def judge(self, visitor: Visitor, headers: RequestHeaders, now: float) -> Turnaway | None:
        """Whether a WebSocket handshake is refused; one that is not counts as a connection."""
        visitor.origins = _origins_of(headers)
        if not self.takes_origin(visitor):
            return Turnaway(403, "This relay takes no connections from that origin.", "origin")
        quota = visitor.quota
        if quota is None:
            return None
        if self._per_address and quota.holders > self._per_address:
            return Turnaway(429, "Too many connections from this address.", "address_limit", 1)
        if quota.connect is not None and not quota.connect.take(now):
            wait = quota.connect.excess(now).retry_after
            return Turnaway(429, "Too many connections from this address lately.", "connection_rate", wait)
        return None

    def takes_origin(self, visitor: Visitor) -> bool:
        """Whether the page that this visitor came by may connect, as the settings are now."""
        return not self._origins or self._origins.issuperset(visitor.origins)

    def shown(self, visitor: Visitor) -> dict[str, str]:
        """The fields of a log line about a visitor's address (R-330)."""
        if self._log_addresses == "off" or visitor.address is None:
            return {}
        if self._log_addresses == "full":
            return {"full_address": str(visitor.address)}
        return {"client_address": str(visitor.address)}  # which every line of the log truncates

    def authenticated(self, visitor: Visitor, did: str, now: float) -> None:
        """The visitor has proved to be `did`: its requests are charged to that identity from now on.

        An address without limits stays without limits, whichever identity connects from there.
        """
        self._release_identity(visitor, now)
        if visitor.quota is not None:
            quotas = self._restricted_quotas if did in self.restricted else self.identities
            visitor.identity_quota = quotas.hold(did)

    def reconsider(self, visitor: Visitor, did: str, now: float) -> None:
        """Move an authenticated visitor to the quota that its identity is due now."""
        if visitor.identity_quota is not None:
            due = self._restricted_quotas if did in self.restricted else self.identities
            if not due.holds(visitor.identity_quota):
                self.authenticated(visitor, did, now)

    def _release_address(self, visitor: Visitor, now: float) -> None:
        if visitor.quota is not None:
            self.addresses.release(visitor.quota, now)
            visitor.quota = None

    def _release_identity(self, visitor: Visitor, now: float) -> None:
        quota = visitor.identity_quota
        if quota is not None:
            # It may have been restricted since: what counts is where the quota came from.
            quotas = self.identities if self.identities.holds(quota) else self._restricted_quotas
            quotas.release(quota, now)
            visitor.identity_quota = None
