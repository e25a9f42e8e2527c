"""Documents by their hash: the order of R-055, and stores that lie, fail or never answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from strata.protocol.documents import DidDocument, VerificationMethod, build_document, method_id
from strata.protocol.ids import Identity
from strata.relays.resolver import DocumentResolver, Found, Hints, relay_hints, relay_store

DID = "did:strata:relay_1"
Log = list[tuple[str, str]]
"""Which store was asked, and for what."""


def document(n: int = 0, did: str = DID) -> DidDocument:
    key = Identity.from_seed(bytes([n]) * 32).public_key
    return build_document(did, [VerificationMethod(method_id(did), key, 0)], created_at=n)


class Source:
    """A store that records what it was asked."""

    def __init__(
        self, log: Log, name: str, *documents: DidDocument, answer: bytes | Exception | None = None
    ) -> None:
        self.log, self.name, self.answer = log, name, answer
        self.documents = {d.hash: d.canonical for d in documents}

    async def __call__(self, document_hash: str) -> bytes | None:
        self.log.append((self.name, document_hash))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.documents.get(document_hash) if self.answer is None else self.answer


def manifests(log: Log, *hashes: str) -> Hints:
    async def announced(did: str) -> tuple[str, ...]:
        log.append(("manifests", did))
        return hashes

    return announced


@pytest.mark.req("R-055")
async def test_the_order_is_cache_pointers_stores():
    log, wanted, hinted = Log(), document(1), document(2)
    one, two = Source(log, "one"), Source(log, "two", wanted, hinted)
    resolver = DocumentResolver(
        pointers={DID: wanted.hash},
        stores=[one, two],
        manifests=manifests(log, hinted.hash),
        fresh_interval=100,
    )
    found = Found(wanted, is_trusted=True)
    assert await resolver.resolve(DID, now=0) == found
    assert log == [("one", wanted.hash), ("two", wanted.hash)], (
        "a manifest is not asked where a pointer holds"
    )
    log.clear()
    assert await resolver.resolve(DID, now=99) == found and log == [], "a fresh copy is at hand"
    assert await resolver.resolve(DID, now=101) == found and log == [], "and its hash still names it"


@pytest.mark.req("R-055")
async def test_a_manifest_hints_where_no_pointer_holds_and_is_not_trusted():
    log, hinted = Log(), document(2)
    resolver = DocumentResolver(
        pointers={}, stores=[Source(log, "one", hinted)], manifests=manifests(log, "0xno", hinted.hash)
    )
    assert await resolver.resolve(DID, now=0) == Found(hinted, is_trusted=False)
    assert log == [("manifests", DID), ("one", hinted.hash)]


@pytest.mark.req("R-055")
async def test_a_copy_grown_old_is_better_than_none():
    log, hinted = Log(), document(2)
    hashes = [hinted.hash]

    async def announced(did):
        return tuple(hashes)

    resolver = DocumentResolver(
        pointers={}, stores=[Source(log, "one", hinted)], manifests=announced, fresh_interval=10
    )
    found = await resolver.resolve(DID, now=0)
    hashes.clear()
    assert await resolver.resolve(DID, now=50) is found


@pytest.mark.req("R-055")
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b"\xff",
        document(3).canonical,
        document(1, "did:strata:relay_2").canonical,
        OSError("gone"),
    ],
    ids=["nothing", "no document", "no text", "another one", "another's", "failure"],
)
async def test_a_store_that_gives_something_else_is_passed_over(answer):
    log, wanted = Log(), document(1)
    stores = [Source(log, "bad", answer=answer), Source(log, "good", wanted)]
    resolver = DocumentResolver(pointers={DID: wanted.hash}, stores=stores)
    assert await resolver.resolve(DID, now=0) == Found(wanted, is_trusted=True)
    assert [name for name, _ in log] == ["bad", "good"]


async def test_a_silent_store_is_not_waited_for():
    async def silent(document_hash):
        await asyncio.Event().wait()

    wanted = document(1)
    resolver = DocumentResolver(
        pointers={DID: wanted.hash}, stores=[silent, Source(Log(), "good", wanted)], timeout=0.01
    )
    found = await resolver.resolve(DID, now=0)
    assert found is not None and found.document == wanted


async def test_what_nobody_knows_is_none():
    assert await DocumentResolver(pointers={}, stores=[]).resolve(DID, now=0) is None
    nowhere = DocumentResolver(pointers={DID: document(1).hash}, stores=[Source(Log(), "empty")])
    assert await nowhere.resolve(DID, now=0) is None


async def test_memory_is_bounded():
    documents = [document(n, f"did:strata:r{n}") for n in range(5)]
    log = Log()
    resolver = DocumentResolver(
        pointers={d.did: d.hash for d in documents},
        stores=[Source(log, "one", *documents)],
        max_documents=2,
    )
    for d in documents:
        found = await resolver.resolve(d.did, now=0)
        assert found is not None and found.document == d
    log.clear()
    await resolver.resolve(documents[0].did, now=0)
    assert len(log) == 1, "forgotten and found again"
    assert isinstance(documents[0], DidDocument)


async def test_a_manifest_points_to_documents(plain):
    pointers = [{"did": DID, "did_doc_hash": "zabc"}, {"did": "did:strata:x", "did_doc_hash": "zdef"}]
    for body, expected in [
        (json.dumps({"did_docs": pointers}).encode(), ["zabc"]),
        (b'{"did_docs": 7}', []),
        (b"no", []),
        (b'{"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}", []),
        (None, []),
    ]:
        plain.manifest_body = body
        assert list(await relay_hints(plain.url)(DID)) == expected


async def test_a_relay_without_documents_is_an_empty_store(plain):
    assert await relay_store(plain.url)(document(1).hash) is None
