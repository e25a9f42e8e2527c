"""No request may be forgotten: each is answered, whatever it contains, and nothing of it is kept."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from strata.protocol.ids import Identity
from websockets.exceptions import ConnectionClosed

from tests.support.bare_client import BareClient, open_client, publish_text
from tests.support.made_packets import make, new_identity, seal
from tests.support.relay_process import RelayProcess, running


def trust(who: Identity, type: str, **members: Any) -> bytes:
    """A trust packet with any members in place of the correct ones."""
    content = {"type": type, "from": who.did, "to": new_identity().did, "created_at": int(time.time())}
    return make(who, **{**content, **members}).canonical


@pytest.mark.req("R-192", "R-241")
@pytest.mark.parametrize("junk", ["x", {"deep": [None]}, [], True, 1e300], ids=repr)
async def test_a_revocation_with_junk_for_its_strength_holds_up_nobody(client: BareClient, junk: object):
    who = new_identity()
    for _ in range(3):
        answer = await client.publish(trust(who, "TRUST_REVOCATION", strength=junk))
        assert answer["type"] == "OK"
    assert (await client.publish(trust(who, "TRUST_EDGE", strength=0.9)))["type"] == "OK"
    assert (await client.publish(make(who)))["type"] == "OK"


def refused(kind: str, padding: str) -> str:
    """A PUBLISH that is refused for this reason."""
    who = new_identity()
    now = int(time.time())
    members: dict[str, Any] = {
        "version": 1,
        "timestamp": now,
        "author_id": who.did,
        "content": {"type": "POST", "text": padding},
    }
    match kind:
        case "stale":
            members["timestamp"] = now - 10**6
        case "schema":
            members["version"] = 7
        case "origin":
            members["provenance_header"] = {"origin_type": "AI_MODEL", "edit_history": []}
        case "float":
            members["content"]["number"] = 1e300
            members["timestamp"] = 1
    raw = seal(who, members).decode()
    if kind == "signature":
        at = raw.index('"signature":"0x') + len('"signature":"0x')
        raw = raw[:at] + ("1" if raw[at] != "1" else "2") + raw[at + 1 :]
    if kind == "id":
        raw = raw.replace('"type":"POST"', '"type":"PAST"')
    return publish_text(raw, kind)


@pytest.mark.req("R-192", "R-321")
async def test_nothing_of_refused_publishes_is_kept(relay: RelayProcess):
    padding = "x" * 240_000
    async with open_client(relay.ws) as client:
        before = relay.rss()
        for kind in ("stale", "schema", "origin", "float", "signature", "id"):
            frame = refused(kind, padding)
            for _ in range(40):
                await client.send(frame)
                assert (await client.receive())["type"] == "ERROR"
        grown = relay.rss() - before
    # 58 MB were sent; the allocator keeps a few frames' worth.
    assert grown < 40 * 2**20, f"{grown >> 20} MB are kept"


@pytest.mark.req("R-214", "R-242")
async def test_a_burst_meets_every_check(client: BareClient):
    who = new_identity()
    claims = [json.loads(refused("origin", str(number)))["packet"] for number in range(20)]
    texts = [make(who).canonical.decode(), *map(json.dumps, claims)]
    for number, text in enumerate(texts):
        await client.send(publish_text(text, str(number)))
    answers = [await client.answer(str(number)) for number in range(len(texts))]
    assert [answer["type"] for answer in answers] == ["OK"] + ["ERROR"] * 20
    assert {answer["code"] for answer in answers[1:]} == {"missing_proof"}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay that allows fifty refusals an hour per connection, and does not exempt this machine."""
    settings: dict[str, Any] = {
        "refused_limit": 50,
        "limit_window_seconds": 3600,
        "unlimited_addresses": ["192.0.2.0/24"],
    }
    with running(RelayProcess(tmp_path_factory.mktemp("strict"), **settings)) as process:
        yield process
        assert not process.complaints()


@pytest.mark.req("R-321")
@pytest.mark.parametrize("kind", ["publish", "publish limit", "unknown type", "binary", "unsubscribe"])
async def test_who_is_refused_again_and_again_is_sent_away(strict: RelayProcess, kind: str):
    frames: dict[str, str | bytes] = {
        "publish": refused("stale", ""),
        "publish limit": publish_text(b'{"packet_id":7}'),
        "unknown type": '{"type":"A"}',
        "binary": b"A",
        "unsubscribe": '{"type":"UNSUBSCRIBE","subscription_id":"x"}',
    }
    async with open_client(strict.ws) as client, open_client(strict.ws) as beside:
        for _ in range(40):
            await client.send(frames[kind])
        await client.barrier()  # the next forty-first
        with contextlib.suppress(ConnectionClosed):
            for _ in range(40):
                await client.send(frames[kind])
            while True:
                await client.receive()
        assert client.socket.close_code == 1008
        assert client.socket.close_reason == "too many refused messages"
        assert (await beside.publish(make(new_identity())))["type"] == "OK"
    assert strict.metric("relayd_connections_closed_total", reason="refused") >= 1
