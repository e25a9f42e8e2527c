"""The contents of identity packets: reading them, checking each field, and writing them (R-071, R-081)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass

from strata.protocol import fields, ids
from strata.protocol import members as _members
from strata.protocol.documents import DidDocument, check_key_id, key_multibase
from strata.protocol.errors import IdentityError
from strata.protocol.members import refuse
from strata.protocol.packets import Packet

__all__ = [
    "IDENTITY_TYPES",
    "KeyEvent",
    "PublishedDocument",
    "RecoveryApproval",
    "Statement",
    "add_content",
    "approval_content",
    "document_content",
    "read_statement",
    "revoke_content",
    "rotate_content",
]

IDENTITY_TYPES = frozenset({"KEY_EVENT", "RECOVERY_APPROVAL", "DID_DOCUMENT"})
"""The content types that make up a chain. DID_DOCUMENT is an addition of this project (decision 7)."""


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """A KEY_EVENT. Members that its `event` does not use are None."""

    event: str
    """`ADD`, `ROTATE`, `REVOKE`, or another word, which has no effect (R-071)."""
    key_id: str
    public_key: bytes | None = None
    valid_from: int | None = None
    valid_until: int | None = None
    revoked_at: int | None = None
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class RecoveryApproval:
    """A RECOVERY_APPROVAL: its signer approves the event with this packet id."""

    target_event: str


@dataclass(frozen=True, slots=True)
class PublishedDocument:
    """A DID_DOCUMENT: its signer publishes this document."""

    document: DidDocument


Statement = KeyEvent | RecoveryApproval | PublishedDocument


def read_statement(packet: Packet) -> Statement:
    """Read the statement of an identity packet.

    Raises `InvalidPacket` (`invalid_schema`) if a member is missing or malformed, and `ValueError` for a
    packet of another type.
    """
    content = packet.content
    match packet.content_type:
        case "KEY_EVENT":
            return _read_key_event(packet.author_id, content)
        case "RECOVERY_APPROVAL":
            return _read_approval(content)
        case "DID_DOCUMENT":
            document = DidDocument.in_packet(content.get("document"), packet.canonical)
            if document.did != packet.author_id:
                refuse("the document is another DID's")
            return PublishedDocument(document)
    raise ValueError(f"{packet.content_type!r} is not an identity packet")


def add_content(
    key_id: str,
    public_key: bytes,
    *,
    valid_from: int,
    valid_until: int | None = None,
    reason: str | None = None,
) -> dict[str, object]:
    """The content of a KEY_EVENT that adds a key."""
    return _event_content(
        "ADD",
        key_id,
        reason,
        public_key_multibase=key_multibase(public_key),
        valid_from=valid_from,
        valid_until=valid_until or 0,
    )


def rotate_content(
    key_id: str,
    public_key: bytes,
    *,
    replaces: str,
    valid_from: int,
    valid_until: int | None = None,
    reason: str | None = None,
) -> dict[str, object]:
    """The content of a KEY_EVENT that replaces a key by another; the old key ends at `valid_from`."""
    return _event_content(
        "ROTATE",
        key_id,
        reason,
        public_key_multibase=key_multibase(public_key),
        valid_from=valid_from,
        valid_until=valid_until or 0,
        replaces=replaces,
    )


def revoke_content(key_id: str, *, revoked_at: int, reason: str | None = None) -> dict[str, object]:
    """The content of a KEY_EVENT that revokes a key permanently."""
    return _event_content("REVOKE", key_id, reason, revoked_at=revoked_at)


def approval_content(target_event: str, *, approved_at: int, note: str | None = None) -> dict[str, object]:
    """The content of a RECOVERY_APPROVAL.

    The packet should have a random `nonce`: a packet's id covers neither its signature nor the signing key,
    so a relay would treat the second of two keys' approvals made in one second as a copy of the first.
    """
    content = {"type": "RECOVERY_APPROVAL", "target_event": target_event, "approved_at": approved_at}
    return content if note is None else content | {"note": note}


def document_content(document: DidDocument) -> dict[str, object]:
    """The content of a DID_DOCUMENT."""
    return {"type": "DID_DOCUMENT", "document": document.value}


def _event_content(event: str, key_id: str, reason: str | None, **members: object) -> dict[str, object]:
    content = {"type": "KEY_EVENT", "event": event, "key_id": key_id, **members}
    return content if reason is None else content | {"reason": reason}


def _read_key_event(did: str, content: dict[str, object]) -> KeyEvent:
    event = _members.text(content, "event")
    key_id = _members.text(content, "key_id")
    check_key_id(did, key_id, None)
    _members.optional_text(content, "reason")
    match event:
        case "ADD":
            return _read_introduction(did, event, key_id, content, replaces=None)
        case "ROTATE":
            replaces = _members.text(content, "replaces")
            return _read_introduction(did, event, key_id, content, replaces=replaces)
        case "REVOKE":
            return KeyEvent(event, key_id, revoked_at=_members.integer(content, "revoked_at"))
    return KeyEvent(event, key_id)


def _read_introduction(
    did: str, event: str, key_id: str, content: dict[str, object], *, replaces: str | None
) -> KeyEvent:
    try:
        public_key = ids.public_key_from_method(None, _members.text(content, "public_key_multibase"))
    except IdentityError as error:
        refuse(str(error))
    check_key_id(did, key_id, public_key)
    valid_from = _members.integer(content, "valid_from")
    valid_until = _members.optional_integer(content, "valid_until") or None
    if valid_until is not None and valid_until < valid_from:
        refuse("valid_until lies before valid_from")
    return KeyEvent(event, key_id, public_key, valid_from, valid_until, replaces=replaces)


def _read_approval(content: dict[str, object]) -> RecoveryApproval:
    target_event = _members.text(content, "target_event")
    if not fields.is_content_id(target_event):
        refuse("target_event is not a packet id")
    _members.integer(content, "approved_at")
    _members.optional_text(content, "note")
    return RecoveryApproval(target_event)
