"""DID Documents: which keys a DID begins with, what each may do, and who may recover it (RFC-0001 §3.2–§3.3).

A document is its canonical bytes, and its name is their hash (R-052). It carries no signature (A-021):
whether it counts depends on where it came from, which `strata.protocol.keys` decides. This module only reads
a document, checks that it is consistent (R-049, R-051), and writes it.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import msgspec
from blake3 import blake3

from strata.protocol import canonical, fields, ids
from strata.protocol import members as _members
from strata.protocol.canonical import DEEPEST
from strata.protocol.errors import IdentityError
from strata.protocol.members import refuse

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "MAX_METHODS",
    "Custody",
    "DidDocument",
    "RecoveryPolicy",
    "VerificationMethod",
    "build_document",
    "check_key_id",
    "document_hash",
    "implicit_genesis",
    "is_document_hash",
    "key_multibase",
    "method_id",
    "published_document",
    "spelled_key",
]

MAX_DOCUMENT_BYTES = 65_536
"""The longest document accepted, in bytes of its canonical form."""

MAX_METHODS = 16
"""How many signing methods, and how many recovery methods, one document may list.

A signature that names no key is tried with every live one (R-066), so a bound on keys bounds the cost of a
stranger's packet.
"""

Custody = Literal["hardware", "wrapped", "software", "unknown"]
"""Where a private key is kept (R-091)."""

_METHOD_TYPE = "Ed25519VerificationKey2020"
_CUSTODIES = frozenset({"hardware", "wrapped", "software", "unknown"})
_MULTIHASH_BLAKE3 = b"\x1e\x20"
_is_document_hash = re.compile(r"z[1-9A-HJ-NP-Za-km-z]{44,48}").fullmatch
_MAX_KEY_ID_CHARACTERS = ids.MAX_DID_CHARACTERS + 128


@dataclass(frozen=True, slots=True)
class VerificationMethod:
    """One key of a document. Times are Unix seconds; None means no end."""

    key_id: str
    public_key: bytes
    valid_from: int
    valid_until: int | None = None
    revoked_at: int | None = None
    recovery: bool = False
    """Whether `usage` is `recovery`: such a key signs recovery packets and nothing else (R-080)."""
    custody: Custody = "unknown"
    """Where its holder says the private key is kept (R-091)."""

    def encode(self, did: str) -> dict[str, object]:
        """The method as a member of the document of `did`, with both spellings of its key."""
        members: dict[str, object] = {
            "id": self.key_id,
            "type": _METHOD_TYPE,
            "controller": did,
            "public_key_hex": f"0x{self.public_key.hex()}",
            "public_key_multibase": key_multibase(self.public_key),
            "valid_from": self.valid_from,
            "valid_until": self.valid_until or 0,
        }
        if self.revoked_at is not None:
            members["revoked_at"] = self.revoked_at
        if self.recovery:
            members["usage"] = "recovery"
        if self.custody != "unknown":
            members["custody"] = self.custody
        return members


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """How many recovery keys must agree, and which.

    A policy that makes no sense is kept as it is, because the rest of its document is still valid: the key
    chain refuses the events that would need the policy (R-085).
    """

    threshold: int | None
    """How many distinct eligible keys must approve; None if the document does not have an integer here."""
    key_ids: tuple[str, ...] = ()
    """The eligible keys; if empty, every recovery key of the document."""

    def encode(self) -> dict[str, object]:
        """The policy as a member of a document."""
        return {"threshold": self.threshold, "key_ids": list(self.key_ids)}


@dataclass(frozen=True, slots=True, eq=False)
class DidDocument:
    """A document whose form has been checked. Documents are equal if their canonical bytes are equal."""

    canonical: bytes
    """The document in canonical form, as it is hashed, stored and served."""
    hash: str
    """The `did_doc_hash` (R-052)."""
    did: str
    created_at: int
    prev_hash: str | None
    """The hash of the document that this one succeeds; None for the first."""
    methods: tuple[VerificationMethod, ...]
    authentication: tuple[str, ...] | None
    """The ids of the keys that may answer AUTH; None means every signing key (R-061, A-023)."""
    assertion: tuple[str, ...] | None
    """The ids of the keys that may sign packets; None means every signing key (R-061, A-023)."""
    recovery_policy: RecoveryPolicy | None

    @classmethod
    def parse(cls, raw: bytes) -> DidDocument:
        """Read a document from JSON text. Raises `InvalidPacket` with `invalid_schema`."""
        value, text = canonical.parse(raw, max_depth=DEEPEST)
        return _read(value, text)

    @classmethod
    def from_value(cls, value: object) -> DidDocument:
        """Read a decoded document. Raises as `parse` does."""
        return _read(value, canonical.encode(value, max_depth=DEEPEST))

    @classmethod
    def in_packet(cls, value: object, packet_text: bytes) -> DidDocument:
        """Read the document of a DID_DOCUMENT packet: `value` is the decoded document, of which the members
        that no reader knows may be absent, and `packet_text` the packet's canonical text.

        Raises as `parse` does.
        """
        return _read(value, published_document(packet_text))

    @property
    def value(self) -> dict[str, object]:
        """The document, decoded again on each access, with its unknown members."""
        return cast(dict[str, object], canonical.parse(self.canonical, max_depth=DEEPEST)[0])

    def method_of(self, public_key: bytes) -> VerificationMethod | None:
        """The method with this key, or None."""
        return next((method for method in self.methods if method.public_key == public_key), None)

    def may_authenticate(self, method: VerificationMethod) -> bool:
        """Whether a method of this document may answer AUTH."""
        return not method.recovery and _is_listed(method, self.authentication)

    def may_assert(self, method: VerificationMethod) -> bool:
        """Whether a method of this document may sign packets."""
        return not method.recovery and _is_listed(method, self.assertion)

    def __eq__(self, other: object) -> bool:
        return self.canonical == other.canonical if isinstance(other, DidDocument) else NotImplemented

    def __hash__(self) -> int:
        return self.canonical.__hash__()

    def __repr__(self) -> str:
        return f"DidDocument({self.did}, {self.hash})"


def implicit_genesis(did: str, public_key: bytes | None = None) -> DidDocument | None:
    """The document that a self-certifying DID has before it publishes one (R-060, A-020).

    Its only key is `public_key` if an operator has configured one (R-047), else the key in the DID; it is
    valid from 0, without end, for everything. None if there is neither. The document is never published, so
    its hash names nothing.
    """
    key = public_key or ids.public_key_from_did(did)
    if key is None:
        return None
    return build_document(did, [VerificationMethod(method_id(did), key, valid_from=0)], created_at=0)


def build_document(
    did: str,
    methods: Iterable[VerificationMethod],
    *,
    created_at: int,
    previous: DidDocument | None = None,
    authentication: Iterable[str] | None = None,
    assertion: Iterable[str] | None = None,
    recovery_policy: RecoveryPolicy | None = None,
    extra: Mapping[str, object] | None = None,
) -> DidDocument:
    """Write a document, as the successor of `previous` if that is given.

    None for `authentication` or `assertion` omits the array, so that every signing key counts. `extra` adds
    members such as services. Raises `InvalidPacket` for a document that a reader would refuse.
    """
    value: dict[str, object] = dict(extra or {})
    value |= {
        "id": did,
        "verification_method": [method.encode(did) for method in methods],
        "created_at": created_at,
        "prev_did_doc_hash": previous.hash if previous else None,
    }
    if authentication is not None:
        value["authentication"] = list(authentication)
    if assertion is not None:
        value["assertion"] = list(assertion)
    if recovery_policy is not None:
        value["recovery_policy"] = recovery_policy.encode()
    return DidDocument.from_value(value)


def document_hash(canonical_document: bytes) -> str:
    """The multibase multihash of a document's canonical bytes (R-052)."""
    return "z" + ids.base58_encode(_MULTIHASH_BLAKE3 + blake3(canonical_document).digest())


class _Content(msgspec.Struct):
    document: msgspec.Raw = msgspec.Raw(b"null")


class _Packet(msgspec.Struct):
    content: _Content


_PACKET = msgspec.json.Decoder(_Packet)


def published_document(packet_text: bytes) -> bytes:
    """The document in the canonical text of a DID_DOCUMENT packet, or `null` if it has none.

    A part of a canonical text is itself canonical. Decoding and encoding it again would take a hundred times
    as long, and strangers may request it.
    """
    return bytes(_PACKET.decode(packet_text).content.document)


def is_document_hash(text: str) -> bool:
    """Whether `text` is a BLAKE3 multihash in base58btc multibase; hex does not count (R-052, A-010)."""
    if _is_document_hash(text) is None:
        return False
    decoded = ids.base58_decode(text[1:])
    return len(decoded) == 34 and decoded.startswith(_MULTIHASH_BLAKE3)


def method_id(did: str, fragment: str = "keys-1") -> str:
    """The id of a key of `did`."""
    return f"{did}#{fragment}"


def key_multibase(public_key: bytes) -> str:
    """The multibase text of a public key: the part after `did:strata:` in its DID."""
    return ids.did_from_public_key(public_key).removeprefix("did:strata:")


def check_key_id(did: str, key_id: str, public_key: bytes | None) -> None:
    """Refuse an id that does not belong to this DID, or that spells a different key than `public_key`.

    `<did>#<multibase>` names the key that it spells (R-060), so it cannot be the id of a different key.
    """
    prefix = did + "#"
    if not key_id.startswith(prefix) or not len(prefix) < len(key_id) <= _MAX_KEY_ID_CHARACTERS:
        refuse("a key id is not the DID, # and a name")
    if public_key is not None:
        spelled = spelled_key(key_id)
        if spelled is not None and spelled != public_key:
            refuse("a key id spells a different key")


def spelled_key(key_id: str) -> bytes | None:
    """The key that the fragment of `key_id` spells, if it spells one."""
    try:
        return ids.public_key_from_method(None, key_id.partition("#")[2])
    except IdentityError:
        return None


def _read(value: object, text: bytes) -> DidDocument:
    if type(value) is not dict:
        refuse("a DID document is a JSON object")
    if len(text) > MAX_DOCUMENT_BYTES:
        refuse(f"a DID document exceeds {MAX_DOCUMENT_BYTES} bytes")
    did = _members.text(value, "id")
    if not ids.is_did(did):
        refuse("the document's id is not a DID")
    prev_hash = _members.optional_text(value, "prev_did_doc_hash")
    if prev_hash is not None and not is_document_hash(prev_hash):
        refuse("prev_did_doc_hash is not a multihash in base58btc")
    document = DidDocument(
        canonical=text,
        hash=document_hash(text),
        did=did,
        created_at=_members.integer(value, "created_at"),
        prev_hash=prev_hash,
        methods=_read_methods(did, value.get("verification_method")),
        authentication=_read_key_ids(did, value, "authentication"),
        assertion=_read_key_ids(did, value, "assertion"),
        recovery_policy=_read_recovery_policy(value.get("recovery_policy")),
    )
    own_key = ids.public_key_from_did(did)
    if prev_hash is None and own_key is not None and document.method_of(own_key) is None:
        refuse("the first document of a self-certifying DID lacks the DID's own key")
    return document


def _read_methods(did: str, listed: object) -> tuple[VerificationMethod, ...]:
    if type(listed) is not list or not listed:
        refuse("a document without verification_method")
    methods = tuple(_read_method(did, members) for members in listed)
    recovery_count = sum(method.recovery for method in methods)
    if recovery_count > MAX_METHODS or len(methods) - recovery_count > MAX_METHODS:
        refuse(f"a document lists more than {MAX_METHODS} methods of a kind")
    if len({method.key_id for method in methods}) < len(methods):
        refuse("two methods have one id")
    # With one key in two roles, it would be unclear what a signature by that key may do.
    if len({method.public_key for method in methods}) < len(methods):
        refuse("two methods have one key")
    return methods


def _read_method(did: str, members: object) -> VerificationMethod:
    if type(members) is not dict:
        refuse("verification_method is not an array of objects")
    if _members.text(members, "type") != _METHOD_TYPE:
        refuse("a method's type is not known here")
    if _members.text(members, "controller") != did:
        refuse("a method's controller is not the DID")
    try:
        public_key = ids.public_key_from_method(
            _members.optional_text(members, "public_key_hex"),
            _members.optional_text(members, "public_key_multibase"),
        )
    except IdentityError as error:
        refuse(str(error))
    key_id = _members.text(members, "id")
    check_key_id(did, key_id, public_key)
    custody = _members.optional_text(members, "custody")
    return VerificationMethod(
        key_id=key_id,
        public_key=public_key,
        valid_from=_members.integer(members, "valid_from"),
        valid_until=_members.optional_integer(members, "valid_until") or None,
        revoked_at=_members.optional_integer(members, "revoked_at"),
        recovery=_members.optional_text(members, "usage") == "recovery",
        custody=cast(Custody, custody) if custody in _CUSTODIES else "unknown",
    )


def _read_key_ids(did: str, value: dict[str, object], name: str) -> tuple[str, ...] | None:
    key_ids = _members.optional_texts(value, name)
    for key_id in key_ids or ():
        check_key_id(did, key_id, None)
    return key_ids


def _read_recovery_policy(value: object) -> RecoveryPolicy | None:
    if value is None:
        return None
    if type(value) is not dict:
        return RecoveryPolicy(threshold=None)
    key_ids = value.get("key_ids")
    if key_ids is not None and not (type(key_ids) is list and all(type(key_id) is str for key_id in key_ids)):
        return RecoveryPolicy(threshold=None)
    return RecoveryPolicy(fields.integer(value.get("threshold")), tuple(key_ids or ()))


def _is_listed(method: VerificationMethod, key_ids: tuple[str, ...] | None) -> bool:
    if key_ids is None:
        return True
    return any(key_id == method.key_id or spelled_key(key_id) == method.public_key for key_id in key_ids)
