"""Packets: parsed, checked and built (RFC-0002 §3–§4).

A packet is its canonical bytes. A `Packet` is a view of them, and exists only if the schema holds, the form
is canonical, and `packet_id` is the BLAKE3 hash of the rest. It does not prove that the signature is the
author's, which costs eight times as much to check and is a separate call (`verify_signature`,
`Packet.verify`), nor that the packet is fresh (`check_freshness`).

Unknown members stay in the bytes, hence in the hash, in storage and in forwarded packets (R-005).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn, cast

import msgspec
from blake3 import blake3

from strata.protocol import canonical, ids
from strata.protocol.canonical import DEEPEST, MAX_DEPTH
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.fields import is_content_id

__all__ = [
    "DEFAULT_MAX_PACKET_AGE_SECONDS",
    "DEFAULT_MAX_PACKET_BYTES",
    "MAX_FUTURE_SECONDS",
    "MINIMAL_PROVENANCE_HEADER",
    "VERSION",
    "Packet",
    "build",
    "byte_hash",
    "check_freshness",
    "id_holds",
    "observed_at",
    "verify_shared",
    "verify_signature",
]

VERSION = 1
"""The packet version that this library supports (R-017)."""

DEFAULT_MAX_PACKET_BYTES = 262_144
"""The canonical size of the largest packet built, and the relay's default limit (R-118, R-124)."""

DEFAULT_MAX_PACKET_AGE_SECONDS = 86_400
"""How far in the past a packet's timestamp may be when the packet is published (R-093)."""

MAX_FUTURE_SECONDS = 300
"""How far in the future the timestamp may be. Fixed: the clock skew setting does not change it (R-095)."""

MINIMAL_PROVENANCE_HEADER: Mapping[str, object] = {
    "origin_type": "UNKNOWN",
    "genesis_media_hash": None,
    "edit_history": [],
}
"""The provenance header of a packet with media of unknown origin (R-034)."""

_BUILT_MEMBERS = frozenset(
    {
        "author_id",
        "content",
        "expires_at",
        "nonce",
        "packet_id",
        "provenance_header",
        "signature",
        "timestamp",
        "version",
    }
)
"""The members that `build` writes itself."""

_UNSIGNED = ("packet_id", "signature")
"""The members that are not hashed and signed (R-022, R-023)."""

_SIGNATURE_CHARACTERS = 2 + 2 * ids.SIGNATURE_BYTES

_MAX_REMEMBERED, _MAX_REMEMBERED_BYTES = 256, 4_096
"""Several relays deliver each packet, to each reader in this process: the last small packets are read and
verified once."""


class Packet(msgspec.Struct, frozen=True, eq=False):
    """One packet whose schema, canonical form and id have been checked. Made only by `parse`, `read` and
    `build`.

    Two packets are equal if their canonical bytes are equal. All times are Unix seconds.
    """

    canonical: bytes
    """The whole packet in canonical form, as it is stored and sent (R-016)."""
    signed_bytes: bytes
    """The canonical form without `packet_id` and `signature`, as it is hashed and signed (R-022, R-023)."""
    digest: bytes
    """The BLAKE3-256 of `signed_bytes`, 32 bytes."""
    packet_id: str
    version: int
    timestamp: int
    author_id: str
    content_type: str
    expires_at: int | None
    nonce: str | None
    signature: str
    """As received, in either letter case (R-024)."""
    signature_bytes: bytes
    value: dict[str, object]
    """The decoded packet. Do not modify it: the bytes above would not change with it."""

    @classmethod
    def parse(
        cls,
        raw: bytes | bytearray | memoryview | msgspec.Raw,
        *,
        max_bytes: int | None = None,
        max_depth: int = MAX_DEPTH,
        max_values: int | None = None,
        media_needs_header: bool = True,
    ) -> Packet:
        """Check a packet that arrived, in the order of relay.md §11 (5, 6, 7).

        A relay refuses media without a provenance header (R-033); a reader treats such a packet as one of
        unknown origin (R-036, A-015): see `read`.

        Text with more than `max_values` values is refused before it is decoded.

        Raises `InvalidPacket`: `invalid_schema` for schema and canonical form, `packet_too_large` if the
        canonical form exceeds `max_bytes`, `invalid_signature` with detail `packet_id_mismatch` if the id
        is not the hash of the packet.
        """
        raw = bytes(raw)
        if max_values is not None:
            canonical.require_few_values(raw, max_values)
        value, text, signed = canonical.parse_without(raw, _UNSIGNED, max_depth=max_depth)
        if type(value) is not dict:
            _refuse("a packet is a JSON object")
        packet_id = value.get("packet_id")
        if type(packet_id) is not str or not is_content_id(packet_id):
            _refuse("packet_id is not 0x and 64 lowercase hex digits")
        signature, signature_bytes = _read_signature(value)
        version, timestamp, author_id, content_type = _read_required(value)
        expires_at, nonce = _read_optional(value)
        _check_content(value, media_needs_header=media_needs_header)
        # a packet of exactly the limit passes.
        if max_bytes is not None and len(text) > max_bytes:
            _refuse_size(max_bytes)
        digest = blake3(signed).digest()
        # compared before anything trusts the claimed id.
        if packet_id[2:] != digest.hex():
            raise InvalidPacket(
                ErrorCode.INVALID_SIGNATURE,
                "packet_id is not the hash of the packet",
                detail="packet_id_mismatch",
            )
        return cls(
            text,
            signed,
            digest,
            packet_id,
            version,
            timestamp,
            author_id,
            content_type,
            expires_at,
            nonce,
            signature,
            signature_bytes,
            value,
        )

    @classmethod
    def read(
        cls, raw: bytes | bytearray | memoryview | msgspec.Raw, *, max_bytes: int | None = None
    ) -> Packet:
        """Read a packet that some relay has accepted: a stored, sent or archived one.

        Relays differ in what they accept, so every reader allows the deepest nesting that a relay can be
        configured to accept, and media without a header. Raises `InvalidPacket` as `parse` does.
        """
        if max_bytes is None and len(bytes(raw)) <= _MAX_REMEMBERED_BYTES:
            return _read_small(bytes(raw))
        return cls.parse(raw, max_bytes=max_bytes, max_depth=DEEPEST, media_needs_header=False)

    @property
    def content(self) -> dict[str, object]:
        """The content; `content["type"]` is `content_type`."""
        return cast(dict[str, object], self.value["content"])

    @property
    def size_bytes(self) -> int:
        """The size that every limit refers to: the length of the canonical form (R-117)."""
        return len(self.canonical)

    @property
    def media_hashes(self) -> tuple[str, ...]:
        """The hashes of the media that `content.media` refers to."""
        media = cast("list[dict[str, str]]", self.content.get("media") or [])  # as `check` requires
        return tuple(reference["media_hash"] for reference in media)

    def verify(self, now: float | None = None) -> None:
        """Check the signature with the key in the author's own DID and, if `now` is given, the expiry.

        Raises `InvalidPacket`: `invalid_signature` (detail `unresolved_key` if the DID contains no key),
        `packet_expired`. An author with a DID Document may have other keys; a caller that has the document
        resolves them and calls `verify_signature`.
        """
        if now is not None:
            _check_expiry(self, now)
        public_key = ids.public_key_from_did(self.author_id)
        if public_key is None:
            raise InvalidPacket(
                ErrorCode.INVALID_SIGNATURE, "the author's key is not known here", detail="unresolved_key"
            )
        if not verify_shared(self, public_key):
            raise InvalidPacket(ErrorCode.INVALID_SIGNATURE, "the signature is not the author's")

    def __eq__(self, other: object) -> bool:
        return self.canonical == other.canonical if isinstance(other, Packet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        # Neither payload nor signature: a repr ends up in logs.
        return f"Packet({self.packet_id}, {self.content_type!r}, {self.size_bytes} bytes)"


@lru_cache(_MAX_REMEMBERED)
def _read_small(raw: bytes) -> Packet:
    return Packet.parse(raw, max_depth=DEEPEST, media_needs_header=False)


def verify_signature(packet: Packet, public_key: bytes) -> bool:
    """Whether the packet's signature verifies under this key (R-023). Releases the interpreter lock."""
    return ids.verify(public_key, packet.signed_bytes, packet.signature_bytes)


def verify_shared(packet: Packet, public_key: bytes) -> bool:
    """`verify_signature` with a cache, for a packet that many readers in a process have.

    For a large packet, the cache holds only its hash, signature and key. Threads that race here both compute
    the same result.
    """
    if packet.size_bytes <= _MAX_REMEMBERED_BYTES:
        return _verify_small(packet, public_key)
    name = packet.digest, packet.signature_bytes, public_key
    verdict = _large_verdicts.get(name)
    if verdict is None:
        verdict = _large_verdicts[name] = verify_signature(packet, public_key)
        while len(_large_verdicts) > _MAX_REMEMBERED:
            _large_verdicts.popitem(last=False)
    return verdict


# Packets are equal if all their bytes are equal, including the signature.
_verify_small = lru_cache(_MAX_REMEMBERED)(verify_signature)

_large_verdicts: OrderedDict[tuple[bytes, bytes, bytes], bool] = OrderedDict()
"""By the hash of the signed bytes, the signature and the key: whether the signature verifies."""


def id_holds(raw: bytes) -> bool:
    """Whether the id in a possibly malformed packet is the hash of its bytes.

    Also true if that cannot be determined: for text without a canonical form, and for a packet with a
    provenance header, which a relay may have downgraded (R-209).
    """
    try:
        value, _, signed = canonical.parse_without(raw, _UNSIGNED)
    except InvalidPacket:
        return True
    if type(value) is not dict:
        return False
    return "provenance_header" in value or value.get("packet_id") == f"0x{blake3(signed).hexdigest()}"


def observed_at(packet: Packet, received_at: int | None) -> int:
    """The time by which a reader judges a packet's age, expiry and key window (R-105).

    This is the time at which a relay received the packet, or the author's timestamp if no relay reported one.
    """
    return packet.timestamp if received_at is None else received_at


def check_freshness(
    packet: Packet, now: float, *, max_age_seconds: float = DEFAULT_MAX_PACKET_AGE_SECONDS
) -> None:
    """Refuse a packet that is from the future, too old, or expired, at the relay's time `now`.

    Raises `InvalidPacket` with `timestamp_in_future`, `timestamp_too_old` or `packet_expired` (R-092…R-095,
    R-101). A limit of `math.inf` admits any age.
    """
    if packet.timestamp - now > MAX_FUTURE_SECONDS:
        raise InvalidPacket(
            ErrorCode.TIMESTAMP_IN_FUTURE, f"timestamp is more than {MAX_FUTURE_SECONDS} s in the future"
        )
    if now - packet.timestamp > max_age_seconds:
        raise InvalidPacket(
            ErrorCode.TIMESTAMP_TOO_OLD, f"timestamp is more than {max_age_seconds:g} s in the past"
        )
    _check_expiry(packet, now)


def build(
    identity: ids.Signer,
    content: Mapping[str, object],
    *,
    timestamp: int,
    expires_at: int | None = None,
    nonce: str | None = None,
    provenance_header: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    max_bytes: int = DEFAULT_MAX_PACKET_BYTES,
    allow_unattested: bool = False,
) -> Packet:
    """Make and sign a packet.

    Members that are None are left out (R-015). Media without a header get the minimal one (R-034). `extra`
    adds further top-level members.

    Raises `InvalidPacket` for a packet that a relay would refuse, because of its schema or a canonical size
    above `max_bytes` (R-124), and `TypeError` if `content` is not a mapping. Raises `ValueError` if `extra`
    names a member that is written here, or if the header claims an origin without a `client_attestation`
    (R-230; `provenance.attest` adds it) and `allow_unattested` is false. Relays serve an unattested packet as
    one of unknown origin.
    """
    if not isinstance(content, Mapping):
        raise TypeError(f'content must be a mapping, as {{"type": "POST"}}, not {type(content).__name__}')
    packet: dict[str, object] = dict(extra or {})
    if clash := packet.keys() & _BUILT_MEMBERS:
        raise ValueError(f"extra cannot set {', '.join(sorted(clash))}")
    if provenance_header is None and content.get("media"):
        provenance_header = MINIMAL_PROVENANCE_HEADER
    if provenance_header is not None:
        if not allow_unattested:
            _require_attested(provenance_header)
        packet["provenance_header"] = dict(provenance_header)
    if expires_at is not None:
        packet["expires_at"] = expires_at
    if nonce is not None:
        packet["nonce"] = nonce
    packet |= {
        "version": VERSION,
        "timestamp": timestamp,
        "author_id": identity.did,
        "content": dict(content),
    }
    signed = canonical.encode(packet)
    packet["packet_id"] = byte_hash(signed)
    packet["signature"] = f"0x{identity.sign(signed).hex()}"
    return Packet.parse(canonical.encode(packet), max_bytes=max_bytes)


def _require_attested(header: Mapping[str, object]) -> None:
    claim = header.get("origin_type")
    if claim not in (None, MINIMAL_PROVENANCE_HEADER["origin_type"]) and not header.get("client_attestation"):
        raise ValueError(f"a packet that claims the origin {claim} needs a client_attestation")


def byte_hash(data: bytes) -> str:
    """`0x` and the BLAKE3-256 of `data` in lowercase hex: the form of every id and media hash (R-018)."""
    return f"0x{blake3(data).hexdigest()}"


def _read_signature(value: dict[str, object]) -> tuple[str, bytes]:
    signature = value.get("signature")
    if type(signature) is str and len(signature) == _SIGNATURE_CHARACTERS and signature.startswith("0x"):
        try:
            decoded = bytes.fromhex(signature[2:])
        except ValueError:
            decoded = b""
        if len(decoded) == ids.SIGNATURE_BYTES:  # fromhex skips blanks; the result is then too short
            return signature, decoded
    _refuse("signature is not 0x and 128 hex digits")


def _read_required(value: dict[str, object]) -> tuple[int, int, str, str]:
    version = _integer(value.get("version"), "version")
    if version != VERSION:
        _refuse(f"packet version {version} is not known here")  # the reason names it
    author_id = value.get("author_id")
    if type(author_id) is not str or not ids.is_did(author_id):
        _refuse("author_id is not a DID")
    content = value.get("content")
    if type(content) is not dict:
        _refuse("content is not an object")
    content_type = content.get("type")
    if type(content_type) is not str:
        _refuse("content.type is not a string")
    return version, _integer(value.get("timestamp"), "timestamp"), author_id, content_type


def _read_optional(value: dict[str, object]) -> tuple[int | None, str | None]:
    expires_at = value.get("expires_at")
    if expires_at is not None:
        expires_at = _integer(expires_at, "expires_at")
    nonce = _optional(value, "nonce", str)
    attestations = _optional(value, "attestations", list)
    if attestations and not all(type(item) is dict for item in attestations):
        _refuse("attestations is not an array of objects")
    if value.get("consensus_metrics") not in (None, {}):
        _refuse("consensus_metrics is reserved")
    return expires_at, nonce


def _check_content(value: dict[str, Any], *, media_needs_header: bool) -> None:
    content = value["content"]
    _optional(content, "text", str, "content.")
    thread_ref = content.get("thread_ref")
    if thread_ref is not None and not (type(thread_ref) is str and is_content_id(thread_ref)):
        _refuse("content.thread_ref is not a packet id")
    header = _optional(value, "provenance_header", dict)
    if header:
        _check_header(header)
    media = _optional(content, "media", list, "content.")
    if not media:
        return
    if header is None and media_needs_header:
        _refuse("content.media without provenance_header")
    for reference in media:
        _check_media_reference(reference)


def _check_header(header: dict[str, object]) -> None:
    """Check R-027 only; the relay's provenance check judges the claims of the header."""
    _check_byte_hash(header.get("genesis_media_hash"), "provenance_header.genesis_media_hash")
    edits = header.get("edit_history")
    for edit in edits if type(edits) is list else ():
        if type(edit) is dict:
            _check_byte_hash(edit.get("resulting_media_hash"), "edit_history.resulting_media_hash")


def _check_byte_hash(value: object, name: str) -> None:
    if value is not None and not (type(value) is str and is_content_id(value)):
        _refuse(f"{name} is not 0x and 64 lowercase hex digits")


def _check_media_reference(reference: object) -> None:
    if type(reference) is not dict:
        _refuse("content.media is not an array of objects")
    media_hash = reference.get("media_hash")
    if type(media_hash) is not str or not is_content_id(media_hash):
        _refuse("media_hash is not 0x and 64 lowercase hex digits")
    _optional(reference, "media_type", str, "content.media.")
    if reference.get("size_bytes") is not None:
        _integer(reference["size_bytes"], "content.media.size_bytes")
    uris = _optional(reference, "media_uris", list, "content.media.")
    if uris and not all(type(uri) is str for uri in uris):
        _refuse("content.media.media_uris is not an array of strings")


_KIND_NAMES: dict[type, str] = {str: "a string", list: "an array", dict: "an object"}


def _optional(members: dict[str, object], name: str, kind: type, path: str = "") -> Any:
    """An optional member; null means the same as absence (R-032, A-004)."""
    value = members.get(name)
    if value is not None and type(value) is not kind:
        _refuse(f"{path}{name} is not {_KIND_NAMES[kind]}")
    return value


def _integer(value: object, name: str) -> int:
    if type(value) is int:
        return value
    # 1760000000.0 and 1760000000 are one number in canonical form.
    if type(value) is float and value.is_integer() and abs(value) <= canonical.MAX_SAFE_INTEGER:
        return int(value)
    _refuse(f"{name} is not an integer")


def _check_expiry(packet: Packet, now: float) -> None:
    # a packet is served up to and including the second `expires_at`, without grace.
    if packet.expires_at is not None and now > packet.expires_at:
        raise InvalidPacket(ErrorCode.PACKET_EXPIRED, "the packet has expired")


def _refuse(reason: str) -> NoReturn:
    raise InvalidPacket(ErrorCode.INVALID_SCHEMA, reason)


def _refuse_size(max_bytes: int) -> NoReturn:
    raise InvalidPacket(ErrorCode.PACKET_TOO_LARGE, f"packet exceeds {max_bytes} bytes", max_bytes=max_bytes)
