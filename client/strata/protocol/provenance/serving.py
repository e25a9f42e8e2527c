"""A downgraded packet: the relay's record of it, how it is served, how a client restores it (A-077).

The log holds the packet as it was signed. What a subscriber sees is a copy in which `origin_type` is the
effective one and a `client_attestation` that failed is gone, so its id and signature no longer hold. The
annotation beside it carries the signed header, from which a client rebuilds the packet and verifies it.
Nothing a relay writes there is believed: the rebuilt packet has the id it was sent under, or is refused.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from strata.protocol import canonical
from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet
from strata.protocol.provenance.origins import DEEPEST, ORIGIN_TYPES, UNKNOWN, header_of, lower, read_origin

__all__ = ["Downgrade", "ServedForm", "restore", "served"]


class Downgrade(msgspec.Struct, frozen=True):
    """The relay's finding that a packet does not prove the origin it claims (R-206 … R-208)."""

    claimed_origin_type: str
    effective_origin_type: str
    reason: str
    """One of `strata.protocol.provenance.REASONS`."""
    drops_client_attestation: bool = False
    """The header carries a `client_attestation` that failed: it is left out of the served copy."""

    def encode(self) -> bytes:
        """The form in which the finding is stored beside the packet."""
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Downgrade:
        """Read what `encode` wrote. Raises `msgspec.ValidationError` or `msgspec.DecodeError` otherwise."""
        return _decode(data)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Downgrade).decode


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
    value: Any = canonical.parse(signed, max_depth=DEEPEST)[0]
    header = value["provenance_header"]
    annotations = {
        "provenance": {
            "effective_origin_type": downgrade.effective_origin_type,
            "claimed_origin_type": downgrade.claimed_origin_type,
            "reason": downgrade.reason,
            "original_provenance_header": header,
        }
    }
    annotations_text = canonical.encode(annotations, max_depth=DEEPEST + 2)
    if mode == "annotate":
        return ServedForm(signed, annotations_text)
    header = {**header, "origin_type": downgrade.effective_origin_type}
    if downgrade.drops_client_attestation:
        header.pop("client_attestation", None)
    value["provenance_header"] = header
    return ServedForm(canonical.encode(value, max_depth=DEEPEST), annotations_text)


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
