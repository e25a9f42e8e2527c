"""Relay connection URIs: the addresses of a relay as one line to paste or scan (RFC-0009 §3).

    strata://relay?v=1&http=https%3A%2F%2Frelay.example.net&label=Example
    {"type":"strata.relay","v":1,"http":"https://relay.example.net","label":"Example"}

Such a line may come from a stranger. Parsing it therefore returns a `RelayProposal` and applies nothing: the
program shows the proposal, with its `warnings`, and connects once its user has agreed (R-402).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, unquote_to_bytes, urlsplit

import msgspec

__all__ = ["MAX_LABEL_CHARACTERS", "RelayProposal", "is_relay_uri", "parse"]

MAX_LABEL_CHARACTERS = 64
"""The longest label; a longer one is cut (R-399)."""

_VERSION = 1
_JSON_TYPE = "strata.relay"
_SINGLE_MEMBERS = frozenset({"v", "http", "ws", "label", "mode"})
_MAX_CHARACTERS = 8192
_MAX_EXTRA = 16
_WEBSOCKET_PATH = "/strata"
_WEBSOCKET_SCHEMES = {"https": "wss", "http": "ws"}

_is_percent_encoded = re.compile(r"(?:[A-Za-z0-9\-._~!$'()*+,;:@/?=]|%[0-9A-Fa-f]{2})*").fullmatch
"""RFC 3986 §3.4, without the `&` that separates members."""
_is_host = re.compile(r"[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\]").fullmatch
_is_url_text = re.compile(r"[!-~]+").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayProposal:
    """A proposal to use a relay. Construction raises `ValueError` for malformed addresses.

    Two proposals are equal if they propose the same.
    """

    http: str
    """Scheme, host and port of the relay's web address; a path is dropped (R-395)."""
    ws: str = ""
    """The address to connect to; derived from `http` if not given (R-397)."""
    extra_ws: tuple[str, ...] = ()
    """Further addresses of the same relay, in the order to try them (R-398)."""
    label: str | None = None
    """A name to show, as plain text of at most 64 characters, without control characters (R-399)."""
    mode: Literal["auto", "manual"] | None = None
    """`manual` asks to use only these addresses and to look for no others (R-400)."""

    def __post_init__(self) -> None:
        http = _web_address(self.http)
        derived = f"{_WEBSOCKET_SCHEMES[urlsplit(http).scheme]}://{urlsplit(http).netloc}{_WEBSOCKET_PATH}"
        if len(self.extra_ws) > _MAX_EXTRA:
            raise ValueError(f"more than {_MAX_EXTRA} further addresses")
        for name, value in (
            ("http", http),
            ("ws", _websocket_address(self.ws, "ws") if self.ws else derived),
            ("extra_ws", tuple(_websocket_address(url, "extra_ws") for url in self.extra_ws)),
            ("label", _plain_label(self.label)),
        ):
            object.__setattr__(self, name, value)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know before agreeing, as sentences (R-402)."""
        found = []
        if not self.http.startswith("https:"):
            found.append(f"{self.http} is not encrypted: others on the way can read and change its answers")
        for url in (self.ws, *self.extra_ws):
            if not url.startswith("wss:"):
                found.append(f"{url} is not encrypted: others on the way see what you publish and read")
            if urlsplit(url).hostname != urlsplit(self.http).hostname:
                found.append(f"{url} is at another host than {self.http}")
        return tuple(found)

    def to_uri(self) -> str:
        """The proposal as a `strata://relay` URI (R-392)."""
        members: list[tuple[str, str]] = []
        for name, value in self._members().items():
            members += [(name, f"{item}") for item in (value if isinstance(value, list) else [value])]
        return "strata://relay?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in members)

    def to_json(self) -> str:
        """The proposal as a JSON object (R-392, R-401)."""
        return msgspec.json.encode({"type": _JSON_TYPE} | self._members()).decode()

    def _members(self) -> dict[str, object]:
        """The members of both forms, without those that a reader derives or that are None."""
        is_derived = self.ws == RelayProposal(http=self.http).ws if self.ws else True
        members = {
            "v": _VERSION,
            "http": self.http,
            "ws": None if is_derived else self.ws,
            "label": self.label,
            "mode": self.mode,
            "extra_ws": list(self.extra_ws) or None,
        }
        return {name: value for name, value in members.items() if value is not None}


def is_relay_uri(text: str) -> bool:
    """Whether `text` looks like one of the two forms, so that `parse` should read it."""
    return text[:9].lower() == "strata://" or text.lstrip()[:1] == "{"


def parse(text: str) -> RelayProposal:
    """Parse either form. Unknown members are ignored.

    Raises `ValueError` with a sentence that names the fault without quoting the text.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError("a relay URI is not that long")
    text = text.strip()
    return _from_json(text) if text[:1] == "{" else _from_uri(text)


def _from_uri(text: str) -> RelayProposal:
    if not _is_url_text(text):
        raise ValueError("a relay URI is one word of ASCII")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError("not a URI") from None
    # `netloc` is compared whole, so that a user name or port is refused too.
    if (
        parts.scheme != "strata"
        or parts.netloc.lower() != "relay"
        or parts.path not in ("", "/")
        or parts.fragment
    ):
        raise ValueError("a relay URI begins with strata://relay?")
    extra_ws: list[str] = []
    members: dict[str, object] = {"extra_ws": extra_ws}
    for name, value in _query_members(parts.query):
        if name == "extra_ws":
            extra_ws.append(value)
        elif name in _SINGLE_MEMBERS:
            if name in members:
                raise ValueError(f"{name} is given twice")
            members[name] = value
    if members.get("v", "1") != "1":
        raise ValueError("this version of relay URIs is not known here")
    return _proposal(members)


def _query_members(query: str) -> list[tuple[str, str]]:
    members = []
    for piece in filter(None, query.split("&")):
        name, _, value = piece.partition("=")
        if not _is_percent_encoded(name) or not _is_percent_encoded(value):
            raise ValueError("the URI is not percent-encoded as RFC 3986 has it")
        try:
            members.append((unquote_to_bytes(name).decode(), unquote_to_bytes(value).decode()))
        except UnicodeDecodeError:
            raise ValueError("the URI holds text that is not UTF-8") from None
    return members


def _from_json(text: str) -> RelayProposal:
    try:
        members = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        raise ValueError("the text is not JSON") from None
    if type(members) is not dict or members.get("type") != _JSON_TYPE:
        raise ValueError(f"the type of the JSON object is not {_JSON_TYPE}")
    if type(members.get("v")) is not int or members["v"] != _VERSION:  # here it must be present
        raise ValueError("this version of relay URIs is not known here")
    return _proposal(members)


def _proposal(members: Mapping[str, Any]) -> RelayProposal:
    """The proposal in decoded members, where null means absent (A-004)."""
    http = members.get("http")
    if http is None:
        raise ValueError("http, the relay's web address, is missing")
    ws, label, mode, extra = (members.get(name) for name in ("ws", "label", "mode", "extra_ws"))
    extra = [] if extra is None else extra
    if type(extra) is not list:
        raise ValueError("extra_ws is not a list")
    texts = [http, *extra] + [value for value in (ws, label) if value is not None]
    if not all(type(value) is str for value in texts):
        raise ValueError("a member is not text")
    return RelayProposal(
        http=http,
        ws=ws or "",
        extra_ws=tuple(extra),
        label=label,
        # an unknown value counts as absent.
        mode=mode if mode == "auto" or mode == "manual" else None,
    )


def _web_address(url: str) -> str:
    """Check the web address and return its scheme, host and port (R-395)."""
    scheme, address, _, query = _split(url, "http")
    if scheme not in _WEBSOCKET_SCHEMES or query:
        raise ValueError("http is not an http or https URL without query")
    return f"{scheme}://{address}"


def _websocket_address(url: str, name: str) -> str:
    """Check a WebSocket address and return it in normal form (R-396)."""
    scheme, address, path, query = _split(url, name)
    if scheme not in _WEBSOCKET_SCHEMES.values():
        raise ValueError(f"{name} is not a ws or wss URL")
    return f"{scheme}://{address}{path}{'?' if query else ''}{query}"


def _split(url: str, name: str) -> tuple[str, str, str, str]:
    """Split a URL, which a stranger may propose, into scheme, host with port, path and query.

    A user name or password is refused: it is not needed here, and can make one host look like another.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"{name} is not a URL") from None
    host = parts.netloc[: -len(f":{port}")] if port is not None else parts.netloc.removesuffix(":")
    if not _is_url_text(url) or not _is_host(host) or port == 0 or parts.fragment:
        raise ValueError(f"{name} is not a URL of a host")
    address = host.lower() + (f":{port}" if port is not None else "")
    return parts.scheme, address, parts.path, parts.query


def _plain_label(label: str | None) -> str | None:
    """Clean a label (R-399). Marks that change the direction of text count as control characters."""
    if label is None:
        return None
    # Cc, Cf, Cs, Co, Cn: control, format, lone surrogates, private, unassigned; Zl, Zp: line breaks.
    kept = (
        c for c in label if unicodedata.category(c)[0] != "C" and unicodedata.category(c) not in ("Zl", "Zp")
    )
    return "".join(kept)[:MAX_LABEL_CHARACTERS].strip() or None
