"""The relay's knowledge of every DID in a packet: of its author, and of those in its provenance header."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
from strata.protocol.ids import public_key_from_did
from strata.protocol.keys import IDENTITY_TYPES, KeyChain
from strata.protocol.packets import Packet
from strata.protocol.provenance import needed_dids

from relayd.identity.directory import Identities

__all__ = ["Knowledge", "Known", "known_of", "missing_for"]


class Known(msgspec.Struct, frozen=True):
    """The knowledge by which a packet is judged. A DID without a chain is plain: it is its own key."""

    generation: int
    """The generation of the directory when this was put together."""
    chain: KeyChain | None = None
    """The author's chain."""
    until: float = math.inf
    """The second in which the author's keys change merely by time."""
    others: Mapping[str, KeyChain] = {}
    manifests: Mapping[str, Packet] = {}

    def keys_of(self, did: str, at: int) -> tuple[bytes, ...]:
        """The keys that may sign for a DID that the packet names besides its author."""
        return _keys(did, self.others.get(did), at)

    def author_keys(self, author_id: str, at: int) -> tuple[bytes, ...]:
        """The keys that may sign for the author."""
        return _keys(author_id, self.chain, at)


class Knowledge:
    """What the directory knows at the moment of the call, for packets and for verdicts about them."""

    def __init__(self, identities: Identities, clock: Callable[[], int]) -> None:
        self._identities = identities
        self._clock = clock
        self._plain = Known(identities.generation)

    def of(self, packet: Packet) -> Known | None:
        """The knowledge of every DID that the packet names; None if some of it has to be loaded first."""
        generation = self._identities.generation
        if self._plain.generation != generation:
            self._plain = Known(generation)
        return known_of(packet, self._identities, self._clock(), self._plain)

    def is_current(self, packet: Packet, known: Known) -> bool:
        """Whether the keys and manifests of all DIDs that the packet names are still those of `known`.

        Called for each packet that leaves, so the usual answer costs one comparison. It makes no difference
        whether they are still in memory.
        """
        identities = self._identities
        if known.generation == identities.generation:
            return True
        dids = (packet.author_id, *needed_dids(packet))
        return not any(identities.changed_since(did, known.generation) for did in dids)


def missing_for(packet: Packet, identities: Identities) -> list[str]:
    """The DIDs whose chains and manifests have to be loaded before `known_of` can answer."""
    others = needed_dids(packet)
    return identities.missing((packet.author_id, *others), others)


def known_of(packet: Packet, identities: Identities, now: int, plain: Known) -> Known | None:
    """The knowledge of every DID that the packet names; None if some of it has to be loaded first.

    `plain` is the answer for the usual packet, whose DIDs are all plain: one object serves all such packets.
    """
    author, others = packet.author_id, needed_dids(packet)
    is_plain = identities.is_plain(author) and packet.content_type not in IDENTITY_TYPES
    if is_plain and not others:
        return plain
    if not others:
        chain = identities.chain(author)
        return None if chain is None else Known(identities.generation, chain, chain.holds_until(now))
    if identities.missing((author, *others), others):
        return None
    chain = None if is_plain else identities.chain(author)
    until = math.inf if chain is None else chain.holds_until(now)
    chains = {did: identities.chain(did) for did in others if not identities.is_plain(did)}
    manifests = {did: identities.manifest(did) for did in others}
    return Known(
        identities.generation,
        chain=chain,
        until=until,
        others={did: chain for did, chain in chains.items() if chain is not None},
        manifests={did: manifest for did, manifest in manifests.items() if manifest is not None},
    )


def _keys(did: str, chain: KeyChain | None, at: int) -> tuple[bytes, ...]:
    if chain is not None:
        return chain.candidates(at)
    key = public_key_from_did(did)
    return () if key is None else (key,)
