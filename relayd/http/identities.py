"""The state of a DID, over HTTP (additive, decision A-022, R-058).

    /did/{did}                 its current document and the document's hash, its keys with their standing,
    its chain /did-docs/{did_doc_hash}   one document, as its canonical bytes

What this relay does not serve on any other path, it does not serve here: packets that are declined (R-323) or
expired (R-100) are left out, and so is a document that came in such a packet.

A reader need not trust the answer: the packets of the chain are signed, documents are named by their hash,
and `strata.protocol.keys` derives the same results from them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from urllib.parse import unquote

import msgspec
from strata.protocol.documents import DidDocument, document_hash, is_document_hash, published_document
from strata.protocol.equivalence import document_key
from strata.protocol.ids import base58_decode, is_did
from strata.protocol.keys import KeyChain, KeyState
from strata.protocol.packets import Packet

from relayd.identity.bootstrap import BootstrapContents
from relayd.identity.directory import Identities
from relayd.responses import JSON, Response, error_response, json_response, kept_for
from relayd.store.declined import covers
from relayd.store.payers import NOBODY, Asker, Payer
from relayd.store.types import Declined, NewPacket, StoredPacket, StoreError

__all__ = ["IdentityApi"]

_BRIEFLY: Final = 10
_A_MINUTE: Final = 60
"""In seconds. The bytes behind a hash never change, but whether they are served may change."""
_MULTIHASH_BYTES: Final = 2
_MAX_EVENTS_BYTES: Final = 2**20
"""The most bytes of packets in one answer. A longer chain, older than the limit, is read by SUBSCRIBE."""


class IdentityApi:
    """`by_key` finds a published document; `declined` covers packets that are not served (R-323)."""

    def __init__(
        self,
        identities: Identities,
        bootstrap: BootstrapContents,
        *,
        by_key: Callable[[bytes, Payer | None], Awaitable[StoredPacket | None]],
        declined: Callable[[], Declined],
        clock: Callable[[], int],
    ) -> None:
        self._identities = identities
        self._configured = {
            document.hash: document for documents in bootstrap.documents.values() for document in documents
        }
        self._by_key = by_key
        self._declined = declined
        self._clock = clock

    async def respond(self, path: str, asker: Asker = NOBODY) -> Response | None:
        """Answer a path of this API at the expense of `asker`, or return None.

        Cancelling it cancels any read under way, except that of a chain.
        """
        try:
            if path.startswith("/did/"):
                return await self._did(unquote(path.removeprefix("/did/")), asker)
            if path.startswith("/did-docs/"):
                return await self._document(path.removeprefix("/did-docs/"), asker.payer)
        except StoreError:
            return error_response(503, "unavailable", "the store did not answer")
        return None

    async def _did(self, did: str, asker: Asker) -> Response:
        if not is_did(did):
            return error_response(400, "invalid_did", "the path does not name a DID")
        if did in self._declined().authors:
            return _refused()
        chain = await self._identities.resolve(did, asker, in_turn=False)
        if did in self._declined().authors:  # banned meanwhile
            return _refused()
        if not chain.is_resolvable and not chain.events:
            return error_response(404, "not_found", "nothing is known of this DID here")
        served, now = self._served(chain), self._clock()
        ends = min((packet.expires_at for packet, _ in served if packet.expires_at is not None), default=None)
        described = _described(chain, self._head(chain), served, now)
        return json_response(200, described, kept_for(_BRIEFLY, ends, now))

    async def _document(self, text: str, payer: Payer | None) -> Response:
        if not is_document_hash(text):
            return error_response(400, "invalid_did_doc_hash", "a document's hash is a BLAKE3 multihash")
        if (configured := self._configured.get(text)) is not None:
            return Response(200, JSON, configured.canonical, kept_for(_A_MINUTE, None, 0))
        digest = base58_decode(text[1:])[_MULTIHASH_BYTES:]
        row = await self._by_key(document_key(digest), payer)
        if row is None:
            return error_response(404, "not_found", "no document with this hash is known here")
        packet = _stored(row.body)
        if not self._is_served(packet):
            return error_response(410, "gone", "the document has expired or was removed")
        document = published_document(row.body)
        assert document_hash(document) == text
        return Response(200, JSON, document, kept_for(_A_MINUTE, packet.expires_at, self._clock()))

    def _is_served(self, packet: NewPacket) -> bool:
        if packet.expires_at is not None and packet.expires_at < self._clock():
            return False
        declined = self._declined()
        return not declined or not covers(declined, packet)

    def _head(self, chain: KeyChain) -> DidDocument | None:
        """The current document, unless it came only in packets that are not served."""
        head = chain.head
        brought = [] if head is None else [packet for packet, _ in chain.events if _brought(packet, head)]
        is_shown = not brought or any(self._is_served(_as_stored(packet)) for packet in brought)
        return head if is_shown else None

    def _served(self, chain: KeyChain) -> list[tuple[Packet, int]]:
        """The packets of the chain that may be shown; only the first ones if there are too many."""
        served, size = [], 0
        for packet, received_at in chain.events:
            size += packet.size_bytes
            if size > _MAX_EVENTS_BYTES:
                break
            if self._is_served(_as_stored(packet)):
                served.append((packet, received_at))
        return served


def _refused() -> Response:
    return error_response(410, "gone", "this relay serves nothing of this DID")


def _as_stored(packet: Packet) -> NewPacket:
    return NewPacket(
        packet.digest,
        packet.author_id,
        packet.content_type,
        packet.timestamp,
        packet.expires_at,
        packet.canonical,
    )


def _brought(packet: Packet, document: DidDocument) -> bool:
    return (
        packet.content_type == "DID_DOCUMENT" and published_document(packet.canonical) == document.canonical
    )


class _Content(msgspec.Struct):
    type: str


class _Packet(msgspec.Struct):
    packet_id: str
    author_id: str
    timestamp: int
    content: _Content
    expires_at: int | None = None


_PACKET: Final = msgspec.json.Decoder(_Packet)


def _stored(body: bytes) -> NewPacket:
    """A stored packet, reduced to what decides whether it is served."""
    packet = _PACKET.decode(body)
    return NewPacket(
        bytes.fromhex(packet.packet_id[2:]),
        packet.author_id,
        packet.content.type,
        packet.timestamp,
        packet.expires_at,
        body,
    )


def _described(
    chain: KeyChain, head: DidDocument | None, served: Sequence[tuple[Packet, int]], at: int
) -> dict[str, object]:
    pending = chain.pending(at)
    return {
        "did": chain.did,
        "did_doc_hash": None if head is None else head.hash,
        "document": None if head is None else msgspec.Raw(head.canonical),
        "conflict": chain.conflict,
        "keys": [_key(key, chain, at) for key in chain.keys(at)],
        "events": [
            {
                "packet": msgspec.Raw(packet.canonical),
                "received_at": received_at,
                "pending": packet.packet_id in pending,
            }
            for packet, received_at in served
        ],
        "events_omitted": len(chain.events) - len(served),
    }


def _key(key: KeyState, chain: KeyChain, at: int) -> dict[str, object]:
    return {
        "key_id": key.key_id,
        "public_key": f"0x{key.public_key.hex()}",
        "standing": key.standing(at, chain.rules.clock_skew_seconds).value,
        "valid_from": key.valid_from,
        "valid_until": key.valid_until or 0,
        "revoked_at": key.revoked_at,
        "usage": "recovery" if key.recovery else "signing",
    }
