"""The decisions before a session exists: addresses, origins, connection limits (RFC-0004 §8; R-321).

A socket counts for its address from the moment it is accepted, before TLS and even if it never sends
anything. At the opening handshake, a trusted proxy may name another address, which then counts instead. So
an address holds at most `max_connections_per_address` sessions and twice as many sockets, and never more
than half of the sockets that there may be.

A session that authenticates is charged as an identity. Its address is still charged for what all its
identities do together, so that many identities gain no more than the address's ceiling. Members and peers
may be spared that.

`unlimited_addresses` are networks without rate limits or connection caps, by default the machine itself. A
request whose headers name a client that it speaks for never counts as one of them: behind an undeclared
proxy, all clients share the budgets of the proxy instead of being free of limits.

No I/O: the shell passes what the socket and the request say, and the time in monotonic seconds.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Container, Sequence
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
    normal_origin,
    parse_address,
)
from relayd.config import Settings
from relayd.moderation import Bans

__all__ = ["Access", "RequestHeaders", "Turnaway", "Visitor", "grants_of"]

_SPARE_SOCKETS: Final = 1024
"""The number of sockets beyond `max_connections` that may be open for a refusal or a plain HTTP request."""

_MAX_ORIGIN: Final = 300
"""The characters of an origin that are kept: more than `https://`, a host of 253 characters and a port."""


class RequestHeaders(Protocol):
    """The headers of an opening handshake; names are in any case."""

    def get_all(self, name: str, /) -> Sequence[str]: ...


class Visitor:
    """Where one socket comes from, and what its requests are charged to.

    `quota` is the quota of its address, or None for an address without limits. `identity_quota` is the quota
    of the identity that the session has proved, and then counts instead (R-316). `ceiling` is what the
    address leaves to all its identities together, or None if no ceiling is set.
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
        """Whether this is a member or a peer, held to its own limits alone."""
        self.knocks = False
        """Whether it came too soon; if so, it is refused with the reason."""
        self.origins: tuple[str, ...] = ()
        """The origin of the web page that connected, as its browser gives it; programs give none."""
        self.is_own_page = False
        """Whether that page is this relay's console."""
        self._own: Quota | None = None

    @property
    def charged(self) -> Quota | None:
        """The quota charged for PUBLISH, SUBSCRIBE and history; None sets no limit."""
        return self.identity_quota or self.quota

    @property
    def charged_too(self) -> tuple[Quota, ...]:
        """The quotas charged too: of the networks around the address, or the ceiling above the identity."""
        if self.identity_quota is None:
            return () if self.quota is None else self.quota.line[1:]
        return () if self.ceiling is None else self.ceiling.line

    @property
    def workload(self) -> Quota | None:
        """The quota charged for the relay's own work for this socket: the time of the event loop."""
        return self.identity_quota if self.is_spared else self.quota

    @property
    def reader(self) -> Quota:
        """The account that takes turns at the database. All addresses of one network share a turn."""
        payer = self.workload
        if payer is not None:
            return payer.parent or payer
        if self._own is None:
            self._own = Quota("")
        return self._own

    @property
    def key(self) -> str | None:
        """The address, at the precision at which budgets distinguish addresses."""
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
    """The origins that a handshake names. A browser names one: at most two are kept, cut to a length."""
    found = (origin[:_MAX_ORIGIN] for origin in headers.get_all("Origin")[:2])
    return tuple(normal_origin(origin) or origin for origin in found)


def _is_own(origins: Sequence[str], headers: RequestHeaders, public: Container[str | None]) -> bool:
    """Whether the one page named is served by this relay, at its public name or at the request's Host.

    The Host counts only if it is an address or `localhost`. A name owned by a stranger may lead here, and a
    page under that name would come with the name as its Host.
    """
    hosts = headers.get_all("Host")
    if len(origins) != 1 or len(hosts) != 1:
        return False
    if origins[0] in public:
        return True
    scheme, _, place = origins[0].partition("://")
    host = place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]
    is_here = host == "localhost" or parse_address(host) is not None
    return is_here and origins[0] == normal_origin(f"{scheme}://{hosts[0]}")


def _own_origins(public_url: str) -> tuple[str | None, ...]:
    """The origins of the console at the public URL: a proxy may serve it with TLS and without."""
    place = urlsplit(public_url).netloc.rpartition("@")[2]
    return normal_origin(f"http://{place}"), normal_origin(f"https://{place}")


class Access:
    """Admission to one process: the quotas of addresses and identities, origins, grants.

    With a `book`, other processes charge the same accounts too.
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
        """Incremented with every change that open sessions must apply."""
        self._restricted: frozenset[str] = frozenset()
        # Without what only addresses pay for: otherwise each such identity would bring its own AUTHs.
        restricted = replace(anonymous, auths=0, connects=0)
        self._restricted_quotas = Quotas(restricted, book=book, name="restricted")
        self.max_sockets = settings.max_connections + _SPARE_SOCKETS
        """How many sockets may be open at once; the shell lowers it if the system allows fewer files."""
        self.sources = Sources()
        """The number of sessions of each address."""
        self._per_address = settings.max_connections_per_address
        self._trusted = Networks(settings.trusted_proxies)
        self._unlimited = Networks(settings.unlimited_addresses)
        self._header = settings.forwarded_header
        self._console = settings.console
        self._own_origins = _own_origins(settings.public_url or "")
        self._log_addresses = settings.log_addresses
        self._knows_of_proxy = False
        self._banned_authors: frozenset[str] = frozenset()
        self._bans = Bans()
        self.reload(settings)

    def reload(self, settings: Settings) -> None:
        """Apply the settings that may change while running; open sessions notice by `revision`."""
        self.grants = grants_of(settings)
        spares = settings.spare_members
        self._spared = self.grants.members | self.grants.peers if spares else frozenset()
        self._origins = frozenset(map(normal_origin, settings.allowed_origins)) - {None}
        self.revision += 1

    def is_unlimited(self, address: Address) -> bool:
        """Whether the address belongs to a network without limits."""
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
        """Refuse sessions to these authors, and connections to the networks of `bans`.

        Returns whether this bans more than before, so that open sessions must be reviewed.
        """
        more = not (authors <= self._banned_authors and bans.networks <= self._bans.networks)
        self._banned_authors, self._bans = authors, bans
        if more:
            self.revision += 1
        return more

    def is_banned_author(self, did: str) -> bool:
        """Whether this relay refuses sessions to this identity."""
        return did in self._banned_authors

    def is_banned_address(self, visitor: Visitor) -> bool:
        """Whether this relay refuses the visitor's address."""
        return self._bans.cover(visitor.address)

    def arrive(self, visitor: Visitor, peer: str | None, open_sockets: int, now: float) -> bool:
        """Count a newly accepted socket. False if there are too many: it is dropped without an answer."""
        if open_sockets > self.max_sockets:
            return False
        address = visitor.peer = visitor.address = None if peer is None else parse_address(peer)
        if address is None or address in self._trusted or address in self._unlimited:
            return True
        return self._count(visitor, address, now)

    def leave(self, visitor: Visitor, now: float) -> None:
        """The socket has closed: release its quotas."""
        self._release_identity(visitor, now)
        self._release_address(visitor, now)

    def _count(self, visitor: Visitor, address: Address, now: float) -> bool:
        """Count the visitor for this address; return whether its socket may stay."""
        quota = visitor.quota = self.addresses.hold(address)
        if self._per_address:
            # One address or network never has more than half of all sockets.
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
        """Settle which address counts, now that the request is known.

        Returns True the first time that an address without limits turns out to be an undeclared proxy.
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
        """The refusal of a WebSocket handshake, or None if it is accepted."""
        is_admitted = self.admits_page(visitor, headers)
        if self.is_banned_address(visitor):
            return Turnaway(403, "This relay takes no connections from that address.", "banned")
        if not is_admitted:
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

    @property
    def chooses_origins(self) -> bool:
        """Whether the pages of some origins only may connect."""
        return bool(self._origins)

    def admits_page(self, visitor: Visitor, headers: RequestHeaders) -> bool:
        """Note which web page a request is from, and return whether it may connect."""
        visitor.origins = _origins_of(headers)
        visitor.is_own_page = self._console and _is_own(visitor.origins, headers, self._own_origins)
        return self.takes_origin(visitor)

    def takes_origin(self, visitor: Visitor) -> bool:
        """Whether the visitor's web page may connect under the current settings."""
        return not self._origins or visitor.is_own_page or self._origins.issuperset(visitor.origins)

    def retry_after(self, visitor: Visitor, now: float) -> int:
        """How long until a visitor that `knocks` may come again, in seconds."""
        connect = None if visitor.quota is None else purse("connect", visitor.quota.line)
        return 1 if connect is None else connect.excess(now).retry_after

    def shown(self, visitor: Visitor) -> dict[str, str]:
        """The fields of a log line about a visitor's address (R-330)."""
        if self._log_addresses == "off" or visitor.address is None:
            return {}
        if self._log_addresses == "full":
            return {"full_address": str(visitor.address)}
        return {"client_address": str(visitor.address)}  # truncated in every line of the log

    def authenticated(self, visitor: Visitor, did: str, now: float) -> None:
        """The visitor has proved to be `did`: charge its requests to that identity from now on.

        An address without limits stays so, whichever identity connects from there.
        """
        self._release_identity(visitor, now)
        if visitor.quota is None or visitor.address is None:
            return
        quotas, visitor.is_spared = self._due(did)
        visitor.identity_quota = quotas.hold(did)
        if self._ceilings is not None and not visitor.is_spared:
            visitor.ceiling = self._ceilings.hold(visitor.address)

    def reconsider(self, visitor: Visitor, did: str, now: float) -> None:
        """Move an authenticated visitor to the quota that its identity is due under the current rules."""
        if visitor.identity_quota is not None:
            due, is_spared = self._due(did)
            if not due.holds(visitor.identity_quota) or is_spared is not visitor.is_spared:
                self.authenticated(visitor, did, now)

    def _due(self, did: str) -> tuple[Quotas, bool]:
        """The quotas that include this identity's, and whether the identity is held to that alone."""
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
            # The identity may have been restricted since: release where the quota came from.
            quotas = self.identities if self.identities.holds(quota) else self._restricted_quotas
            quotas.release(quota, now)
            visitor.identity_quota = None
            visitor.is_spared = False
        if visitor.ceiling is not None and self._ceilings is not None:
            self._ceilings.release(visitor.ceiling, now)
            visitor.ceiling = None
