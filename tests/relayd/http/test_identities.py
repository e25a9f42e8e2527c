"""`/did/…` and `/did-docs/…`: what a reader gets, and can check itself."""

from __future__ import annotations

import json
import sys
from types import FrameType

import pytest
from strata.protocol import canonical, packets
from strata.protocol.documents import DidDocument, VerificationMethod, build_document, method_id
from strata.protocol.equivalence import equivalence_key
from strata.protocol.ids import Identity
from strata.protocol.keys import KeyChain, KeyRules, add_content, document_content
from strata.protocol.packets import Packet

from relayd.http.identities import IdentityApi
from relayd.identity.bootstrap import BootstrapContents
from relayd.identity.directory import Identities
from relayd.store.identities import AuthorsPage
from relayd.store.types import Declined, LogEntry, NewPacket, StoredPacket, StoreUnavailable
from tests.support.alice import ALICE as ALICE_DID
from tests.support.alice import T, key_id, publish, rotate, with_recovery

NOW = 1_760_000_000
ALICE, BOB = (Identity(bytes([n]) * 32) for n in (1, 2))
NAMED = "did:strata:relay_1"


def document_of(who: Identity, did: str) -> DidDocument:
    return build_document(did, [VerificationMethod(method_id(did), who.public_key, 0)], created_at=0)


class Log:
    def __init__(self) -> None:
        self.by_key: dict[bytes, StoredPacket] = {}
        self.down = False

    async def authors(self, type_, after=0):
        return AuthorsPage(set(), None)

    async def packets_of(self, authors, types, **_):
        return []

    async def find(self, key: bytes, *_):
        if self.down:
            raise StoreUnavailable("down")
        return self.by_key.get(key)


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def declined():
    return {"now": Declined()}


@pytest.fixture
def api(log, declined):
    bootstrap = BootstrapContents(documents={NAMED: (document_of(BOB, NAMED),)})
    identities = Identities(log, bootstrap, KeyRules())
    event = packets.build(
        ALICE, add_content(method_id(ALICE.did, "keys-2"), BOB.public_key, valid_from=NOW), timestamp=NOW
    )
    published = packets.build(ALICE, document_content(document_of(ALICE, ALICE.did)), timestamp=NOW)
    for sequence, packet in enumerate((published, event), 1):
        new = NewPacket(packet.digest, packet.author_id, packet.content_type, NOW, None, packet.canonical)
        identities.observe([LogEntry(sequence, NOW, new)])
    key = equivalence_key(published)
    assert key is not None
    log.by_key[key] = StoredPacket(1, NOW, published.canonical)
    return IdentityApi(
        identities, bootstrap, by_key=log.find, declined=lambda: declined["now"], clock=lambda: NOW
    )


async def get(api, path):
    answer = await api.respond(path)
    return answer.status, json.loads(answer.body)


@pytest.mark.req("R-058")
async def test_a_chain_can_be_verified_from_the_answer_alone(api):
    status, body = await get(api, f"/did/{ALICE.did}")
    assert status == 200 and body["did"] == ALICE.did and body["conflict"] is None
    events = [
        (Packet.parse(canonical.encode(item["packet"])), item["received_at"]) for item in body["events"]
    ]
    chain = KeyChain.replay(ALICE.did, events)
    assert chain.head is not None and chain.head.hash == body["did_doc_hash"]
    assert DidDocument.parse(canonical.encode(body["document"])).hash == body["did_doc_hash"]
    assert [key["key_id"] for key in body["keys"]] == [key.key_id for key in chain.keys(NOW)]
    assert {key["standing"] for key in body["keys"]} == {"valid"}


@pytest.mark.req("R-058")
async def test_a_document_is_served_under_its_hash_as_its_canonical_bytes(api):
    for document in (document_of(ALICE, ALICE.did), document_of(BOB, NAMED)):
        answer = await api.respond(f"/did-docs/{document.hash}")
        assert (answer.status, answer.body) == (200, document.canonical)


async def test_a_self_certifying_did_is_known_by_itself(api):
    status, body = await get(api, f"/did/{BOB.did}")
    assert (status, body["events"], len(body["keys"])) == (200, [], 1)


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/did/nobody", 400, "invalid_did"),
        ("/did/", 400, "invalid_did"),
        ("/did/did:strata:stranger", 404, "not_found"),
        ("/did-docs/0x" + "ab" * 32, 400, "invalid_did_doc_hash"),
        ("/did-docs/" + document_of(BOB, BOB.did).hash, 404, "not_found"),
    ],
)
@pytest.mark.req("R-052")
async def test_what_is_not_there(api, path, status, error):
    found, body = await get(api, path)
    assert (found, body["error"]) == (status, error)


async def test_other_paths_are_not_ours(api):
    assert await api.respond("/packets/0x00") is None


async def test_percent_encoding_in_the_path(api):
    assert (await get(api, "/did/" + ALICE.did.replace(":", "%3A")))[0] == 200


@pytest.mark.req("R-323")
async def test_declined_packets_are_not_shown_here_either(api, declined):
    _, before = await get(api, f"/did/{ALICE.did}")
    published, event = (bytes.fromhex(item["packet"]["packet_id"][2:]) for item in before["events"])
    document = f"/did-docs/{document_of(ALICE, ALICE.did).hash}"
    for hides_document, hidden in (
        (False, Declined(packet_ids=frozenset([event]))),
        (False, Declined(types=frozenset(["KEY_EVENT"]))),
        (True, Declined(packet_ids=frozenset([published]))),
        (True, Declined(types=frozenset(["DID_DOCUMENT"]))),
    ):
        declined["now"] = hidden
        status, body = await get(api, f"/did/{ALICE.did}")
        assert status == 200 and len(body["events"]) == 1 == body["events_omitted"]
        shown = (body["document"], body["did_doc_hash"])
        assert shown == ((None, None) if hides_document else (before["document"], before["did_doc_hash"]))
        assert (await get(api, document))[0] == (410 if hides_document else 200)
        assert body["keys"] == before["keys"], "what is not shown holds all the same"


@pytest.mark.req("R-100")
async def test_expired_packets_are_not_shown(log):
    now = [NOW]
    published = packets.build(
        ALICE, document_content(document_of(ALICE, ALICE.did)), timestamp=NOW, expires_at=NOW + 60
    )
    new = NewPacket(published.digest, ALICE.did, "DID_DOCUMENT", NOW, NOW + 60, published.canonical)
    identities = Identities(log, BootstrapContents(), KeyRules())
    identities.observe([LogEntry(1, NOW, new)])
    key = equivalence_key(published)
    assert key is not None
    log.by_key[key] = StoredPacket(1, NOW, published.canonical)
    api = IdentityApi(
        identities, BootstrapContents(), by_key=log.find, declined=Declined, clock=lambda: now[0]
    )
    document = f"/did-docs/{document_of(ALICE, ALICE.did).hash}"
    now[0] = NOW + 57
    for path in (f"/did/{ALICE.did}", document):  # no cache keeps them past their expiry
        answer = await api.respond(path)
        assert answer is not None and answer.headers["Cache-Control"] == "public, max-age=3"
    for now[0], count in ((NOW + 60, 1), (NOW + 61, 0)):
        _, body = await get(api, f"/did/{ALICE.did}")
        assert len(body["events"]) == count == (body["document"] is not None)
        assert (await get(api, document))[0] == (200 if count else 410)


@pytest.mark.req("R-100", "R-113")
async def test_a_document_that_was_published_again_is_shown_when_the_first_has_expired(log):
    content = document_content(document_of(ALICE, ALICE.did))
    identities = Identities(log, BootstrapContents(), KeyRules())
    for sequence, expires_at in ((1, NOW + 60), (2, None)):
        packet = packets.build(ALICE, content, timestamp=NOW, expires_at=expires_at, nonce=str(sequence))
        new = NewPacket(packet.digest, ALICE.did, "DID_DOCUMENT", NOW, expires_at, packet.canonical)
        identities.observe([LogEntry(sequence, NOW + sequence, new)])
    api = IdentityApi(
        identities, BootstrapContents(), by_key=log.find, declined=Declined, clock=lambda: NOW + 61
    )
    _, body = await get(api, f"/did/{ALICE.did}")
    assert body["did_doc_hash"] == document_of(ALICE, ALICE.did).hash
    assert [event["packet"]["packet_id"] for event in body["events"]] == [packet.packet_id]


async def test_no_answer_is_kept_for_longer_than_a_change_may_take_to_show(api):
    for path in (
        f"/did/{ALICE.did}",
        *(f"/did-docs/{document_of(*who).hash}" for who in ((ALICE, ALICE.did), (BOB, NAMED))),
    ):
        cached = (await api.respond(path)).headers["Cache-Control"]
        assert "immutable" not in cached and int(cached.rpartition("max-age=")[2]) <= 60


async def test_a_chain_too_long_for_one_answer_is_cut(api, monkeypatch):
    whole = await api.respond(f"/did/{ALICE.did}")
    monkeypatch.setattr("relayd.http.identities._MAX_EVENTS_BYTES", 1100)
    _, body = await get(api, f"/did/{ALICE.did}")
    assert len(body["events"]) + body["events_omitted"] == 2 == len(json.loads(whole.body)["events"])
    assert body["events_omitted"] and body["document"] is not None


@pytest.mark.req("R-323")
async def test_nothing_of_a_blocked_author_is_served(api, declined):
    declined["now"] = Declined(authors=frozenset([ALICE.did]))
    assert (await get(api, f"/did/{ALICE.did}"))[0] == 410
    assert (await get(api, f"/did-docs/{document_of(ALICE, ALICE.did).hash}"))[0] == 410


@pytest.mark.req("R-323")
async def test_nothing_of_an_author_is_served_who_is_blocked_while_the_keys_are_read(api, declined):
    resolve = api._identities.resolve

    async def read(did, asker, **_):
        declined["now"] = Declined(authors=frozenset([did]))
        return await resolve(did, asker)

    api._identities.resolve = read
    assert (await get(api, f"/did/{ALICE.did}"))[0] == 410


async def test_a_store_that_does_not_answer(api, log):
    log.down = True
    assert (await get(api, "/did-docs/" + document_of(BOB, BOB.did).hash))[0] == 503


async def test_whether_the_current_document_is_served_is_not_worked_out_by_writing_all_of_them(log):
    """Expired documents stay in their chain, and anybody may request it."""
    identities = Identities(log, BootstrapContents(), KeyRules())
    before: DidDocument | None = None
    method = VerificationMethod(method_id(ALICE.did), ALICE.public_key, 0)
    for n in range(6):
        document = build_document(
            ALICE.did, [method], created_at=n, previous=before, extra={"x": [2e-6] * 2000}
        )
        expires_at = None if n == 5 else NOW
        packet = packets.build(ALICE, document_content(document), timestamp=NOW, expires_at=expires_at)
        new = NewPacket(packet.digest, ALICE.did, "DID_DOCUMENT", NOW, expires_at, packet.canonical)
        identities.observe([LogEntry(n + 1, NOW - 100 + n, new)])
        before = document
    assert before is not None
    api = IdentityApi(
        identities, BootstrapContents(), by_key=log.find, declined=Declined, clock=lambda: NOW + 1
    )
    chain = await identities.resolve(ALICE.did)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        assert api._head(chain) == before
    finally:
        sys.setprofile(None)
    assert calls < 200  # rewriting a document takes one for each of its numbers
    status, answer = await get(api, f"/did/{ALICE.did}")
    assert (status, answer["did_doc_hash"], len(answer["events"])) == (200, before.hash, 1)


@pytest.mark.req("R-058", "R-086")
async def test_what_waits_for_approvals_is_told_and_which_keys_are_for_recovery(log):
    identities = Identities(log, BootstrapContents(), KeyRules())
    declared = publish(0, with_recovery())
    pending = rotate(11, 0, 1, valid_from=T)
    for sequence, packet in enumerate((declared, pending), 1):
        new = NewPacket(packet.digest, packet.author_id, packet.content_type, T, None, packet.canonical)
        identities.observe([LogEntry(sequence, T, new)])
    api = IdentityApi(identities, BootstrapContents(), by_key=log.find, declined=Declined, clock=lambda: T)
    _, body = await get(api, f"/did/{ALICE_DID}")
    assert [event["pending"] for event in body["events"]] == [False, True]
    usages = {key["key_id"]: key["usage"] for key in body["keys"]}
    assert usages[key_id(0)] == "signing" and usages[key_id(11)] == "recovery"
    assert {key["valid_until"] for key in body["keys"]} == {0}
