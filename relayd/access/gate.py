"""The decisions before a session exists: addresses, origins, connection limits (RFC-0004 §8; R-321).

A socket counts for its address from the moment it is accepted, before TLS and whether it says anything or
not. At the opening handshake the address may turn out to be another one, behind a proxy that is trusted; then
that one counts. So no address holds more than `max_connections_per_address` sessions, and twice as many
sockets at most, nor more than half of the sockets that there may be.

Whoever authenticates is charged as an identity, and its address still is for what all its identities do
together, so that many identities are worth no more than one. Members and peers may be spared that.

`unlimited_addresses` are networks that no rate limit and no connection cap holds for, by default the machine
itself. A request that names somebody it speaks for never belongs to them: behind a proxy that nobody
declared, all clients share that proxy's budgets, rather than being free of any.

No I/O: the shell passes what the socket and the request say, and the time in monotonic seconds.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol
from urllib.parse import urlsplit

from relayd.access.accounts import AddressAccounts
from relayd.access.auth import Grants
from relayd.access.ledger import Book
from relayd.access.limits import Limits, Quota, Quotas, purse
from relayd.access.sources import Sources
from relayd.addresses import (
    FORWARDING_HEADERS,
    Address,
    Networks,
    address_key,
    client_address,
    parse_address,
)
from relayd.config import Settings
from relayd.moderation import Bans

__all__ = ["Access", "RequestHeaders", "Turnaway", "Visitor", "grants_of"]

_SPARE_SOCKETS: Final = 1024
"""Sockets beyond `max_connections` that may be open for a refusal or a plain HTTP request."""

_MAX_ORIGIN: Final = 300
"""Characters of an origin that are kept: more than `https://`, a host of 253 characters and a port."""


class RequestHeaders(Protocol):
    """The headers of an opening handshake, names in any case."""

    def get_all(self, name: str, /) -> Sequence[str]: ...


class Visitor:
    """Where one socket comes from, and what its requests are charged to.

    `quota` is its address's, and None for an address without limits. `identity_quota` is that of the identity
    the session has proved to speak for, which then counts instead (R-316); `ceiling` is what its address
    leaves to all its identities together, and None where nothing is set.
    """

    __slots__ = (
        "_own",
        "address",
        "ceiling",
        "identity_quota",
        "is_own_page",
        "is_spared",
        "knocks",
        "origins",
        "peer",
        "quota",
    )

    def __init__(self) -> None:
        self.peer: Address | None = None
        self.address: Address | None = None
        self.quota: Quota | None = None
        self.identity_quota: Quota | None = None
        self.ceiling: Quota | None = None
        self.is_spared = False
        """A member or a peer, held to its own limits alone."""
        self.knocks = False
        """It came too soon, and is to hear so."""
        self.origins: tuple[str, ...] = ()
        """The web page that connected, as its browser names it; programs name none."""
        self.is_own_page = False
        """That page is this relay's console."""
        self._own: Quota | None = None

    @property
    def charged(self) -> Quota | None:
        """Whose PUBLISH, SUBSCRIBE and history these are; None sets no limit."""
        return self.identity_quota or self.quota

    @property
    def charged_too(self) -> tuple[Quota, ...]:
        """What pays for them besides: the network around the address, or the address beside the identity."""
        if self.identity_quota is None:
            return () if self.quota is None else self.quota.line[1:]
        return () if self.ceiling is None else self.ceiling.line

    @property
    def workload(self) -> Quota | None:
        """What the relay's own work for this socket is charged to: the event loop's time."""
        return self.identity_quota if self.is_spared else self.quota

    @property
    def reader(self) -> Quota:
        """Who takes turns at the database: one of the many addresses of a network is no reader by itself."""
        payer = self.workload
        if payer is not None:
            return payer.parent or payer
        if self._own is None:
            self._own = Quota("")
        return self._own

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
        operators=frozenset(settings.operators),
    )


def _origins_of(headers: RequestHeaders) -> tuple[str, ...]:
    """The origins a handshake names: a browser names one, so no more than two are kept, and no long one."""
    return tuple(origin[:_MAX_ORIGIN].lower() for origin in headers.get_all("Origin")[:2])


def _is_own(origins: Sequence[str], headers: RequestHeaders, public_host: str) -> bool:
    """Whether the one page named is served by this relay: at its public name, or where the request went to.

    The latter by an address or as `localhost` alone. A name that a stranger owns may lead here, and a page
    under that name would come with this name as its Host.
    """
    hosts = headers.get_all("Host")
    if len(origins) != 1 or len(hosts) != 1:
        return False
    scheme, _, origin = origins[0].partition("://")
    if scheme not in ("http", "https") or not origin:
        return False
    if origin == public_host:
        return True
    host = origin[1:].partition("]")[0] if origin.startswith("[") else origin.partition(":")[0]
    return origin == hosts[0].lower() and (host == "localhost" or parse_address(host) is not None)


class Access:
    """The doors of one process: quotas of addresses and of identities, origins, grants.

    With a `book`, other processes charge the same accounts.
    """

    def __init__(self, settings: Settings, book: Book | None = None) -> None:
        window = settings.limit_window_seconds
        anonymous = Limits(
            publishes=settings.anonymous_publish_limit,
            subscribes=settings.anonymous_subscribe_limit,
            backfill_bytes=settings.anonymous_backfill_limit_bytes,
            auths=settings.auth_limit,
            connects=settings.connection_limit,
            loop_share=settings.loop_share,
            read_share=settings.read_share,
            window_seconds=window,
        )
        authenticated = Limits(
            publishes=settings.publish_limit,
            subscribes=settings.subscribe_limit,
            backfill_bytes=settings.backfill_limit_bytes,
            loop_share=settings.loop_share,
            read_share=settings.read_share,
            window_seconds=window,
        )
        self.addresses = AddressAccounts(anonymous, book=book, name="address")
        self.identities = Quotas(authenticated, book=book, name="identity")
        ceiling = authenticated.times(settings.identities_per_address)
        self._ceilings = (
            AddressAccounts(ceiling, book=book, name="ceiling") if settings.identities_per_address else None
        )
        self.revision = 0
        """Rises with every change that open sessions must follow."""
        self._restricted: frozenset[str] = frozenset()
        # Without what only addresses pay for: else each such identity would bring AUTHs of its own.
        restricted = replace(anonymous, auths=0, connects=0)
        self._restricted_quotas = Quotas(restricted, book=book, name="restricted")
        self.max_sockets = settings.max_connections + _SPARE_SOCKETS
        """Sockets that may be open at once; the shell lowers it where the system allows fewer files."""
        self.sources = Sources()
        """How many sessions each address has."""
        self._per_address = settings.max_connections_per_address
        self._trusted = Networks(settings.trusted_proxies)
        self._unlimited = Networks(settings.unlimited_addresses)
        self._header = settings.forwarded_header
        self._console = settings.console
        self._public_host = urlsplit(settings.public_url or "").netloc.lower()
        self._log_addresses = settings.log_addresses
        self._knows_of_proxy = False
        self._banned_authors: frozenset[str] = frozenset()
        self._bans = Bans()
        self.reload(settings)

    def reload(self, settings: Settings) -> None:
        """Take over the settings that may change while running; open sessions see it by `revision`."""
        self.grants = grants_of(settings)
        spares = settings.spare_members
        self._spared = self.grants.members | self.grants.peers if spares else frozenset()
        self._origins = frozenset(origin.lower() for origin in settings.allowed_origins)
        self.revision += 1

    def is_unlimited(self, address: Address) -> bool:
        """Whether it is one of the networks that no limit holds for."""
        return address in self._unlimited

    @property
    def restricted(self) -> frozenset[str]:
        """Identities held to the limits of anonymous sessions, even when they authenticate."""
        return self._restricted

    @restricted.setter
    def restricted(self, identities: frozenset[str]) -> None:
        if identities != self._restricted:
            self._restricted = identities
            self.revision += 1

    def ban(self, authors: frozenset[str], bans: Bans) -> bool:
        """These authors may have no session, and those networks of `bans` no connection.

        Whether that is more than before: then open sessions are to be looked at.
        """
        more = not (authors <= self._banned_authors and bans.networks <= self._bans.networks)
        self._banned_authors, self._bans = authors, bans
        if more:
            self.revision += 1
        return more

    def is_banned_author(self, did: str) -> bool:
        """Whether this relay serves no session of this identity."""
        return did in self._banned_authors

    def is_banned_address(self, visitor: Visitor) -> bool:
        """Whether this relay serves nobody at the visitor's address."""
        return self._bans.cover(visitor.address)

    def arrive(self, visitor: Visitor, peer: str | None, open_sockets: int, now: float) -> bool:
        """A socket was accepted. False: there are too many, and it is dropped without a word."""
        if open_sockets > self.max_sockets:
            return False
        address = visitor.peer = visitor.address = None if peer is None else parse_address(peer)
        if address is None or address in self._trusted or address in self._unlimited:
            return True
        return self._count(visitor, address, now)

    def leave(self, visitor: Visitor, now: float) -> None:
        """The socket has closed."""
        self._release_identity(visitor, now)
        self._release_address(visitor, now)

    def _count(self, visitor: Visitor, address: Address, now: float) -> bool:
        """Let the visitor count for this address; whether its socket may stay."""
        quota = visitor.quota = self.addresses.hold(address)
        if self._per_address:
            # Half of all the sockets are never those of one address, nor of one network.
            most = min(2 * self._per_address, self.max_sockets // 2)
            if self.addresses.crowded(quota, most) or quota.line[-1].holders > max(
                most, self.max_sockets // 2
            ):
                return False
        connect = purse("connect", quota.line)
        if connect is not None and not connect.take(now):
            visitor.knocks = True
            knock = purse("knock", quota.line)
            return knock is None or knock.take(now)
        return True

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
            visitor.knocks = False
            if is_limited:
                visitor.knocks = not self._count(visitor, address, now) or visitor.knocks
        undeclared = spoken_for and address in self._unlimited and visitor.peer not in self._trusted
        if undeclared and not self._knows_of_proxy:
            self._knows_of_proxy = True
            return True
        return False

    def judge(self, visitor: Visitor, headers: RequestHeaders, now: float) -> Turnaway | None:
        """Whether a WebSocket handshake is refused; one that is not counts as a connection."""
        visitor.origins = _origins_of(headers)
        visitor.is_own_page = self._console and _is_own(visitor.origins, headers, self._public_host)
        if self.is_banned_address(visitor):
            return Turnaway(403, "This relay takes no connections from that address.", "banned")
        if not self.takes_origin(visitor):
            return Turnaway(403, "This relay takes no connections from that origin.", "origin")
        quota = visitor.quota
        if quota is None:
            return None
        if self._per_address and self.addresses.crowded(quota, self._per_address):
            return Turnaway(429, "Too many connections from this address.", "address_limit", 1)
        if visitor.knocks:
            sentence = "Too many connections from this address lately."
            return Turnaway(429, sentence, "connection_rate", self.retry_after(visitor, now))
        return None

    def takes_origin(self, visitor: Visitor) -> bool:
        """Whether the page that this visitor came by may connect, as the settings are now."""
        return not self._origins or visitor.is_own_page or self._origins.issuperset(visitor.origins)

    def retry_after(self, visitor: Visitor, now: float) -> int:
        """When a visitor that `knocks` may come again, in seconds from now."""
        connect = None if visitor.quota is None else purse("connect", visitor.quota.line)
        return 1 if connect is None else connect.excess(now).retry_after

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
        if visitor.quota is None or visitor.address is None:
            return
        quotas, visitor.is_spared = self._due(did)
        visitor.identity_quota = quotas.hold(did)
        if self._ceilings is not None and not visitor.is_spared:
            visitor.ceiling = self._ceilings.hold(visitor.address)

    def reconsider(self, visitor: Visitor, did: str, now: float) -> None:
        """Move an authenticated visitor to the quota that its identity is due now."""
        if visitor.identity_quota is not None:
            due, is_spared = self._due(did)
            if not due.holds(visitor.identity_quota) or is_spared is not visitor.is_spared:
                self.authenticated(visitor, did, now)

    def _due(self, did: str) -> tuple[Quotas, bool]:
        """Which quotas this identity has its own of, and whether it is held to that alone."""
        is_restricted = did in self.restricted
        quotas = self._restricted_quotas if is_restricted else self.identities
        return quotas, did in self._spared and not is_restricted

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
            visitor.is_spared = False
        if visitor.ceiling is not None and self._ceilings is not None:
            self._ceilings.release(visitor.ceiling, now)
            visitor.ceiling = None
