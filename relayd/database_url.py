"""Database URLs, as providers and PostgreSQL's own programs write them.

`postgresql://one,two/relay?target_session_attrs=read-write` names several servers. PostgreSQL's drivers try
them in turn within one deadline, so a machine that has vanished uses up the time of those after it. Here each
server gets its own URL, with its share of the time.

The members are those of libpq, with which backups and the pipeline read the same URL. Our driver sends the
server every member that it does not know, as a setting. So what changes nothing here is left out before, and
what only libpq could give is refused.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

__all__ = ["authority_of", "each_server", "fault_of", "trusts_system"]

_TARGET: Final = "target_session_attrs"
_TARGETS: Final = {"read-write": ("primary",), "prefer-standby": ("standby", "any")}

_DRIVERS: Final = frozenset(
    "database dbname gsslib host krbsrvname options passfile password port service ssl_max_protocol_version"
    " ssl_min_protocol_version sslcert sslcrl sslkey sslmode sslnegotiation sslpassword sslrootcert"
    " target_session_attrs user".split()
)
_NEEDLESS: Final = frozenset(
    "application_name client_encoding connect_timeout fallback_application_name keepalives keepalives_count"
    " keepalives_idle keepalives_interval load_balance_hosts max_protocol_version sslcompression sslsni"
    " tcp_user_timeout".split()
)
"""The relay sets these itself, such as its deadlines, or they make no difference to it."""
_VALUES: Final = {
    "channel_binding": ("prefer", "disable"),
    "gssdelegation": ("0",),
    "gssencmode": ("prefer", "disable"),
    "min_protocol_version": ("3.0",),
    "ssl": ("true",),
    "sslcertmode": ("allow",),
    "sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    _TARGET: ("any", "read-write", "read-only", "primary", "standby", "prefer-standby"),
}
"""The values that can be had, of members whose other values cannot, or do not exist."""
_LIBPQ_ONLY: Final = frozenset(
    "hostaddr oauth_client_id oauth_client_secret oauth_issuer oauth_scope replication require_auth"
    " requirepeer scram_client_key scram_server_key servicefile ssl_keylogfile sslcrldir".split()
)
_NO_URL: Final = "not a URL; write characters of a password such as / # ? [ as %2F %23 %3F %5B"
_is_name = re.compile("[A-Za-z_][A-Za-z0-9_.]*").fullmatch


def authority_of(url: str) -> str:
    """User, password and servers of a URL, as they are written there.

    `urlsplit` is not used: newer Pythons refuse a URL of several servers if one is an IPv6 address.
    """
    return re.split("[/?]", url.partition("://")[2], maxsplit=1)[0]


def fault_of(url: str) -> str | None:
    """What makes a URL unusable here, in words that quote no secret; None if nothing does."""
    if not url.startswith(("postgresql://", "postgres://")):
        return "expected a postgresql:// URL"
    fields = url.partition("?")[2].split("&")
    if not _can_be_taken_apart(url) or any(field and "=" not in field for field in fields):
        return _NO_URL
    for name, value in _members(url).items():
        if not _is_name(name):
            return _NO_URL
        if value and name in _VALUES and value not in _VALUES[name]:
            proof = "; sslmode=verify-full&sslrootcert=system proves the server"
            advice = proof if name == "channel_binding" else ""
            return f"{name} can only be {' or '.join(_VALUES[name])} here{advice}"
        if value and name in _LIBPQ_ONLY:
            return f"{name} is not possible here: the relay's driver lacks it"
        if name not in _DRIVERS | _NEEDLESS | _LIBPQ_ONLY | _VALUES.keys():
            return (
                f"PostgreSQL's URLs have no {name}; leave it out, or if it is a setting of the server, write"
                f" options=-c%20{name}%3D…"
            )
    if trusts_system(url) and _members(url).get("sslmode", "verify-full") != "verify-full":
        return "sslrootcert=system needs sslmode=verify-full"
    return None


def trusts_system(url: str) -> bool:
    """Whether the server's certificate is judged by the authorities that the system trusts. Our driver would
    look for a file of the name `system`."""
    return _members(url).get("sslrootcert") == "system"


def _members(url: str) -> dict[str, str]:
    return dict(parse_qsl(url.partition("?")[2], keep_blank_values=True))


def _can_be_taken_apart(url: str) -> bool:
    """Whether a URL has its hosts and ports where they belong."""
    user, at, places = authority_of(url).rpartition("@")
    hosts = places.split(",")
    try:
        # One by one: newer Pythons refuse several hosts if one of them is an IPv6 address.
        for host in hosts:
            urlsplit(f"//{user}{at}{host}")
    except ValueError:
        return False
    ports = [re.sub(r"^(\[[^]]*\]|[^:]*):?", "", host) for host in hosts]
    return "#" not in url and all(not port or port.isdecimal() for port in ports)


def each_server(url: str) -> tuple[str, ...]:
    """A URL for each attempt, in order, with the members that our driver knows; the URL itself if it cannot
    be parsed.

    `prefer-standby` looks through all servers for a standby before it accepts any. `read-write` becomes
    `primary`: our sessions that only read tell the server so, and would count as read-only.
    """
    authority = authority_of(url)
    scheme, _, rest = url.partition("://")
    path = rest[len(authority) :].partition("?")[0]
    user, at, netloc = authority.rpartition("@")
    written = _members(url)
    members = {name: value for name, value in written.items() if name in _DRIVERS}
    if written.get("ssl"):  # as JDBC writes it, which libpq takes too
        members.setdefault("sslmode", "require")
    places: list[tuple[str, dict[str, str]]]
    if netloc:
        places = [(f"{user}{at}{host}", {}) for host in netloc.split(",")]
    else:
        hosts = members.get("host", "").split(",")
        ports = members.get("port", "").split(",")
        if len(ports) not in (1, len(hosts)):
            return (url,)
        ports *= len(hosts) // len(ports)
        places = [
            (f"{user}{at}", {name: value for name, value in (("host", host), ("port", port)) if value})
            for host, port in zip(hosts, ports, strict=True)
        ]
    target = members.get(_TARGET)
    targets = _TARGETS.get(target, (target,)) if target is not None else ()
    return tuple(
        f"{scheme}://{place}{path}{_query(members | server | wanted)}"
        for wanted in ([{_TARGET: target} for target in targets] or [{}])
        for place, server in places
    )


def _query(members: dict[str, str]) -> str:
    return f"?{urlencode(members, quote_via=quote, safe='/')}" if members else ""
