"""Downgraded packets: the relay's record, how they are served, and how a client restores them (A-077).

The log holds the packet as it was signed. A subscriber receives a copy in which `origin_type` is the
effective origin and a failed `client_attestation` is removed, so its id and signature no longer match. The
annotation beside it contains the signed header, from which a client rebuilds the packet and verifies it. The
client does not trust the annotation: the rebuilt packet must have the id under which it was sent, or it is
refused.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from strata.protocol import canonical
from strata.protocol.canonical import DEEPEST
from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet
from strata.protocol.provenance.origins import ORIGIN_TYPES, UNKNOWN, header_of, lower, read_origin

__all__ = ["Downgrade", "HeaderPlace", "ServedForm", "restore", "served"]


class HeaderPlace(msgspec.Struct, frozen=True, array_like=True):
    """The places, in a canonical packet, of the bytes that serving removes and quotes. Ends are exclusive."""

    start: int
    end: int
    """The value of `provenance_header`."""
    dropped_start: int
    dropped_end: int
    """Its failed `client_attestation` with the comma after it; empty if there is none to remove."""
    origin_start: int
    origin_end: int
    """The value of its `origin_type`."""


class Downgrade(msgspec.Struct, frozen=True):
    """The relay's finding that a packet does not prove the origin that it claims (R-206 … R-208)."""

    claimed_origin_type: str
    effective_origin_type: str
    reason: str
    """One of `strata.protocol.provenance.REASONS`."""
    drops_client_attestation: bool = False
    """Whether the header has a failed `client_attestation`, which is left out of the served copy."""
    place: HeaderPlace | UnsetType = UNSET
    """Where the header is in the packet, so that serving only copies bytes; absent from older findings."""

    def placed(self, signed: bytes) -> Downgrade:
        """The same finding with `place`, for this packet in canonical form."""
        return msgspec.structs.replace(self, place=_find_header(signed, self.drops_client_attestation))

    def encode(self) -> bytes:
        """The form in which the finding is stored beside the packet."""
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Downgrade:
        """Read what `encode` wrote. Raises `msgspec.ValidationError` or `msgspec.DecodeError` otherwise."""
        return _decode(data)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Downgrade).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ServedForm(NamedTuple):
    """The packet and the `relay_annotations` of an EVENT or OK, as JSON text."""

    packet: bytes
    annotations: bytes


def served(
    signed: bytes, downgrade: Downgrade, *, mode: Literal["rewrite", "annotate"] = "rewrite"
) -> ServedForm:
    """The form in which a downgraded packet is sent to a subscriber (R-206, R-208 … R-210).

    `signed` is the packet's canonical form as it is stored. `rewrite` changes the served copy, `annotate`
    leaves it as signed; the annotation is the same in both, so that a reader need not know the mode.
    Replication sessions receive `signed` itself (R-211).
    """
    place = downgrade.place or _find_header(signed, downgrade.drops_client_attestation)
    effective = _encode(downgrade.effective_origin_type)
    annotations = (
        b'{"provenance":{"claimed_origin_type":%b,"effective_origin_type":%b,'
        b'"original_provenance_header":%b,"reason":%b}}'
    ) % (
        _encode(downgrade.claimed_origin_type),
        effective,
        signed[place.start : place.end],
        _encode(downgrade.reason),
    )
    if mode == "annotate":
        return ServedForm(signed, annotations)
    kept = signed[: place.dropped_start], signed[place.dropped_end : place.origin_start]
    return ServedForm(b"".join((*kept, effective, signed[place.origin_end :])), annotations)


def _find_header(signed: bytes, drops_attestation: bool) -> HeaderPlace:
    # Only names are decoded: canonical bytes are copied as they are.
    header = next(member for member in _members(signed, 0) if member.name == "provenance_header")
    members = {member.name: member for member in _members(signed[header.value : header.end], header.value)}
    origin = members["origin_type"]
    dropped = members.get("client_attestation") if drops_attestation else None
    # Members are sorted, so an attestation comes before the origin and has a comma after it.
    return HeaderPlace(
        header.value,
        header.end,
        origin.value if dropped is None else dropped.start,
        origin.value if dropped is None else dropped.end + 1,
        origin.value,
        origin.end,
    )


class _Member(NamedTuple):
    name: str
    start: int
    value: int
    """Where the member's value starts."""
    end: int


def _members(text: bytes, at: int) -> Iterator[_Member]:
    """The members of an object in canonical form, at `at` in the packet, and their places in the packet."""
    start = at + 1
    for name, raw in _decode_members(text).items():
        value = start + len(_encode(name)) + 1
        end = value + len(bytes(raw))
        yield _Member(name, start, value, end)
        start = end + 1


def restore(
    raw: bytes | bytearray | memoryview | msgspec.Raw,
    annotations: Mapping[str, object] | None = None,
    *,
    max_bytes: int | None = None,
) -> tuple[Packet, str | None]:
    """The packet as its author signed it, and the origin with which a reader may credit it.

    `raw` and `annotations` are those of one EVENT. The origin is the lowest of the signed claim, the served
    header and the annotation (R-212); None if the packet has no provenance header. A packet whose id does
    not match is rebuilt from the annotation or, without one, by trying each origin in turn.

    Raises `InvalidPacket` as `Packet.parse` does; `packet_id_mismatch` means that no rebuilt packet matched,
    so the packet was tampered with. The signature is not checked here.
    """
    finding = (annotations or {}).get("provenance")
    finding = finding if type(finding) is dict else {}
    try:
        packet = Packet.read(raw, max_bytes=max_bytes)
    except InvalidPacket as error:
        if error.detail != "packet_id_mismatch":
            raise
        return _rebuild(bytes(raw), finding, error, max_bytes)
    return packet, _effective(packet, finding)


def _rebuild(
    raw: bytes, finding: dict[str, object], mismatch: InvalidPacket, max_bytes: int | None
) -> tuple[Packet, str | None]:
    value: Any = canonical.parse(raw, max_depth=DEEPEST)[0]
    served_header = header_of(value)
    if served_header is None:
        raise mismatch  # a relay downgrades only packets with a header, and keeps the header
    original = finding.get("original_provenance_header")
    if type(original) is dict:
        candidates = [original]
    else:
        served_origin = served_header.get("origin_type")
        candidates = [
            {**served_header, "origin_type": origin} for origin in ORIGIN_TYPES if origin != served_origin
        ]
    for header in candidates:
        try:
            text = canonical.encode({**value, "provenance_header": header}, max_depth=DEEPEST)
            packet = Packet.read(text, max_bytes=max_bytes)
        except InvalidPacket:
            continue
        served_as = read_origin(served_header.get("origin_type"))
        return packet, lower(served_as, _effective(packet, finding) or UNKNOWN)
    raise mismatch


def _effective(packet: Packet, finding: dict[str, object]) -> str | None:
    header = header_of(packet.value)
    if header is None:
        return None
    claimed = read_origin(header.get("origin_type"))
    found = finding.get("effective_origin_type")
    return claimed if found is None else lower(claimed, read_origin(found))
