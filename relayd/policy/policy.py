"""The configured policies in their order, and how they come into effect on a running relay."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, Self

from strata.protocol.packets import Packet

from relayd.config import Settings
from relayd.moderation import Bans
from relayd.policy.rules import RULES, Lists, Rule
from relayd.store.types import AbuseEntry, Declined

__all__ = ["Governed", "Policy", "apply_policy"]

_BLOCK: Final = "block"
_LIMIT: Final = "limit"
_WITHDRAWING: Final = ("blocked_authors", "blocked_packet_ids", "blocked_media_hashes", "blocked_types")
"""The lists that bans are added to. A list of the settings is empty if `policies` does not name it."""


class Policy:
    """What this relay refuses to take (`check`) and to serve (`declined`). Immutable and thread-safe.

    A new policy is made when the settings are read again, operators have ruled or the abuse table has
    changed; see `apply_policy`.
    """

    __slots__ = ("_lists", "_rules", "bans", "declined", "slowed")

    def __init__(
        self,
        lists: Lists = Lists(),  # noqa: B008 - immutable
        *,
        policies: Sequence[str] = tuple(RULES),
        slowed: frozenset[str] = frozenset(),
        bans: Bans = Bans(),  # noqa: B008 - immutable
    ) -> None:
        self._lists = lists
        # A policy with an empty list refuses nothing, so most relays consult none at all.
        self._rules: tuple[Rule, ...] = tuple(RULES[name] for name in policies if getattr(lists, name))
        self.declined = _declined(lists, policies)
        """Packets that are not served, though the log may hold them (R-323)."""
        self.slowed = slowed
        """Authors whom the abuse table holds to the limits of anonymous sessions."""
        self.bans = bans
        """What operators have ruled, including the bans of networks."""

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        abuse: Sequence[AbuseEntry] = (),
        bans: Bans = Bans(),  # noqa: B008 - immutable
    ) -> Self:
        """The policy of these settings, bans and abuse table; `abuse` holds only entries in force.

        A ban is added to the list of the settings for its kind. It holds even if `policies` leaves that list
        out: `relayd ban` always takes effect.
        """
        lists = Lists(
            blocked_authors=frozenset(settings.blocked_authors) | bans.authors,
            blocked_packet_ids=frozenset(settings.blocked_packet_ids) | bans.packet_ids,
            blocked_media_hashes=frozenset(settings.blocked_media_hashes) | bans.media_hashes,
            blocked_types=frozenset(settings.blocked_types) | bans.types,
            allowed_authors=frozenset(settings.allowed_authors),
            allowed_types=frozenset(settings.allowed_types),
            abuse=frozenset(entry.author_id for entry in abuse if entry.verdict == _BLOCK),
        )
        slowed = frozenset(entry.author_id for entry in abuse if entry.verdict == _LIMIT)
        banned = [name for name in _WITHDRAWING if name not in settings.policies]
        return cls(lists, policies=(*settings.policies, *banned), slowed=slowed, bans=bans)

    def check(self, packet: Packet) -> None:
        """Raise `InvalidPacket` with the refusal of the first policy that refuses (R-185 … R-187)."""
        for rule in self._rules:
            refusal = rule(packet, self._lists)
            if refusal is not None:
                raise refusal


def _declined(lists: Lists, policies: Sequence[str]) -> Declined:
    """The packets that are not served: those on a block list.

    The abuse table slows or blocks an author for a time, and allow-lists say which packets are accepted from
    now on: neither withdraws packets that were acknowledged before.
    """
    inert = Lists()

    def of(name: str) -> frozenset[str]:
        names: frozenset[str] = getattr(lists if name in policies else inert, name)
        return names

    return Declined(
        authors=of("blocked_authors"),
        types=of("blocked_types"),
        packet_ids=frozenset(bytes.fromhex(packet_id[2:]) for packet_id in of("blocked_packet_ids")),
        media_hashes=of("blocked_media_hashes"),
    )


class _Admission(Protocol):
    policy: Policy


class _Serves(Protocol):
    declined: Declined


class _Access(Protocol):
    restricted: frozenset[str]

    def ban(self, authors: frozenset[str], bans: Bans) -> bool: ...


class _Sockets(Protocol):
    def withdraw(self) -> None: ...

    def review(self) -> None: ...


class Governed(Protocol):
    """A relay, as seen by its policy: what admits visitors, what judges packets, and what sends them out."""

    @property
    def access(self) -> _Access: ...

    @property
    def admission(self) -> _Admission: ...

    @property
    def store(self) -> _Serves: ...

    @property
    def fanout(self) -> _Serves: ...

    @property
    def registry(self) -> _Sockets: ...


def apply_policy(relay: Governed, policy: Policy) -> None:
    """Put a policy into effect for the next packet taken and the next one sent, in open sessions too.

    Pages and packets by id come from the store; live packets, and the newest ones from memory, come from the
    fan-out. There is no third way out of the relay (R-323). Bytes that wait at a socket leave within a
    second, or not at all. Sessions of authors and networks that are banned now end in the same step. Call
    this on the event loop: at the start, at SIGHUP, and when bans or the abuse table have changed.
    """
    withdraws = policy.declined.exceeds(relay.fanout.declined)
    relay.access.restricted = policy.slowed
    relay.admission.policy = policy
    relay.store.declined = policy.declined
    relay.fanout.declined = policy.declined
    if relay.access.ban(policy.declined.authors, policy.bans):
        relay.registry.review()
    if withdraws:
        relay.registry.withdraw()
