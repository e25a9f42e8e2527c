"""Addresses of the two ends, as text and as values (T-087 … T-098; decision A-169).

    local:ID                            this process; serving `local:0` takes a free id
    tcp:HOST:PORT                       IPv4, [IPv6], or a name; port 0 takes a free port, `*` all interfaces
    unix:/path   unix:@name             a socket file, or on Linux an abstract name
    metatls:HOST:PORT   tls:HOST:PORT   TLS over TCP
    relay:wss://HOST/PATH#/topic        a reliable channel on a relay (an addition)

Addresses are values: they compare, hash, and print as they were read. As text they can be sent in messages.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import ipaddress
import re
import sys
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from strata.txrx.errors import InvalidAddress

__all__ = [
    "Address",
    "LocalAddress",
    "RelayAddress",
    "TcpAddress",
    "TlsAddress",
    "UnixAddress",
    "parse_address",
]

_MAX_UNIX_PATH = 107 if sys.platform.startswith("linux") else 103
_MAX_LOCAL = 2**64 - 1
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_NUMBER = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """A number in this process."""

    id: int

    def __str__(self) -> str:
        return f"local:{self.id}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host, without the brackets of IPv6, and a port; `*` is every interface of this machine."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{_host_port(self.host, self.port)}"


@dataclass(frozen=True, slots=True)
class TlsAddress:
    """A `TcpAddress` under TLS. `scheme` is `metatls` or `tls`, as it was written."""

    host: str
    port: int
    scheme: str = "metatls"

    def __str__(self) -> str:
        return f"{self.scheme}:{_host_port(self.host, self.port)}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A path, or `@` followed by an abstract name."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"

    @property
    def is_abstract(self) -> bool:
        """Whether it is a name without a file."""
        return self.path.startswith("@")

    @property
    def socket_path(self) -> str:
        """The path for the system: an abstract name begins with a zero byte."""
        return "\0" + self.path[1:] if self.is_abstract else self.path


@dataclass(frozen=True, slots=True)
class RelayAddress:
    """A relay's URL, and the content topic on it."""

    url: str
    topic: str

    def __str__(self) -> str:
        return f"relay:{self.url}#{self.topic}"


Address: TypeAlias = LocalAddress | TcpAddress | TlsAddress | UnixAddress | RelayAddress


def parse_address(text: str) -> Address:
    """Parse an address. Raises `InvalidAddress` with the reason."""
    scheme, colon, rest = text.partition(":")
    if not colon:
        raise InvalidAddress(f"{text!r} has no scheme: write tcp:HOST:PORT, unix:/path, local:ID, …")
    if "\0" in rest or any(0xD800 <= ord(character) < 0xE000 for character in rest):
        raise InvalidAddress(f"{text!r} holds a character that no address can hold")
    match scheme:
        case "local":
            return LocalAddress(_number(text, rest, "id", _MAX_LOCAL))
        case "tcp":
            return TcpAddress(*_parse_host_port(text, rest))
        case "metatls" | "tls":
            return TlsAddress(*_parse_host_port(text, rest), scheme=scheme)
        case "unix":
            return _parse_unix(text, rest)
        case "relay":
            return _parse_relay(text, rest)
        case _:
            known = "local, tcp, unix, metatls, tls, relay"
            raise InvalidAddress(f"{text!r}: no scheme {scheme!r}; there are {known}")


def _number(text: str, digits: str, what: str, most: int) -> int:
    # Only one spelling of each number is accepted, so that an address prints as it was read.
    if _NUMBER.fullmatch(digits) is None or len(digits) > len(str(most)) or int(digits) > most:
        raise InvalidAddress(f"{text!r}: the {what} is not a number from 0 to {most}")
    return int(digits)


def _parse_host_port(text: str, rest: str) -> tuple[str, int]:
    host, colon, port = rest.rpartition(":")
    if not colon:
        raise InvalidAddress(f"{text!r}: write HOST:PORT, with port 0 for a free one")
    number = _number(text, port, "port", 65535)
    if host.startswith("[") and host.endswith("]"):
        inner, _, zone = host[1:-1].partition("%")
        try:
            ipaddress.IPv6Address(inner)
        except ValueError:
            raise InvalidAddress(f"{text!r}: {inner!r} is not an IPv6 address") from None
        if "%" in host and _HOST.fullmatch(zone) is None:
            raise InvalidAddress(f"{text!r}: {zone!r} names no interface")
        return host[1:-1], number
    if ":" in host:
        raise InvalidAddress(f"{text!r}: write an IPv6 address in brackets")
    labels = host.removesuffix(".").split(".")
    if host != "*" and (_HOST.fullmatch(host) is None or not all(0 < len(one) <= 63 for one in labels)):
        raise InvalidAddress(f"{text!r}: {host!r} is not a host")
    return host, number


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse_unix(text: str, path: str) -> UnixAddress:
    if path.startswith("@"):
        if not sys.platform.startswith("linux"):
            raise InvalidAddress(f"{text!r}: abstract names are Linux's own; use a path")
        if len(path) == 1:
            raise InvalidAddress(f"{text!r}: the name is missing")
    elif not path.startswith("/"):
        raise InvalidAddress(f"{text!r}: write an absolute path, or @ and a name")
    size = len(path.encode())
    if size > _MAX_UNIX_PATH:
        raise InvalidAddress(f"{text!r}: {size} bytes; a socket's path has at most {_MAX_UNIX_PATH}")
    return UnixAddress(path)


def _parse_relay(text: str, rest: str) -> RelayAddress:
    url, _, topic = rest.partition("#")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise InvalidAddress(f"{text!r}: {url!r} is not a ws:// or wss:// URL")
    if not topic.startswith("/") or not topic.isprintable():
        raise InvalidAddress(f"{text!r}: a content topic such as #/app/1/name/proto has to follow the URL")
    return RelayAddress(url, topic)
