"""The effect of a document on the keys of a DID: their roles, and windows that only shrink (R-061, R-065)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from strata.protocol.documents import DidDocument, VerificationMethod, key_multibase, method_id
from strata.protocol.keys.states import KeyState

__all__ = ["earlier", "under_document"]


def under_document(
    keys: Mapping[bytes, KeyState], document: DidDocument, *, introduced_by: str | None
) -> dict[bytes, KeyState]:
    """The keys after `document` has become the newest, by public key and in order of introduction.

    `introduced_by` is the packet that published it. None means that an operator vouches for the document: it
    then determines everything about its keys, except that a revocation is never undone.
    """
    after: dict[bytes, KeyState] = {}
    ids_given = {method.key_id for method in document.methods}
    for public_key, key in keys.items():
        method = document.method_of(public_key)
        if method is None:
            after[public_key] = _unlisted(key, document.did, ids_given)
        elif introduced_by is None:
            revoked_at = earlier(key.revoked_at, method.revoked_at)
            after[public_key] = replace(_introduced(method, document, None), revoked_at=revoked_at)
        else:
            after[public_key] = _merged(key, method, document)
    for method in document.methods:
        if method.public_key not in after:
            after[method.public_key] = _introduced(method, document, introduced_by)
    return after


def earlier(one: int | None, other: int | None) -> int | None:
    """The earlier of two ends; None means no end."""
    ends = [end for end in (one, other) if end is not None]
    return min(ends) if ends else None


def _introduced(method: VerificationMethod, document: DidDocument, introduced_by: str | None) -> KeyState:
    """The initial state of a document's method, with the method's own window (R-065)."""
    return KeyState(
        method.key_id,
        method.public_key,
        method.valid_from,
        method.valid_until,
        method.revoked_at,
        method.recovery,
        method.custody,
        document.may_authenticate(method),
        document.may_assert(method),
        introduced_by,
    )


def _unlisted(key: KeyState, did: str, ids_given: set[str]) -> KeyState:
    """A key that a new head does not list. It no longer belongs to the DID, but is kept to explain old
    signatures.

    If the document gives its id to another key, its id becomes the one that spells it.
    """
    key_id = method_id(did, key_multibase(key.public_key)) if key.key_id in ids_given else key.key_id
    return replace(key, key_id=key_id, authentication=False, assertion=False, recovery=False)


def _merged(key: KeyState, method: VerificationMethod, document: DidDocument) -> KeyState:
    """A known key that a new head lists: its role is the document's, and its window only shrinks."""
    return replace(
        key,
        key_id=method.key_id,
        valid_from=max(key.valid_from, method.valid_from),
        valid_until=earlier(key.valid_until, method.valid_until),
        revoked_at=earlier(key.revoked_at, method.revoked_at),
        recovery=method.recovery,
        custody=method.custody,
        authentication=document.may_authenticate(method),
        assertion=document.may_assert(method),
    )
