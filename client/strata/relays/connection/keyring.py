"""What a relay connection knows of its authors' keys: no I/O, no clock (R-075, R-336).

An author is *known* once the relay has been asked for its identity packets. Most authors have none: their
key is in their DID, and remembering that costs a dictionary entry. For the others a `KeyChain` says which key
could sign in the second in which a relay received a packet.

The ring need not learn of every change at once. A packet that does not verify may be signed by a key that is
newer than what is known here. So a packet is rejected only if the relay was asked after that packet had
arrived: a relay has the key event before it accepts packets signed by the new key (R-074). A reader cannot
notice a revocation by itself, so the client asks again from time to time (`Options.key_refresh_interval`).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from strata.protocol import ids
from strata.protocol.documents import DidDocument
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.keys import IDENTITY_TYPES, KeyChain, KeyRules
from strata.protocol.packets import Packet, observed_at

__all__ = ["Anchors", "KeyRing"]

_EVER = 2**53
"""A time by which everything pending has taken effect."""

Event = tuple[Packet, int]
"""An identity packet and the second in which the relay received it."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """Documents and keys trusted before any packet is read: from configuration or a bootstrap file."""

    documents: Mapping[str, Sequence[DidDocument]] = field(default_factory=dict)
    keys: Mapping[str, bytes] = field(default_factory=dict)
    rules: KeyRules = field(default_factory=KeyRules)

    def chain(self, did: str, events: Iterable[Event] = ()) -> KeyChain:
        """The key chain that these packets form on top of what is trusted."""
        return KeyChain.replay(
            did,
            events,
            documents=self.documents.get(did, ()),
            static_key=self.keys.get(did),
            rules=self.rules,
        )

    def names(self, did: str) -> bool:
        """Whether anything is trusted about this DID beyond the DID itself."""
        return did in self.documents or did in self.keys


class _Heard(NamedTuple):
    """An identity packet that arrived on a subscription."""

    packet: Packet
    received_at: int
    arrived_at: float


@dataclass(slots=True)
class _Author:
    chain: KeyChain | None
    """None if there is only the key in the DID itself."""
    is_overgrown: bool
    """Whether the relay sent more than a chain may hold: then every packet of this author is rejected."""
    asked_at: float
    """When the relay was asked; the chain includes everything it had then."""
    refresh_at: float
    heard: list[_Heard]
    """The packets that have changed the chain since the relay was asked."""


class KeyRing:
    """The key chains of the authors met on one relay; those met least recently are forgotten first.

    Times are seconds on the connection's monotonic clock, except that packets are judged by the Unix second
    in which the relay received them.
    """

    def __init__(self, anchors: Anchors, *, max_authors: int, refresh_interval: float) -> None:
        self.stale: set[str] = set()
        """Authors to ask for again, in the background; the caller that does so clears them."""
        self._anchors = anchors
        self._max_authors = max_authors
        self._refresh_interval = refresh_interval
        self._authors: OrderedDict[str, _Author] = OrderedDict()
        self._doubtful: set[str] = set()
        """Known authors of whom a packet has failed: the next one may fail too, and need another request."""

    def __len__(self) -> int:
        return len(self._authors)

    def __contains__(self, did: str) -> bool:
        return did in self._authors

    def learn(
        self,
        did: str,
        chain: KeyChain | None,
        asked_at: float,
        *,
        is_overgrown: bool = False,
    ) -> None:
        """Store the chain (`build`) of the relay's answer to a request made at `asked_at`.

        `is_overgrown` means that the answer was too large.
        """
        known = self._authors.get(did)
        # The answer may have been on its way when these arrived: their changes are applied again.
        heard = [] if known is None else [one for one in known.heard if one.arrived_at >= asked_at]
        for one in heard:
            with suppress(InvalidPacket):
                chain = (chain or self._anchors.chain(did)).apply(one.packet, one.received_at)
        refresh_at = asked_at + self._refresh_interval
        self._authors[did] = _Author(chain, is_overgrown, asked_at, refresh_at, heard)
        self._authors.move_to_end(did)
        self.stale.discard(did)
        while len(self._authors) > self._max_authors:
            self._doubtful.discard(self._authors.popitem(last=False)[0])

    def wants(self, did: str) -> bool:
        """Whether to ask for this author along with others, before a packet of it is judged."""
        return did not in self._authors or did in self._doubtful

    def build(self, did: str, events: Sequence[Event]) -> KeyChain | None:
        """The chain that identity packets form; None if there is nothing but the DID itself.

        Takes about 80 µs per packet. Changes no state, so it may run on a thread.
        """
        return self._anchors.chain(did, events) if events or self._anchors.names(did) else None

    def chain(self, did: str) -> KeyChain | None:
        """What is known of an author's keys, for display; None if the relay was not asked."""
        author = self._authors.get(did)
        return None if author is None else author.chain or self._anchors.chain(did)

    def vouches(self, packet: Packet, known_since: float) -> bool | None:
        """Whether a packet that came inside another one was signed with its author's keys of the time.

        None means that the relay must be asked first: it was not asked, or only before `known_since`. It is
        not known when a relay received the packet, so its own timestamp counts, or a time later by the clock
        skew. A key that was ever revoked does not count: a thief can backdate packets.
        """
        verdict: bool | None = False
        for at in (packet.timestamp, packet.timestamp + self._anchors.rules.clock_skew_seconds):
            try:
                verdict = True if self.verify(packet, at, known_since) else None
                break
            except InvalidPacket:
                continue
        chain = self.chain(packet.author_id)
        if verdict is not True or chain is None:
            return verdict
        revoked = (key for key in chain.keys(_EVER) if key.revoked_at is not None)
        return not any(
            ids.verify(key.public_key, packet.signed_bytes, packet.signature_bytes) for key in revoked
        )

    def verify(self, packet: Packet, received_at: int, arrived_at: float) -> bool:
        """Check signature, key window and expiry of a packet that the relay received at `received_at`.

        False means that the relay must be asked first: the author is unknown, or the packet did not verify
        but arrived (at `arrived_at`) after the relay was asked, so a newer key may have signed it. An
        identity packet that passes takes effect from here on. Raises `InvalidPacket`.
        """
        author = self._authors.get(packet.author_id)
        if author is None:
            return False
        self._authors.move_to_end(packet.author_id)
        if arrived_at > author.refresh_at:
            # The answer sets this anew. If the request fails, this is when it is due again.
            author.refresh_at = arrived_at + self._refresh_interval
            self.stale.add(packet.author_id)
        try:
            self._verify(packet, received_at, arrived_at, author)
        except InvalidPacket as error:
            if error.code is ErrorCode.PACKET_EXPIRED or author.is_overgrown:
                raise  # to ask again would take as long; that is done in the background
            if author.asked_at < arrived_at:
                return False
            self._doubtful.add(packet.author_id)
            raise
        return True

    def _verify(self, packet: Packet, received_at: int, arrived_at: float, author: _Author) -> None:
        if author.is_overgrown:
            raise InvalidPacket(
                ErrorCode.INVALID_SIGNATURE,
                "the author has too many identity packets",
                detail="too_many_key_events",
            )
        if packet.content_type in IDENTITY_TYPES:
            chain = author.chain or self._anchors.chain(packet.author_id)
            chain.verify(packet, received_at, ingest=False)
            try:
                author.chain = chain.apply(packet, received_at)
            except InvalidPacket:
                # It was valid when received, and does not fit what is known since, as after a conflict.
                pass
            else:
                if author.chain is not chain:
                    author.heard.append(_Heard(packet, received_at, arrived_at))
        elif author.chain is None:
            packet.verify(now=observed_at(packet, received_at))
            return
        else:
            author.chain.verify(packet, received_at, ingest=False)
        if packet.expires_at is not None and received_at > packet.expires_at:
            raise InvalidPacket(ErrorCode.PACKET_EXPIRED, "the packet had expired when it was received")
