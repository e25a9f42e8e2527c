from __future__ import annotations

import json
import re
from typing import Any

import pytest
from strata.protocol import packets
from strata.protocol.documents import VerificationMethod, build_document, method_id
from strata.protocol.ids import Identity
from strata.protocol.provenance import Downgrade, served
from strata.protocol.wire import EXTENSIONS

from relayd.access.auth import OPERATE
from relayd.config import Settings
from relayd.http.api import HttpApi, MetricsApi
from relayd.http.manifest import build_manifest
from relayd.moderation import Ban, Bans, SubjectKind
from relayd.store.types import Gone, StoredPacket, StoreTimeout, StoreUnavailable

BODY = b'{"a":"\xc3\xa9","b":1.0}'
ID = "0x" + "ab" * 32
NOW = 1_760_000_000


async def scrape() -> tuple[str, bytes]:
    return "text/plain", b"metrics"


class Harness:
    """An `HttpApi` with fake parts; `by_id` answers from `packets` or raises `failure`."""

    def __init__(self, **options):
        self.reason = None
        self.packets: dict[bytes, object] = {}
        self.failure: Exception | None = None
        self.asked: list[tuple[bytes, int]] = []
        options.setdefault("metrics", scrape)
        self.api = HttpApi(
            readiness=lambda: self.reason,
            manifest=lambda: {"relay_id": "did:strata:z6Mk"},
            by_id=self.by_id,
            clock=lambda: NOW + 0.9,
            **options,
        )

    async def by_id(self, packet_id: bytes, now: int, *_: object) -> object:
        self.asked.append((packet_id, now))
        if self.failure is not None:
            raise self.failure
        return self.packets.get(packet_id)

    async def get(self, path: str):
        return await self.api.respond(path)


@pytest.fixture
def http():
    return Harness()


def error_of(response) -> str:
    value: dict[str, str] = json.loads(response.body)
    assert value.keys() == {"error", "reason"}
    assert response.content_type == "application/json"
    return value["error"]


async def test_alive_even_when_not_ready(http):
    http.reason = "starting"
    assert (await http.get("/healthz")).status == 200


@pytest.mark.parametrize("reason", ["starting", "draining", "database"])
async def test_ready_or_why_not(http, reason):
    assert (await http.get("/readyz")).status == 200
    http.reason = reason
    response = await http.get("/readyz")
    assert response.status == 503
    assert json.loads(response.body)["reason"] == reason
    assert response.headers["Cache-Control"] == "no-store"


async def test_metrics_are_served_unless_another_port_does(http):
    response = await http.get("/metrics")
    assert (response.status, response.content_type, response.body) == (200, "text/plain", b"metrics")
    assert (await Harness(metrics=None).get("/metrics")).status == 404
    elsewhere = MetricsApi(scrape)
    assert (await elsewhere.respond("/metrics?x=1")).body == b"metrics"
    assert (await elsewhere.respond("/packets/" + ID)).status == 404


@pytest.mark.req("R-301")
async def test_a_packet_comes_as_the_bytes_that_are_stored(http):
    http.packets[b"\xab" * 32] = StoredPacket(5, NOW, BODY)
    response = await http.get(f"/packets/{ID}")
    assert response.status == 200
    assert response.body == b'{"packet":' + BODY + b',"received_at":%d}' % NOW
    assert http.asked == [(b"\xab" * 32, NOW)]


@pytest.mark.req("R-100")
@pytest.mark.parametrize(
    ("expires_at", "seconds"), [(None, 60), (NOW + 61, 60), (NOW + 59, 59), (NOW + 1, 1), (NOW, 0)]
)
async def test_no_cache_keeps_a_packet_past_its_end(http, expires_at, seconds):
    packet = packets.build(
        Identity(bytes(32)),
        {"type": "POST", "expires_at": NOW + 7},  # the payload's business
        timestamp=NOW - 9,
        expires_at=expires_at,
    )
    http.packets[b"\xab" * 32] = StoredPacket(5, NOW, packet.canonical)
    response = await http.get(f"/packets/{ID}")
    assert response.headers["Cache-Control"] == f"public, max-age={seconds}"


@pytest.mark.req("R-301")
async def test_an_unknown_packet_is_404_and_a_departed_one_410(http):
    assert error_of(response := await http.get(f"/packets/{ID}")) == "not_found"
    assert response.status == 404
    http.packets[b"\xab" * 32] = Gone(5, NOW)
    assert error_of(response := await http.get(f"/packets/{ID}")) == "gone"
    assert response.status == 410


@pytest.mark.req("R-208", "R-209", "R-210")
@pytest.mark.parametrize("form", ["rewrite", "annotate"])
async def test_a_downgraded_packet_comes_as_subscribers_get_it(form):
    header: dict[str, object] = {
        "origin_type": "SOFTWARE",
        "genesis_media_hash": None,
        "edit_history": [],
        "client_attestation": {"client_id": "did:x:y", "client_version": "1", "client_signature": "0x00"},
    }
    packet = packets.build(
        Identity(bytes(32)), {"type": "POST", "text": "x"}, timestamp=NOW, provenance_header=header
    )
    found = Downgrade("SOFTWARE", "UNKNOWN", "client_attestation_invalid", True)
    http = Harness(form=form)
    http.packets[b"\xab" * 32] = StoredPacket(5, NOW, packet.canonical, found.encode())
    answer = json.loads((await http.get(f"/packets/{ID}")).body)
    expected = served(packet.canonical, found, mode=form)
    assert answer == {
        "packet": json.loads(expected.packet),
        "received_at": NOW,
        "relay_annotations": json.loads(expected.annotations),
    }
    assert answer["packet"]["provenance_header"]["origin_type"] == (
        "UNKNOWN" if form == "rewrite" else "SOFTWARE"
    )


@pytest.mark.req("R-020")
@pytest.mark.parametrize(
    "bad", ["", "ab" * 32, ID.upper(), ID + "00", ID[:-1], ID + "/", "z6Mk", "0x" + "é" * 64]
)
async def test_no_other_spelling_is_an_id(http, bad):
    response = await http.get(f"/packets/{bad}")
    assert (response.status, error_of(response)) == (400, "invalid_packet_id")
    assert http.asked == []


@pytest.mark.parametrize("failure", [StoreTimeout("slow"), StoreUnavailable("password=x")])
async def test_a_store_in_trouble_is_503_and_its_words_stay_inside(http, failure):
    http.failure = failure
    response = await http.get(f"/packets/{ID}")
    assert (response.status, error_of(response)) == (503, "unavailable")
    assert response.headers["Retry-After"] == "1"
    assert b"password" not in response.body


@pytest.mark.req("R-313")
@pytest.mark.parametrize(
    "path", ["/", "/healthz/", "/blobs/" + ID, "/media/" + ID, "/packets", "*", "//metrics"]
)
async def test_nothing_else_is_served(http, path):
    response = await http.get(path)
    assert (response.status, error_of(response)) == (404, "not_found")


async def test_a_plain_request_to_the_websocket_is_told_so(http):
    response = await http.get("/strata")
    assert (response.status, error_of(response)) == (426, "upgrade_required")
    assert response.headers["Upgrade"] == "websocket"
    assert (await Harness(websocket_path="/other").get("/strata")).status == 404


async def test_the_manifest_is_public_json(http):
    response = await http.get("/.well-known/strata-relay.json")
    assert (response.status, response.content_type) == (200, "application/json")
    assert response.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.req("R-389", "R-352")
def test_the_manifest_has_the_members_the_rfc_names():
    manifest: dict[str, Any] = build_manifest(
        Settings(), relay_id="did:strata:z6Mk", ws_endpoint="ws://h/strata", status="ok"
    )
    assert manifest["relay_id"] == "did:strata:z6Mk"
    assert manifest["ws_endpoint"] == "ws://h/strata"
    assert manifest["replication"].keys() == {
        "accepts_peer_subscriptions",
        "supported_profiles",
        "requires_auth",
    }
    assert manifest["software"].keys() == {"name", "version"}
    assert manifest["clock_skew_seconds"] == 300
    assert {"max_packet_bytes", "max_limit"} <= manifest["limits"].keys()


@pytest.mark.req("R-139")
def test_the_manifest_announces_the_additions():
    assert build_manifest(Settings(), relay_id="d", ws_endpoint="w", status="ok")["extensions"] == list(
        EXTENSIONS
    )


@pytest.mark.req("R-325", "R-326")
def test_the_manifest_sums_up_what_is_enforced():
    settings = Settings(
        max_packet_bytes=4096, max_limit=7, blocked_authors=("did:x:y",), public_url="wss://p/strata"
    )
    manifest: dict[str, Any] = build_manifest(settings, relay_id="d", ws_endpoint="w", status="draining")
    assert manifest["ws_endpoint"] == "wss://p/strata"
    assert manifest["status"] == "draining"
    assert (manifest["limits"]["max_packet_bytes"], manifest["limits"]["max_limit"]) == (4096, 7)
    assert manifest["policy"]["declines"] == {"authors": True, "packet_ids": False, "media_hashes": False}
    assert manifest["policy"]["protected_accounts"] == "none"
    assert manifest["policy"]["provenance_downgrade"] == "rewrite"
    assert "did:x:y" not in json.dumps(manifest)


@pytest.mark.req("R-317", "R-325")
@pytest.mark.parametrize(("workers", "by"), [(1, "process"), (2, "machine")])
def test_the_manifest_says_that_workers_have_their_limits_together(workers, by):
    manifest: dict[str, Any] = build_manifest(
        Settings(workers=workers), relay_id="d", ws_endpoint="w", status="ok"
    )
    rates = manifest["limits"]["rates"]
    assert (rates["enforced_by"], rates["processes"]) == (by, workers)


def policy_of(**settings: Any) -> dict[str, Any]:
    manifest = build_manifest(Settings(**settings), relay_id="d", ws_endpoint="w", status="ok")
    policy = manifest["policy"]
    assert isinstance(policy, dict)
    return policy


@pytest.mark.req("R-325")
def test_the_manifest_says_who_and_what_may_publish_here():
    free = policy_of()
    assert free["accepts_public_packets"] and free["declined_types"] == [] and "accepted_types" not in free
    assert not free["plugins"] and free["abuse_table"]
    strict = policy_of(
        allowed_authors=("did:x:y",),
        allowed_types=("POST",),
        blocked_types=("VOTE",),
        policy_plugins=("quota",),
        policies=("allowed_authors", "allowed_types", "blocked_types"),
        provenance_downgrade="annotate",
    )
    assert not strict["accepts_public_packets"] and strict["accepted_types"] == ["POST"]
    assert strict["declined_types"] == ["VOTE"]
    assert strict["plugins"] is True and not strict["abuse_table"]
    assert strict["provenance_downgrade"] == "annotate"
    assert "did:x:y" not in json.dumps(strict) and "quota" not in json.dumps(strict)


def test_retention_is_advertised_and_for_ever_is_no_number():
    assert policy_of(retention_days=30)["default_retention_days"] == 30
    assert "default_retention_days" not in policy_of(retention_days=0)


def manifest_of(*, bans: Bans = Bans(), **settings: Any) -> dict[str, Any]:  # noqa: B008 - immutable
    return build_manifest(Settings(**settings), relay_id="d", ws_endpoint="w", status="ok", bans=bans)


@pytest.mark.req("R-292", "R-352", "R-389")
def test_the_manifest_says_what_may_be_asked_for_here_and_by_whom_is_its_own_affair():
    plain, open_to_peers = (
        manifest_of(),
        manifest_of(replication_peers=("did:x:peer",), operators=("did:x:op",)),
    )
    assert [each["replication"]["accepts_peer_subscriptions"] for each in (plain, open_to_peers)] == [
        False,
        True,
    ]
    assert plain["replication"]["supported_profiles"] == []
    assert set(open_to_peers["replication"]["supported_profiles"]) > set()
    assert OPERATE in open_to_peers["auth"]["capabilities"] and OPERATE not in plain["auth"]["capabilities"]
    assert "did:x" not in json.dumps(open_to_peers)


@pytest.mark.req("R-317")
def test_a_limit_that_is_off_is_no_limit_of_nothing():
    rates = manifest_of(publish_limit=0, subscribe_limit=7)["limits"]["rates"]
    assert rates["identity"]["subscribes"] == 7 and "publishes" not in rates["identity"]


@pytest.mark.req("R-325")
@pytest.mark.parametrize(
    ("setting", "values", "kind", "what"),
    [
        ("blocked_authors", ("did:x:y",), SubjectKind.AUTHOR, "authors"),
        ("blocked_packet_ids", (ID,), SubjectKind.PACKET, "packet_ids"),
        ("blocked_media_hashes", ("cd" * 32,), SubjectKind.MEDIA, "media_hashes"),
    ],
)
def test_the_manifest_says_that_something_is_declined_whoever_has_ruled_so(setting, values, kind, what):
    ruled = Bans.at(1, [Ban(kind, values[0], "", "op", None, 0)])
    for manifest in (manifest_of(**{setting: values}), manifest_of(bans=ruled)):
        declines = manifest["policy"]["declines"]
        assert [name for name, is_so in declines.items() if is_so] == [what]
        assert values[0] not in json.dumps(manifest)


@pytest.mark.req("R-057")
def test_the_manifest_points_to_the_newest_documents(monkeypatch):
    monkeypatch.setattr("relayd.http.manifest._MAX_DID_DOCS", 3)
    who = Identity(bytes(32))
    methods = [VerificationMethod(method_id(who.did), who.public_key, 0)]
    documents = [build_document(who.did, methods, created_at=at) for at in (2, 4, 1, 5, 3)]
    manifest = build_manifest(Settings(), relay_id="d", ws_endpoint="w", status="ok", did_docs=documents)
    shown = [documents[number].hash for number in (3, 1, 4)]
    assert manifest["did_docs"] == [{"did": who.did, "did_doc_hash": each} for each in shown]


@pytest.mark.req("R-003")
async def test_every_name_emitted_is_snake_case(http):
    manifest = build_manifest(Settings(), relay_id="d", ws_endpoint="w", status="ok")
    bodies = [json.loads((await http.get(path)).body) for path in ("/healthz", "/readyz", "/x")]
    for name in names_in([manifest, *bodies]):
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)


def names_in(value):
    if isinstance(value, dict):
        for name, member in value.items():
            yield name
            yield from names_in(member)
    elif isinstance(value, list):
        for member in value:
            yield from names_in(member)


async def test_a_manifest_that_has_not_changed_is_not_written_again():
    manifest: dict[str, object] = {"relay_id": "did:strata:z6Mk"}
    harness = Harness()
    harness.api._manifest = lambda: manifest
    path = "/.well-known/strata-relay.json"
    first = await harness.get(path)
    assert (await harness.get(path)).body is first.body
    manifest = {"relay_id": "did:strata:other"}
    assert b"other" in (await harness.get(path)).body


async def test_identities_answer_their_own_paths_and_no_other():
    class Identities:
        async def respond(self, path: str, *_: object) -> object:
            return path if path.startswith("/did") else None

    http = Harness(identities=Identities())
    assert await http.get("/did/x?y") == "/did/x"
    assert [(await http.get(path)).status for path in ("/healthz", "/nowhere")] == [200, 404]
