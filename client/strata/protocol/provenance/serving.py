"""A downgraded packet: the relay's record of it, how it is served, how a client restores it (A-077).

The log holds the packet as it was signed. What a subscriber sees is a copy in which `origin_type` is the
effective one and a `client_attestation` that failed is gone, so its id and signature no longer hold. The
annotation beside it carries the signed header, from which a client rebuilds the packet and verifies it.
Nothing a relay writes there is believed: the rebuilt packet has the id it was sent under, or is refused.
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
    """Where the bytes stand, in a canonical packet, that serving it cuts and quotes. Ends are exclusive."""

    start: int
    end: int
    """The value of `provenance_header`."""
    dropped_start: int
    dropped_end: int
    """Its failed `client_attestation` with the comma behind it; empty where there is none to drop."""
    origin_start: int
    origin_end: int
    """The value of its `origin_type`."""


class Downgrade(msgspec.Struct, frozen=True):
    """The relay's finding that a packet does not prove the origin it claims (R-206 … R-208)."""

    claimed_origin_type: str
    effective_origin_type: str
    reason: str
    """One of `strata.protocol.provenance.REASONS`."""
    drops_client_attestation: bool = False
    """The header carries a `client_attestation` that failed: it is left out of the served copy."""
    place: HeaderPlace | UnsetType = UNSET
    """Where the header stands in the packet, so that serving it costs a copy; absent from older findings."""

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
    """What an EVENT or OK carries, as JSON text: the packet, and `relay_annotations`."""

    packet: bytes
    annotations: bytes


def served(
    signed: bytes, downgrade: Downgrade, *, mode: Literal["rewrite", "annotate"] = "rewrite"
) -> ServedForm:
    """How a downgraded packet travels to a subscriber (R-206, R-208 … R-210).

    `signed` is the packet's canonical form as it is stored. `rewrite` changes the served copy, `annotate`
    leaves it as signed; the annotation is the same in both, so that a reader need not know the mode.
    Replication sessions get `signed` itself (R-211).
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
    # Nothing is decoded but names: canonical bytes are taken over as they are.
    header = next(member for member in _members(signed, 0) if member.name == "provenance_header")
    members = {member.name: member for member in _members(signed[header.value : header.end], header.value)}
    origin = members["origin_type"]
    dropped = members.get("client_attestation") if drops_attestation else None
    # Members are in order, so that an attestation stands before the origin and has a comma behind it.
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
    """Where its value starts."""
    end: int


def _members(text: bytes, at: int) -> Iterator[_Member]:
    """The members of an object in canonical form, which stands at `at` of the packet, and their places."""
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
    """The packet as its author signed it, and the origin that a reader may credit it with.

    `raw` and `annotations` are those of one EVENT. The origin is the lowest of the signed claim, the served
    header and the annotation (R-212); None if the packet has no provenance header. A packet whose id does
    not recompute is rebuilt from the annotation or, for want of one, with each origin put back in turn.

    Raises `InvalidPacket` as `Packet.parse` does; `packet_id_mismatch` says that no rebuilding helped, so
    that the packet was tampered with. The signature is not checked here.
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
        raise mismatch  # a relay downgrades what claims something, and leaves the header in place
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
