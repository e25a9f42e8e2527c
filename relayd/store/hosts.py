"""The servers that a database URL names: `postgresql://one,two/relay?target_session_attrs=read-write`.

PostgreSQL's drivers try them in turn within one deadline, so a machine that has vanished uses up the time of
those after it. Here each server gets its own URL, with its share of the time.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import re
from urllib.parse import parse_qsl, quote, urlencode

__all__ = ["authority_of", "each_server"]

_TARGET = "target_session_attrs"
_TARGETS = {"read-write": ("primary",), "prefer-standby": ("standby", "any")}


def authority_of(url: str) -> str:
    """User, password and servers of a URL, as they are written there.

    `urlsplit` is not used: newer Pythons refuse a URL of several servers if one is an IPv6 address.
    """
    return re.split("[/?]", url.partition("://")[2], maxsplit=1)[0]


def each_server(url: str) -> tuple[str, ...]:
    """A URL for each attempt, in order; the URL itself if it names one server or cannot be parsed.

    `prefer-standby` looks through all servers for a standby before it accepts any. `read-write` becomes
    `primary`: our sessions that only read tell the server so, and would count as read-only.
    """
    authority = authority_of(url)
    scheme, _, rest = url.partition("://")
    path, _, query = rest[len(authority) :].partition("?")
    user, at, netloc = authority.rpartition("@")
    members = dict(parse_qsl(query, keep_blank_values=True))
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
            (f"{user}{at}", {"host": host} | ({"port": port} if port else {}))
            for host, port in zip(hosts, ports, strict=True)
        ]
    target = members.get(_TARGET)
    if len(places) == 1 and target != "read-write":
        return (url,)
    targets = _TARGETS.get(target, (target,)) if target is not None else ()
    return tuple(
        f"{scheme}://{place}{path}{_query(members | server | wanted)}"
        for wanted in ([{_TARGET: target} for target in targets] or [{}])
        for place, server in places
    )


def _query(members: dict[str, str]) -> str:
    return f"?{urlencode(members, quote_via=quote, safe='/')}" if members else ""
