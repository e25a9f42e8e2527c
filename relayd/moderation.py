"""The rulings of a relay's operators: bans of authors, packets, media, types and networks.

A ban is a row of the database, so that all processes and machines follow it. It has a reason, may have an
end, and names who made it. `Bans` is a process's snapshot of the bans in force, which policy and access read
as they read the settings. `relayd.store.moderation` reads and writes rulings.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from strata.protocol.fields import is_content_id
from strata.protocol.ids import is_did
from strata.protocol.keys import IDENTITY_TYPES

from relayd.addresses import Address, Network, parse_network

__all__ = [
    "MAX_REASON_CHARACTERS",
    "MAX_SUBJECT_CHARACTERS",
    "NOTHING_READ",
    "SESSION",
    "Act",
    "Ban",
    "Bans",
    "ClosedSession",
    "LastRuling",
    "Ruled",
    "RulingsRead",
    "SubjectKind",
    "check_reason",
    "kind_of",
    "subject_of",
]

MAX_SUBJECT_CHARACTERS: Final = 1024
_MAX_SUBJECT_BYTES: Final = 2048
"""An entry of a PostgreSQL index takes at most 2704 bytes."""
MAX_REASON_CHARACTERS: Final = 1000
_WIDEST: Final = {4: 8, 6: 16}
"""The shortest prefix of a network that may be banned, by IP version: a slip must not ban everybody."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


class SubjectKind(enum.StrEnum):
    """The kind of subject that a ban is about."""

    AUTHOR = "author"
    PACKET = "packet"
    MEDIA = "media"
    TYPE = "type"
    NETWORK = "network"


SESSION: Final = "session"
"""The kind of a ruling that closes a session. It is not a kind of ban: the peer may connect again."""


class Act(enum.StrEnum):
    """What was done to a ban. For a packet, banning and unbanning are called removing and restoring."""

    BAN = "ban"
    UNBAN = "unban"
    EXPIRE = "expire"
    ERASE = "erase"
    CLOSE = "close"
    """A session was ended; no ban was changed."""


class Ban(NamedTuple):
    """One row of the table `moderation`."""

    kind: SubjectKind
    subject: str
    """In the form that `subject_of` returns."""
    reason: str
    actor: str
    """Who made it: a name given to the command, or the DID of an operator."""
    expires_at: int | None
    """The last Unix second in which it holds; None: until it is lifted."""
    created_at: int

    def holds(self, now: int) -> bool:
        """Whether it is in force at this Unix second."""
        return self.expires_at is None or self.expires_at >= now


class ClosedSession(NamedTuple):
    """What the log keeps about a session that an operator closed. Addresses are not kept."""

    identity: str | None
    opened_at: int


class Ruled(NamedTuple):
    """One line of the moderation log, which only grows."""

    number: int
    at: int
    actor: str
    via: str
    """`command` or `wire`, or `relay` for a ban that expired."""
    act: Act | str
    """Plain text, like the kind, if a newer relayd did something that this one does not know."""
    kind: SubjectKind | str
    subject: str
    reason: str
    before: Ban | ClosedSession | None
    """The ban as it was, None if there was none; for a session, what it was."""
    after: Ban | None
    """The ban as it is from then on, None if there is none."""


class LastRuling(NamedTuple):
    """Which ruling was the last: its number, and a digest of its contents.

    The number alone is not enough: a failover may lose rulings, and the next ones reuse their numbers.
    """

    number: int
    digest: bytes
    """The digest of its whole line; empty if there is none."""


NOTHING_READ: Final = LastRuling(-1, b"")
"""The last ruling of a process that has read nothing yet."""


class RulingsRead(NamedTuple):
    """The current rulings, and what has happened since an earlier reading."""

    last: LastRuling
    bans: list[Ban]
    """All bans, including expired ones."""
    erased: bool
    closed: list[str]
    """The ids of the sessions to close."""


class _NetworkSet:
    """A set of networks, searched by address with one look-up for each prefix length in use."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._by_length: dict[tuple[int, int], set[int]] = {}
        for text in texts:
            network = ipaddress.ip_network(text)
            shift = network.max_prefixlen - network.prefixlen
            key = (network.version, shift)
            self._by_length.setdefault(key, set()).add(int(network.network_address) >> shift)

    def __contains__(self, address: Address) -> bool:
        number, version = int(address), address.version
        return any(
            number >> shift in found for (of, shift), found in self._by_length.items() if of == version
        )


@dataclass(frozen=True, slots=True)
class Bans:
    """The bans in force at one moment. Immutable."""

    authors: frozenset[str] = frozenset()
    packet_ids: frozenset[str] = frozenset()
    media_hashes: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    networks: frozenset[str] = frozenset()
    changes_at: int | None = None
    """The first Unix second in which fewer bans hold, by expiry alone."""
    _networks: _NetworkSet = field(default_factory=lambda: _NetworkSet(()), compare=False)

    @classmethod
    def at(cls, now: int, bans: Iterable[Ban]) -> Bans:
        """Those of `bans` that are in force at this Unix second."""
        found: dict[SubjectKind, set[str]] = {kind: set() for kind in SubjectKind}
        ends = []
        for ban in bans:
            if ban.holds(now):
                found[ban.kind].add(ban.subject)
                if ban.expires_at is not None:
                    ends.append(ban.expires_at + 1)
        return cls(
            authors=frozenset(found[SubjectKind.AUTHOR]),
            packet_ids=frozenset(found[SubjectKind.PACKET]),
            media_hashes=frozenset(found[SubjectKind.MEDIA]),
            types=frozenset(found[SubjectKind.TYPE]),
            networks=frozenset(found[SubjectKind.NETWORK]),
            changes_at=min(ends, default=None),
            _networks=_NetworkSet(found[SubjectKind.NETWORK]),
        )

    def cover(self, address: Address | None) -> bool:
        """Whether the address is in a banned network."""
        return bool(self.networks) and address is not None and address in self._networks


def kind_of(text: str) -> SubjectKind | None:
    """The kind of a text that can only be a DID or a network. None for hashes and types, which look alike."""
    if is_did(text):
        return SubjectKind.AUTHOR
    return SubjectKind.NETWORK if _network(text) is not None else None


def subject_of(kind: SubjectKind, text: str) -> str:
    """The subject of a ban in the form in which it is stored and compared.

    Raises ValueError; its message says what is wrong.
    """
    if len(text) > MAX_SUBJECT_CHARACTERS:
        raise ValueError(f"{kind.value}: longer than {MAX_SUBJECT_CHARACTERS} characters")
    if len(text.encode(errors="surrogatepass")) > _MAX_SUBJECT_BYTES:
        raise ValueError(f"{kind.value}: longer than {_MAX_SUBJECT_BYTES} bytes in UTF-8")
    match kind:
        case SubjectKind.AUTHOR:
            if not is_did(text):
                raise ValueError(f"{text} is not a DID")
        case SubjectKind.PACKET | SubjectKind.MEDIA:
            text = text.lower()
            if not is_content_id(text):
                raise ValueError(f"{kind.value}: {text} is not 0x and 64 hex digits")
        case SubjectKind.TYPE:
            if not text or _UNPRINTABLE.search(text):
                raise ValueError("type: expected the name of a content type")
            if text in IDENTITY_TYPES:  # else a key that its owner revoked could still sign
                raise ValueError(f"{text} carries keys and their revocation, and cannot be banned")
        case SubjectKind.NETWORK:
            network = _network(text)
            if network is None:
                raise ValueError(f"{text} is not an address, nor a network such as 192.0.2.0/24")
            if network.prefixlen < _WIDEST[network.version]:
                raise ValueError(f"{network} is too wide: ban /{_WIDEST[network.version]} or less at a time")
            return str(network)
    return text


def check_reason(text: str) -> str:
    """The text without surrounding blanks. Raises ValueError if it is empty, too long or contains NUL."""
    text = text.strip()
    if not text or len(text) > MAX_REASON_CHARACTERS or "\x00" in text:
        raise ValueError(f"a reason has 1 to {MAX_REASON_CHARACTERS} characters")
    return text


def _network(text: str) -> Network | None:
    try:
        return parse_network(text)
    except ValueError:
        return None
