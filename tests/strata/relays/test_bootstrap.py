"""The bootstrap file of a client: where to start, and whom to trust before any request."""

from __future__ import annotations

import json

import pytest
from strata.channels.connecting import connect
from strata.protocol import packets
from strata.protocol.documents import VerificationMethod, build_document, key_multibase, method_id
from strata.protocol.ids import Identity
from strata.relays import uris
from strata.relays.bootstrap import Bootstrap, KnownRelay, parse_bootstrap, read_bootstrap
from strata.relays.connection import Options

NAMED = Identity.from_seed(b"\x13" * 32).speaking_for("did:strata:relay_1")
DOCUMENT = build_document(
    NAMED.did, [VerificationMethod(method_id(NAMED.did), NAMED.public_key, 0)], created_at=0
)


def parse(**members):
    return parse_bootstrap(json.dumps(members).encode())


@pytest.mark.req("R-347")
async def test_a_client_starts_from_one_file_and_nothing_else(fake, tmp_path):
    path = tmp_path / "bootstrap.json"
    keys = {NAMED.did: key_multibase(NAMED.public_key)}
    path.write_text(json.dumps({"relays": [fake.url], "keys": keys}))
    packet = packets.build(NAMED, {"type": "POST"}, timestamp=1_760_000_000)
    await fake.append(packet)
    known = read_bootstrap(path)
    options = Options(idle_timeout=0.05, relay_id=known.relays[0].relay_id)
    async with connect(known.relays[0].url, anchors=known.anchors(), options=options) as relay:
        assert (await anext(relay.subscribe())).packet == packet


@pytest.mark.req("R-347")
def test_relays_in_every_form():
    uri = uris.RelayProposal(http="https://a.example", label="A").to_uri()
    item = json.loads(uris.RelayProposal(http="https://b.example").to_json()) | {"relay_id": NAMED.did}
    expected = (
        KnownRelay("wss://a.example/strata", None, "A"),
        KnownRelay("wss://b.example/strata", NAMED.did),
        KnownRelay("ws://c.example:7447/strata"),
    )
    items = [uri, item, "ws://c.example:7447/strata"]
    assert parse(relays=items).relays == expected
    assert parse_bootstrap(json.dumps(items).encode()).relays == expected


@pytest.mark.req("R-055", "R-064")
def test_identities():
    known = parse(
        did_documents=[json.loads(DOCUMENT.canonical)],
        did_docs=[{"did": NAMED.did, "did_doc_hash": DOCUMENT.hash}],
        keys={"did:device:1": key_multibase(NAMED.public_key)},
        clock_skew_seconds=60,
        model_roots={"what": "a relay reads"},
    )
    assert known.documents == {NAMED.did: (DOCUMENT,)}
    assert known.pointers == {NAMED.did: DOCUMENT.hash}
    assert known.keys == {"did:device:1": NAMED.public_key}
    assert known.anchors().rules.clock_skew_seconds == 60
    assert known.anchors().chain(NAMED.did).candidates(5) == (NAMED.public_key,)
    assert known.anchors(DOCUMENT).documents == known.documents, "fetched again, the same"
    assert Bootstrap().anchors(DOCUMENT).documents == {NAMED.did: (DOCUMENT,)}


@pytest.mark.req("R-064")
@pytest.mark.parametrize("skew", [30, 900, "60", True, None])
def test_a_clock_skew_out_of_bounds_counts_as_the_default(skew):
    assert parse(clock_skew_seconds=skew).clock_skew_seconds == 300


def test_an_empty_file_says_nothing():
    assert parse() == parse_bootstrap(b"[]") == Bootstrap()


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"relays": "ws://a.example"}, "relays is not a list"),
        ({"relays": ["http://a.example"]}, r"relays\[0\]: not a ws"),
        ({"relays": ["ws://a.example", 7]}, r"relays\[1\]"),
        ({"relays": ["ws://[a"]}, r"relays\[0\]"),
        ({"relays": ["strata://relay"]}, r"relays\[0\]: http"),
        ({"relays": [{"type": "strata.relay", "v": 1, "http": "https://a.b", "relay_id": "x"}]}, "relay_id"),
        ({"did_documents": [{}]}, r"did_documents\[0\]"),
        ({"did_documents": [7]}, r"did_documents\[0\]"),
        ({"did_docs": [{"did": "x"}]}, r"did_docs\[0\]: did"),
        ({"did_docs": [{"did": NAMED.did, "did_doc_hash": "0x00"}]}, "multihash"),
        ({"did_docs": [7]}, "did_docs"),
        ({"keys": []}, "keys is not"),
        ({"keys": {"x": "y"}}, "keys: x"),
        ({"keys": {NAMED.did: "zzz"}}, "keys: did"),
    ],
)
def test_what_is_wrong_is_said(members, reason):
    with pytest.raises(ValueError, match=reason):
        parse(**members)


@pytest.mark.parametrize("raw", [b"", b"7", b"{", b"\xff", b"[" * 5000, b" " * (16 * 2**20 + 1)])
def test_what_is_no_file_of_ours_is_refused(raw):
    with pytest.raises(ValueError):
        parse_bootstrap(raw)


def test_a_file_that_windows_has_saved_is_read():
    assert parse_bootstrap(b"\xef\xbb\xbf{\r\n}") == parse_bootstrap(b"{}")
    with pytest.raises(ValueError, match="the text is UTF-16"):
        parse_bootstrap("{}".encode("utf-16"))


def test_the_error_names_the_file(tmp_path):
    path = tmp_path / "bootstrap.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"bootstrap\.json: not JSON"):
        read_bootstrap(path)
