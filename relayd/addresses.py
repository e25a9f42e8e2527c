"""The client address of a connection, and the origin of a web page, without I/O.

A peer's address is the one its socket shows, unless that address belongs to a proxy that the operator trusts.
Then the address is taken from the one header that the operator named. Every proxy appends the address it was
called from, so the list is read from its right end, and the first hop that is not a trusted proxy is the
client; everything to the left of it was sent by that client and proves nothing. A hop that cannot be read
ends the walk: the client then counts as the last hop that could be read, which is one of our proxies, and
shares its budget with everybody else behind that proxy.

Addresses are compared in one form: IPv4 inside IPv6 is IPv4, and zones are dropped. Budgets are kept per
`address_key`, which takes the /64 of an IPv6 address, because a subscriber is given at least that many
addresses. `wider_keys` are the /48 and the /32 around it, because many subscribers are given 65 536 /64s.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

__all__ = [
    "FORWARDING_HEADERS",
    "Address",
    "Network",
    "Networks",
    "address_key",
    "ascii_host",
    "client_address",
    "host_from_here",
    "is_network",
    "normal_origin",
    "parse_address",
    "parse_network",
    "wider_keys",
]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

FORWARDING_HEADERS: Final = ("x-forwarded-for", "forwarded")
"""The headers in which a proxy may name its client."""

_EVERY_INTERFACE: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
_ORIGIN = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[^/?#\s:@\[\]]+)(?::(\d{1,5}))?", re.IGNORECASE)
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_NAME_OF_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")
_DEVIATING: Final = frozenset("ßς\u200c\u200d")
"""Characters that browsers write otherwise than `idna` does (UTS 46 §7)."""
_MAX_HOPS: Final = 32
"""A longer list is not a chain of proxies."""
_BRACKETED = re.compile(r"\[([^\]]*)\](?::\w+)?")
# RFC 7239 §4, RFC 9110 §5.6. The first characters decide which pattern applies, and no quantifier backtracks,
# so a text is read twice at most.
_NAME = re.compile(r"[ \t]*+([!#$%&'*+.^_`|~0-9A-Za-z-]++)=")
_VALUE = re.compile(r'"((?:[^"\\]++|\\.)*+)"|([^\s;,"]*+)', re.DOTALL)
_BLANKS = re.compile(r"[ \t]*+")
_REST = re.compile(r'(?:[^",]++|"(?:[^"\\]++|\\.)*+"?)*+', re.DOTALL)
"""The rest of an element that cannot be read, up to its comma. An unterminated string takes all the rest."""


def normal_origin(text: str) -> str | None:
    """A web origin as browsers write it: in lower case, names in punycode, without the scheme's own port.

    None for a text that no browser could mean, such as one with a path, a user or a wildcard.
    """
    if text.lower() == "null":  # the page of a file, or of a frame that may do little
        return "null"
    found = _ORIGIN.fullmatch(text)
    host = ascii_host(found[2]) if found is not None else None
    if found is None or host is None:
        return None
    scheme, port = found[1].lower(), int(found[3] or 0)
    if port > 65_535:
        return None
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS[scheme] else "")


def ascii_host(text: str) -> str | None:
    """A host as browsers write it, addresses of IPv6 in brackets; None for what is no host."""
    with contextlib.suppress(ValueError):
        if text.startswith("["):
            return f"[{ipaddress.IPv6Address(text[1:-1])}]"
        return str(ipaddress.IPv4Address(text))
    try:
        name = text.lower().encode("idna").decode()
    except UnicodeError:
        return None
    # A name that ends in a number would be an address (URL Standard).
    is_number = name.removesuffix(".").rpartition(".")[2].isdecimal()
    is_name = _NAME_OF_HOST.fullmatch(name) is not None and not is_number
    return name if is_name and _DEVIATING.isdisjoint(text) else None


def parse_address(text: str) -> Address | None:
    """The address in `text`, in the one form in which addresses are compared; None if there is none."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def address_key(address: Address) -> str:
    """The key of this address's budgets: an IPv4 address itself, or the /64 of an IPv6 address."""
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


def wider_keys(address: Address) -> tuple[str, ...]:
    """The networks around an IPv6 address's /64 that have their own budgets, the narrowest first."""
    if address.version == 4:
        return ()
    return tuple(str(ipaddress.ip_network((address, length), strict=False)) for length in (48, 32))


def host_from_here(host: str) -> str:
    """The host to use in a URL to reach, from this machine, a server that listens at `host`."""
    host = _EVERY_INTERFACE.get(host, host)
    return f"[{host}]" if ":" in host else host


def is_network(text: str) -> bool:
    """Whether `Networks` accepts this text."""
    try:
        parse_network(text)
    except ValueError:
        return False
    return True


class Networks:
    """A set of networks, in CIDR notation or as single addresses. Raises ValueError for anything else."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._networks = tuple(parse_network(text) for text in texts)

    def __contains__(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)

    def __bool__(self) -> bool:
        return bool(self._networks)


def client_address(
    peer: Address | None, hops: Sequence[str], header: str, trusted: Networks
) -> Address | None:
    """The client behind `peer`; `hops` are the values of the forwarding header, in order.

    None only if `peer` is None: a socket without an address.
    """
    if peer not in trusted:
        return peer
    client = peer
    read = _forwarded_for if header == "forwarded" else _listed
    listed = [hop for value in hops for hop in read(value)]
    for hop in reversed(listed[-_MAX_HOPS:]):
        address = None if hop is None else _parse_hop(hop)
        if address is None:
            return client
        client = address
        if client not in trusted:
            return client
    return client


def parse_network(text: str) -> Network:
    """The network in `text`, in the one form in which networks are compared. Raises ValueError."""
    interface = ipaddress.ip_interface(text)
    if isinstance(interface, ipaddress.IPv6Interface) and interface.ip.ipv4_mapped is not None:
        prefix_length = interface.network.prefixlen - 96
        if prefix_length < 0:
            raise ValueError(f"{text} mixes IPv4 and IPv6")
        return ipaddress.ip_network((interface.ip.ipv4_mapped, prefix_length), strict=False)
    return interface.network


def _listed(value: str) -> Iterator[str | None]:
    for hop in value.split(","):
        yield hop.strip()


def _forwarded_for(value: str) -> Iterator[str | None]:
    """The `for` of each element (RFC 7239 §4); None for an element without a readable one.

    A single pass from left to right, whatever the header contains: it is read before the peer is known.
    """
    at = _end_of_blanks(value, 0)
    while at < len(value):
        if value[at] != ",":  # an empty element says nothing
            found, at = _element(value, at)
            yield found
        at = _end_of_blanks(value, at + 1)


def _element(value: str, at: int) -> tuple[str | None, int]:
    """The `for` of the element that starts here, and where it ends."""
    found: str | None = None
    while True:
        name = _NAME.match(value, at)
        pair = None if name is None else _VALUE.match(value, name.end())
        if name is None or pair is None or (name[1].lower() == "for" and found is not None):
            return None, _end(value, at)
        if name[1].lower() == "for":
            found = pair[2] if pair[1] is None else re.sub(r"\\(.)", r"\1", pair[1], flags=re.DOTALL)
        at = _end_of_blanks(value, pair.end())
        if at == len(value) or value[at] == ",":
            return found, at
        if value[at] != ";":
            return None, _end(value, at)
        at += 1


def _end(value: str, at: int) -> int:
    rest = _REST.match(value, at)
    assert rest is not None  # it also matches the empty string
    return rest.end()


def _end_of_blanks(value: str, at: int) -> int:
    blanks = _BLANKS.match(value, at)
    assert blanks is not None
    return blanks.end()


def _parse_hop(text: str) -> Address | None:
    """A hop is an address, with or without a port: `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[…]:80`."""
    bracketed = _BRACKETED.fullmatch(text)
    if bracketed is not None:
        return parse_address(bracketed[1])
    if text.count(":") == 1:
        text = text.partition(":")[0]
    return parse_address(text)
