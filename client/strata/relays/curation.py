"""How a reader interprets typed packets: trust edges, corrections, attestations, descriptors.

Pure functions over packets that have been received and verified (id, signature, key window). No result
depends on the order of arrival: a packet counts by its author and its `received_at`, and ties go to the
smallest `packet_id`. The same packet from several relays counts once, at its earliest `received_at` (R-106).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from strata.protocol import fields, ids
from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet
from strata.protocol.typed import attestation_signature_holds, check_content

__all__ = [
    "Arrival",
    "StandingAttestation",
    "TrustEdge",
    "attestations",
    "current_descriptor",
    "embedded_attestations",
    "superseding_correction",
    "trust_graph",
]

KeysAt = Callable[[str, int], Sequence[bytes]]


class Arrival(NamedTuple):
    """A verified packet, and when a relay received it (Unix seconds)."""

    packet: Packet
    received_at: int


@dataclass(frozen=True, slots=True)
class TrustEdge:
    """One identity's declared trust in another, in a context."""

    source: str
    target: str
    context: str | None
    strength: float
    created_at: int
    packet_id: str


@dataclass(frozen=True, slots=True)
class StandingAttestation:
    """An attestation, with its retraction and disputes."""

    attestation: Mapping[str, object]
    packet: Packet
    received_at: int
    retraction: Packet | None
    """The packet with which the attestor retracted it (R-258)."""
    disputes: tuple[Packet, ...]
    """Disputes, for the reader to consider; they do not affect `counts` (R-259)."""

    @property
    def counts(self) -> bool:
        """Whether it carries weight in a quorum."""
        return self.retraction is None


def trust_graph(received: Iterable[Arrival]) -> dict[tuple[str, str, str | None], TrustEdge]:
    """The edges in force, by (from, to, context).

    Of several edges with the same key, the one with the latest `created_at` holds. A revocation ends every
    edge from its author to its target, in any context, that was created up to its own `created_at`; it never
    raises a strength, and an edge of strength 0 is an edge (R-245). Packets that fail the checks of their
    type are ignored (R-244).
    """
    known = [item for item in _once(received) if _is_sound(item.packet)]
    revoked_until: dict[tuple[str, str], int] = {}
    for packet, _ in known:
        if packet.content_type == "TRUST_REVOCATION":
            pair = (packet.author_id, str(packet.content.get("to")))
            revoked_until[pair] = max(_created_at(packet), revoked_until.get(pair, _created_at(packet)))
    edges: dict[tuple[str, str, str | None], TrustEdge] = {}
    # The last one written holds: the latest created, then the latest received, then the smallest id.
    for packet, _ in sorted(known, key=_by_creation):
        if packet.content_type != "TRUST_EDGE":
            continue
        edge = _edge(packet)
        ended_at = revoked_until.get((edge.source, edge.target))
        if ended_at is None or edge.created_at > ended_at:
            edges[edge.source, edge.target, edge.context] = edge
    return edges


def superseding_correction(target: Packet, received: Iterable[Arrival]) -> Packet | None:
    """The CORRECTION in force for `target`, if any.

    Only corrections by the target's author count (R-247); the latest by `received_at` wins (R-248). The
    target itself is kept: a correction is shown beside it (R-249).
    """
    corrections = (
        item
        for item in _once(received)
        if item.packet.content_type == "CORRECTION"
        and item.packet.author_id == target.author_id
        and item.packet.content.get("target_packet") == target.packet_id
        and _is_sound(item.packet)
    )
    return _latest(corrections)


def attestations(
    received: Iterable[Arrival],
    *,
    types_of: Mapping[str, str] | None = None,
    keys_at: KeysAt | None = None,
) -> list[StandingAttestation]:
    """The attestations that may count, with their retractions and disputes, in order of `received_at`.

    `types_of` gives the content types of target packets, because an attestation of `domain` INFRASTRUCTURE
    counts only on a RELAY_DESCRIPTOR (R-256). `keys_at(did, at)` returns an attestor's keys, by default the
    key of a self-certifying DID; the inner signature must verify under one of them (R-254). Of several with
    the same author, `attestation_id` and target, the first received counts (R-113).
    """
    known = _once(received)
    types = {item.packet.packet_id: item.packet.content_type for item in known} | dict(types_of or {})
    first: dict[tuple[str, str, str], Arrival] = {}
    for item in known:  # by received_at, then id
        if _attests(item, types, keys_at or _own_key):
            first.setdefault(_triple(item.packet), item)
    remarks = _Remarks(known)
    return [
        StandingAttestation(
            _attestation(packet),
            packet,
            received_at,
            remarks.retraction(packet),
            remarks.disputes(packet),
        )
        for packet, received_at in first.values()
    ]


def embedded_attestations(host: Packet) -> list[dict[str, object]]:
    """The attestations inside a packet whose target is that packet (R-255).

    Others carry no weight; no other part of the packet is read (R-257). In practice the result is empty,
    because an attestation cannot contain the hash of the packet that contains it (A-014).
    """
    embedded = cast("list[dict[str, object]]", host.value.get("attestations") or [])
    return [item for item in embedded if item.get("target_packet") == host.packet_id]


def current_descriptor(relay_id: str, received: Iterable[Arrival], now: float) -> Packet | None:
    """The RELAY_DESCRIPTOR of a relay in force now: the latest that has not expired (R-388)."""
    return _latest(
        item
        for item in _once(received)
        if item.packet.content_type == "RELAY_DESCRIPTOR"
        and item.packet.author_id == relay_id
        and (item.packet.expires_at is None or now <= item.packet.expires_at)
        and _is_sound(item.packet)
    )


def _once(received: Iterable[Arrival]) -> list[Arrival]:
    """Each packet once, at its earliest `received_at`, sorted by that and by id."""
    earliest: dict[str, Arrival] = {}
    for packet, received_at in received:
        known = earliest.get(packet.packet_id)
        if known is None or received_at < known.received_at:
            earliest[packet.packet_id] = Arrival(packet, received_at)
    return sorted(earliest.values(), key=lambda item: (item.received_at, item.packet.packet_id))


def _latest(items: Iterable[Arrival]) -> Packet | None:
    best = min(items, key=lambda item: (-item.received_at, item.packet.packet_id), default=None)
    return best.packet if best is not None else None


def _is_sound(packet: Packet) -> bool:
    try:
        check_content(packet)
    except InvalidPacket:
        return False
    return True


def _created_at(packet: Packet) -> int:
    created_at = fields.integer(packet.content.get("created_at"))
    return packet.timestamp if created_at is None else created_at


def _by_creation(item: Arrival) -> tuple[int, int, tuple[int, ...]]:
    # The smallest id must sort last, hence the negated bytes.
    return _created_at(item.packet), item.received_at, tuple(-byte for byte in item.packet.digest)


def _edge(packet: Packet) -> TrustEdge:
    content: dict[str, Any] = packet.content
    context = content.get("context")
    return TrustEdge(
        source=packet.author_id,
        target=content["to"],
        context=context if type(context) is str else None,
        strength=float(content["strength"]),
        created_at=_created_at(packet),
        packet_id=packet.packet_id,
    )


def _own_key(did: str, at: int) -> Sequence[bytes]:
    key = ids.public_key_from_did(did)
    return () if key is None else (key,)


def _attestation(packet: Packet) -> dict[str, Any]:
    """The attestation of a packet whose content is valid."""
    content: dict[str, Any] = packet.content
    attestation: dict[str, Any] = content["attestation"]
    return attestation


def _target(packet: Packet) -> str:
    """The target of a packet whose content is valid."""
    content: dict[str, Any] = packet.content
    target: str = content["target_packet"]
    return target


def _triple(packet: Packet) -> tuple[str, str, str]:
    return packet.author_id, _attestation(packet)["attestation_id"], _target(packet)


def _attests(item: Arrival, types: Mapping[str, str], keys_at: KeysAt) -> bool:
    packet = item.packet
    if packet.content_type != "ATTESTATION" or not _is_sound(packet):
        return False
    attestation = _attestation(packet)
    if attestation.get("domain") == "INFRASTRUCTURE":
        if types.get(_target(packet)) != "RELAY_DESCRIPTOR":
            return False
    return attestation_signature_holds(attestation, keys_at(packet.author_id, item.received_at))


class _Remarks:
    """Later packets about attestations, indexed by their target."""

    def __init__(self, known: Iterable[Arrival]) -> None:
        self._by_subject: dict[tuple[str, str, str], list[Arrival]] = {}
        self._corrections: dict[str, list[Arrival]] = {}
        for item in known:
            kind, content = item.packet.content_type, item.packet.content
            attestation_id, target = content.get("attestation_id"), content.get("target_packet")
            if type(target) is not str:
                continue
            if kind == "CORRECTION":
                self._corrections.setdefault(target, []).append(item)
            elif type(attestation_id) is str:
                self._by_subject.setdefault((kind, attestation_id, target), []).append(item)

    def retraction(self, packet: Packet) -> Packet | None:
        """The attestor's own retraction, or a correction that retracts the packet (R-258)."""
        author_id, attestation_id, target = _triple(packet)
        retraction = _latest(
            item
            for item in self._by_subject.get(("ATTESTATION_RETRACTION", attestation_id, target), ())
            if item.packet.author_id == author_id
        )
        if retraction is not None:
            return retraction
        correction = superseding_correction(packet, self._corrections.get(packet.packet_id, ()))
        return correction if correction and correction.content["action"] == "retract" else None

    def disputes(self, packet: Packet) -> tuple[Packet, ...]:
        """The disputes by any author, in order of `received_at`."""
        _, attestation_id, target = _triple(packet)
        disputes = self._by_subject.get(("ATTESTATION_DISPUTE", attestation_id, target), ())
        return tuple(item.packet for item in disputes)
