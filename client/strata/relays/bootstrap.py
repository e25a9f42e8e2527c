"""The bootstrap file: the relays and identities that a client knows at the start (R-347, R-055).

One JSON object. Every member is optional, and unknown members are ignored, so that a relay and its clients
can use the same file:

    relays              where to start: `ws` or `wss` URLs, or relay URIs in either form (`relays.uris`); an
                        object may add `relay_id`, the DID that the relay must show before AUTH (R-298)
    did_documents       DID documents, trusted as they are (A-021)
    did_docs            `{"did": …, "did_doc_hash": …}`: documents to fetch, trusted by their hash
    keys                DID → Ed25519 key in base58btc multibase, for DIDs without a document (R-048)
    clock_skew_seconds  60 to 300; anything else counts as 300 (R-064)

A JSON array means an object with only `relays`. This module does not use the network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from strata.protocol import canonical, ids
from strata.protocol.documents import DidDocument, is_document_hash
from strata.protocol.errors import IdentityError, InvalidInput
from strata.protocol.keys import DEFAULT_CLOCK_SKEW_SECONDS, KeyRules, allowed_clock_skew
from strata.protocol.text_files import utf8_of
from strata.relays import uris
from strata.relays.connection.keyring import Anchors

__all__ = ["Bootstrap", "KnownRelay", "parse_bootstrap", "read_bootstrap"]

_MAX_BYTES = 16 * 2**20

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class KnownRelay:
    """A relay to start from."""

    url: str
    """Its ws or wss URL."""
    relay_id: str | None = None
    """The DID that it must show before its challenge is signed (`Options.relay_id`); None if unknown."""
    label: str | None = None
    """A name to show."""


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The content of the file; by default nothing is known."""

    relays: tuple[KnownRelay, ...] = ()
    documents: Mapping[str, tuple[DidDocument, ...]] = field(default_factory=dict)
    keys: Mapping[str, bytes] = field(default_factory=dict)
    pointers: Mapping[str, str] = field(default_factory=dict)
    """DID → the hash of its document, which must be fetched (`strata.relays.resolver`)."""
    clock_skew_seconds: int = DEFAULT_CLOCK_SKEW_SECONDS

    def anchors(self, *fetched: DidDocument) -> Anchors:
        """The identities trusted in advance, for `strata.connect(anchors=…)`.

        `fetched` are the documents that `pointers` names, as found by a resolver.
        """
        documents = dict(self.documents)
        for document in fetched:
            known = documents.get(document.did, ())
            if document not in known:
                documents[document.did] = (*known, document)
        return Anchors(documents, self.keys, KeyRules(clock_skew_seconds=self.clock_skew_seconds))


def read_bootstrap(path: str | os.PathLike[str]) -> Bootstrap:
    """Read the file. Raises `OSError`, and `ValueError` that names the first fault in the file."""
    with Path(path).open("rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    try:
        return parse_bootstrap(raw)
    except ValueError as error:
        raise ValueError(f"{Path(path)}: {error}") from None


def parse_bootstrap(raw: bytes) -> Bootstrap:
    """Parse the content of a bootstrap file. Raises `ValueError` that names the first fault."""
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES} bytes")
    raw = utf8_of(raw)
    try:
        members = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ValueError("not JSON") from None
    if type(members) is list:
        members = {"relays": members}
    if type(members) is not dict:
        raise ValueError("not a JSON object")
    skew = members.get("clock_skew_seconds")
    return Bootstrap(
        relays=_each("relays", _list(members, "relays"), _relay),
        documents=_documents(_list(members, "did_documents")),
        keys=_keys(members.get("keys")),
        pointers=dict(_each("did_docs", _list(members, "did_docs"), _pointer)),
        clock_skew_seconds=allowed_clock_skew(skew if type(skew) is int else DEFAULT_CLOCK_SKEW_SECONDS),
    )


def _list(members: Mapping[str, object], name: str) -> list[object]:
    value = members.get(name)
    if value is None:
        return []
    if type(value) is not list:
        raise ValueError(f"{name} is not a list")
    return value


def _each(name: str, items: Sequence[object], read: Callable[[object], _Read]) -> tuple[_Read, ...]:
    """Read every item; an error says which item is bad."""
    found = []
    for number, item in enumerate(items):
        try:
            found.append(read(item))
        except (ValueError, InvalidInput) as error:
            reason = error.reason if isinstance(error, InvalidInput) else error
            raise ValueError(f"{name}[{number}]: {reason}") from None
    return tuple(found)


def _relay(item: object) -> KnownRelay:
    relay_id = item.get("relay_id") if type(item) is dict else None
    if relay_id is not None and not (type(relay_id) is str and ids.is_did(relay_id)):
        raise ValueError("relay_id is not a DID")
    text = msgspec.json.encode(item).decode() if type(item) is dict else item
    if type(text) is not str:
        raise ValueError("neither a URL nor an object")
    if uris.is_relay_uri(text):
        proposal = uris.parse(text)
        return KnownRelay(proposal.ws, relay_id, proposal.label)
    if urlsplit(text).scheme not in ("ws", "wss") or not urlsplit(text).hostname:
        raise ValueError("not a ws or wss URL")
    return KnownRelay(text)


def _documents(items: Sequence[object]) -> dict[str, tuple[DidDocument, ...]]:
    documents: dict[str, tuple[DidDocument, ...]] = {}
    for document in _each("did_documents", items, lambda item: DidDocument.parse(canonical.encode(item))):
        documents[document.did] = (*documents.get(document.did, ()), document)
    return documents


def _pointer(item: object) -> tuple[str, str]:
    members = item if type(item) is dict else {}
    did, document_hash = members.get("did"), members.get("did_doc_hash")
    if type(did) is not str or not ids.is_did(did):
        raise ValueError("did is not a DID")
    if type(document_hash) is not str or not is_document_hash(document_hash):
        raise ValueError("did_doc_hash is not the multihash of a document")
    return did, document_hash


def _keys(members: object) -> dict[str, bytes]:
    if members is None:
        return {}
    if type(members) is not dict:
        raise ValueError("keys is not an object")
    keys = {}
    for did, text in members.items():
        try:
            if not ids.is_did(did) or type(text) is not str:
                raise IdentityError("not a DID and the text of a key")
            keys[did] = ids.public_key_from_method(None, text)
        except IdentityError as error:
            raise ValueError(f"keys: {did}: {error}") from None
    return keys
