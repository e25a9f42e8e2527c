"""Finding a DID document by its hash (R-055).

The order is fixed: first a fresh copy from memory, then the hashes that pointers give, those of the bootstrap
file before those of relay manifests. The bytes for a hash are requested from one store after another. A store
need not be trusted, because bytes with another hash are discarded. A pointer must be trusted: a document
carries no signature (A-021), so its content is trusted in advance only if its hash came from a trusted source
(`Found.is_trusted`). A manifest's pointer is a hint; the author's own packets decide (`protocol.keys`).
"""

from __future__ import annotations

import asyncio
import logging
import ssl as ssl_module
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from strata.protocol.documents import DidDocument, is_document_hash
from strata.protocol.errors import InvalidInput
from strata.relays.peer_timeout import PeerTimeout

__all__ = ["DocumentResolver", "Found", "Hints", "Store", "relay_hints", "relay_store"]

_log = logging.getLogger("strata.resolver")

Store = Callable[[str], Awaitable[bytes | None]]
"""Returns the bytes of the document with this hash, or None. If it raises `OSError`, the next store is asked.
"""

Hints = Callable[[str], Awaitable[Sequence[str]]]
"""Returns the hashes that relays announce for a DID."""

_MAX_POINTERS = 8


@dataclass(frozen=True, slots=True)
class Found:
    """A document, and whether it is trusted."""

    document: DidDocument
    is_trusted: bool
    """Whether its hash came from the bootstrap file, so that it may be an anchor."""


class DocumentResolver:
    """Resolves DIDs to documents and remembers the last `max_documents` of them.

    `pointers` maps DIDs to hashes and is trusted; `manifests` returns, for a DID, the hashes that relays
    announce. A document is fresh for `fresh_interval` seconds. Each store has `timeout` seconds to answer.
    """

    def __init__(
        self,
        *,
        pointers: Mapping[str, str],
        stores: Sequence[Store],
        manifests: Hints | None = None,
        fresh_interval: float = 86_400.0,
        timeout: float = 10.0,
        max_documents: int = 4096,
    ) -> None:
        self._pointers = pointers
        self._stores = stores
        self._manifests = manifests
        self._fresh_interval = fresh_interval
        self._timeout = timeout
        self._max_documents = max_documents
        self._by_hash: OrderedDict[str, DidDocument] = OrderedDict()
        self._resolved: OrderedDict[str, tuple[Found, float]] = OrderedDict()

    async def resolve(self, did: str, *, now: float) -> Found | None:
        """Find the document of `did`, or None. `now` is the time on any steady clock, in seconds.

        If none can be found, returns the last document known, even if it is no longer fresh. Cancelling loses
        nothing. Failures of stores and relays raise nothing.
        """
        known = self._resolved.get(did)
        if known is not None and now - known[1] < self._fresh_interval:
            return known[0]
        trusted = self._pointers.get(did)
        if trusted is not None and (document := await self._fetch(did, trusted)) is not None:
            return self._remember(Found(document, is_trusted=True), now)
        hints = await self._manifests(did) if self._manifests is not None else ()
        for document_hash in hints[:_MAX_POINTERS]:
            if is_document_hash(document_hash) and (document := await self._fetch(did, document_hash)):
                return self._remember(Found(document, is_trusted=False), now)
        return None if known is None else known[0]

    async def _fetch(self, did: str, document_hash: str) -> DidDocument | None:
        """The document with this hash: from memory, or from the first store that has it."""
        document = self._by_hash.get(document_hash)
        if document is not None and document.did == did:
            return document
        for store in self._stores:
            try:
                async with PeerTimeout(self._timeout):
                    raw = await store(document_hash)
            except OSError as error:  # TimeoutError is one
                _log.debug("a store of documents failed: %s", error)
                continue
            if raw is None:
                continue
            try:
                document = DidDocument.parse(raw)
            except InvalidInput as error:
                _log.debug("a store of documents gave something else: %s", error)
                continue
            if document.hash == document_hash and document.did == did:
                self._by_hash[document_hash] = document
                if len(self._by_hash) > self._max_documents:
                    self._by_hash.popitem(last=False)
                return document
            _log.debug("a store of documents gave another document than asked for")
        return None

    def _remember(self, found: Found, now: float) -> Found:
        self._resolved[found.document.did] = (found, now)
        self._resolved.move_to_end(found.document.did)
        if len(self._resolved) > self._max_documents:
            self._resolved.popitem(last=False)
        return found


def relay_hints(url: str, *, ssl: ssl_module.SSLContext | None = None, timeout: float = 5.0) -> Hints:
    """Hints from the manifest of the relay at a ws or wss URL (R-057)."""
    from strata.relays.connection.dialing import tls_context
    from strata.relays.connection.discovery import MANIFEST_PATH, http_get

    async def announced(did: str) -> Sequence[str]:
        try:
            async with PeerTimeout(timeout):
                manifest = _MANIFESTS.decode(await http_get(url, MANIFEST_PATH, ssl=tls_context(url, ssl)))
        except (OSError, EOFError, ValueError, RecursionError):
            return ()
        except (msgspec.MsgspecError, asyncio.LimitOverrunError):
            return ()
        return [pointer.did_doc_hash for pointer in manifest.did_docs if pointer.did == did]

    return announced


class _Pointer(msgspec.Struct):
    did: str
    did_doc_hash: str


class _Manifest(msgspec.Struct):
    did_docs: list[_Pointer] = []


_MANIFESTS = msgspec.json.Decoder(_Manifest)


def relay_store(url: str, *, ssl: ssl_module.SSLContext | None = None) -> Store:
    """The store of documents under `/did-docs/` of the relay at a ws or wss URL (R-058)."""
    # Imported here, because a program that resolves from other stores needs no sockets.
    from strata.relays.connection.dialing import tls_context
    from strata.relays.connection.discovery import http_get

    async def fetch(document_hash: str) -> bytes | None:
        try:
            return await http_get(url, f"/did-docs/{document_hash}", ssl=tls_context(url, ssl))
        except (ValueError, EOFError, asyncio.LimitOverrunError):
            return None

    return fetch
