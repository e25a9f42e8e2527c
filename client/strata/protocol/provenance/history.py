"""A reader's verdict on the origin of one medium: edit histories, platform evidence, levels of trust.

A relay is responsible for what it can refuse or downgrade; the checks here affect a claim only for the reader
(A-089). The history of a medium is a chain of hashes:

    genesis_media_hash ─ prev_edit_hash of the first edit
    hash of that edit  ─ prev_edit_hash of the second …
    resulting_media_hash of the last ─ the `media_hash` the packet refers to

The hash of an edit is that of its canonical object, like every hash of an object here (R-018).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Mapping
from typing import cast

from strata.protocol import canonical, fields
from strata.protocol.canonical import DEEPEST
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import SIGNATURE_BYTES
from strata.protocol.packets import Packet, byte_hash
from strata.protocol.provenance.attestation import platform_nonce, read_attestation
from strata.protocol.provenance.evidence import MAX_EVIDENCE_BYTES, EvidenceClaim, EvidenceVerifier
from strata.protocol.provenance.origins import (
    AI_MODEL,
    HARDWARE,
    HIGH_TRUST,
    SOFTWARE,
    UNKNOWN,
    header_of,
    lower,
    read_origin,
)

__all__ = ["Level", "edit_hash", "history_holds", "level_of", "platform_attested"]

_APP_FORMATS = frozenset({"apple-app-attest", "play-integrity"})
"""The formats that vouch for an app; none of them proves a capture by hardware (R-228)."""


class Level(enum.IntEnum):
    """How much a reader may trust a medium's origin, the least first. It is evidence and not a guarantee."""

    UNKNOWN = 0
    """No strong evidence. This is the level of every packet without a header, and not an error (R-036)."""
    SOFTWARE = 1
    """A known piece of software vouches for the origin."""
    ATTESTED_APP = 2
    """In addition, the software's platform says that the software is genuine (R-233)."""
    AI_MODEL = 3
    """The provider of a model says that the model made the medium."""
    HARDWARE = 4
    """A device whose maker is known signed the medium at capture."""


_LEVELS = {
    UNKNOWN: Level.UNKNOWN,
    SOFTWARE: Level.SOFTWARE,
    AI_MODEL: Level.AI_MODEL,
    HARDWARE: Level.HARDWARE,
}


def level_of(
    packet: Packet,
    effective_origin: str | None,
    *,
    media_hash: str | None = None,
    media: bytes | None = None,
    app_attested: bool = False,
) -> Level:
    """The level of one medium of a packet: that with `media_hash`, or the first.

    `effective_origin` is the origin that `restore` returned, `media` the fetched bytes, if any, which must
    match the hash (R-028), and `app_attested` the result of `platform_attested`.
    """
    header = header_of(packet.value)
    if header is None or effective_origin is None:
        return Level.UNKNOWN
    if media_hash is None:
        media_hash = next(iter(packet.media_hashes), None)
    if media is not None and byte_hash(media) != media_hash:
        return Level.UNKNOWN
    origin = lower(read_origin(header.get("origin_type")), effective_origin)
    if origin in HIGH_TRUST and not history_holds(header, media_hash):
        return Level.UNKNOWN
    if origin == HARDWARE and not _every_edit_is_signed(header):
        return Level.UNKNOWN
    if origin == SOFTWARE and app_attested:
        return Level.ATTESTED_APP  # and no higher
    return _LEVELS[origin]


def history_holds(header: Mapping[str, object], media_hash: str | None) -> bool:
    """Whether the edit history leads from the genesis to this medium without a gap (R-226).

    In a packet without media there is no medium to lead to, and only the links must be correct.
    """
    previous = header.get("genesis_media_hash")
    result = previous
    for edit in _edits(header):
        if type(edit) is not dict or previous is None or edit.get("prev_edit_hash") != previous:
            return False
        result = edit.get("resulting_media_hash")
        if type(result) is not str or not fields.is_content_id(result):
            return False
        previous = edit_hash(edit)
    return media_hash is None or result == media_hash


def edit_hash(edit: Mapping[str, object]) -> str:
    """The hash of an edit, which the next edit must have as its `prev_edit_hash`."""
    return byte_hash(canonical.encode(dict(edit), max_depth=DEEPEST))


def platform_attested(
    packet: Packet, manifest: Packet, verifiers: Mapping[str, EvidenceVerifier], *, now: int
) -> bool:
    """Whether the client's platform vouches for the app that made the packet (R-233).

    `manifest` is the client's newest CLIENT_MANIFEST, whose `bundle_ids` name its apps; `verifiers` are keyed
    by format. False if evidence is missing, fails or cannot be checked: the claim then counts as SOFTWARE.
    """
    header = header_of(packet.value)
    attestation = read_attestation(header) if header else None
    if header is None or attestation is None or attestation.platform_attestation is None:
        return False
    evidence = attestation.platform_attestation
    kind = evidence.get("format")
    verifier = verifiers.get(kind) if type(kind) is str and kind in _APP_FORMATS else None
    payload = fields.base64url(evidence.get("payload"), MAX_EVIDENCE_BYTES)
    nonce = platform_nonce(packet.value)
    stated = fields.base64url(evidence.get("nonce"), hashlib.sha256().digest_size)
    if verifier is None or not payload or stated != nonce or manifest.author_id != attestation.client_id:
        return False
    genesis = cast("str | None", header.get("genesis_media_hash"))
    claim = EvidenceClaim(
        read_origin(header.get("origin_type")),
        genesis,
        app_ids=frozenset(_texts(manifest.content.get("bundle_ids"))),
    )
    try:
        verifier.verify(payload, nonce=nonce, claim=claim, now=now)
    except InvalidPacket:
        return False
    return True


def _edits(header: Mapping[str, object]) -> list[object]:
    edits = header.get("edit_history")
    return edits if type(edits) is list else []


def _every_edit_is_signed(header: Mapping[str, object]) -> bool:
    return all(
        type(edit) is dict and fields.hex_bytes(edit.get("signature"), SIGNATURE_BYTES) is not None
        for edit in _edits(header)
    )


def _texts(value: object) -> Iterator[str]:
    """The strings in an array or in the values of an object: both forms of `bundle_ids` occur."""
    if type(value) is str:
        yield value
    elif type(value) is list or type(value) is dict:
        for item in value.values() if type(value) is dict else value:
            if type(item) is str or type(item) is list:
                yield from _texts(item)
