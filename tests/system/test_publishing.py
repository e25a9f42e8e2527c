"""PUBLISH and OK from outside (relay.md §1, §3, §6, §7, §8, §11, §12)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from strata.protocol import canonical
from strata.protocol.ids import Identity
from websockets.exceptions import ConnectionClosedError

from tests.support.bare_client import BareClient, open_client, publish_text
from tests.support.made_packets import ids_of, make, new_identity, seal, sized
from tests.support.relay_process import RelayProcess, running
from tests.support.waiting import wait_until

LIMIT = 8192
DAY = 86_400
HASH = "0x" + "ab" * 32
BLOCKED = Identity(b"blocked author, blocked author..")
L = 2**252 + 27742317777372353535851937790883648493

Members = dict[str, Any]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay with a small packet limit that blocks everything that can be blocked."""
    relay = RelayProcess(
        tmp_path_factory.mktemp("strict"),
        max_packet_bytes=LIMIT,
        blocked_authors=[BLOCKED.did],
        blocked_media_hashes=[HASH],
    )
    with running(relay):
        yield relay
        assert not relay.complaints()


def members(identity: Identity, **changes: Any) -> Members:
    """The members of a good packet, some changed; `...` removes one."""
    made: Members = json.loads(make(identity).canonical)
    made |= changes
    return {key: value for key, value in made.items() if value is not ...}


async def expect_refusal(
    client: BareClient, packet: bytes | str, code: str, detail: str | None = None
) -> Members:
    error = await client.publish(packet)
    assert (error["type"], error["code"], error.get("detail")) == ("ERROR", code, detail), error
    return error


@pytest.mark.req("R-181", "R-188", "R-192")
async def test_a_valid_packet_is_stored_forwarded_and_acknowledged(relay: RelayProcess, client: BareClient):
    identity = new_identity()
    async with open_client(relay.ws) as other:
        await other.subscribe("s", {"authors": [identity.did]})
        packet = make(identity)
        ok = await client.publish(packet)
        received_at = ok.pop("received_at")
        ok.pop("client_msg_id")
        assert ok == {"type": "OK", "packet_id": packet.packet_id, "status": "ACCEPTED"}
        (event,) = await other.events("s", 1)
        assert (event["packet"]["packet_id"], event["received_at"]) == (packet.packet_id, received_at)
    events, _ = await client.subscribe("s", {"authors": [identity.did]})
    assert ids_of(events) == [packet.packet_id]


SCHEMA_FAULTS: dict[str, Members] = {
    **{f"without {name}": {name: ...} for name in ("version", "timestamp", "author_id", "content")},
    "version 2": {"version": 2},
    "version text": {"version": "1"},
    "timestamp text": {"timestamp": "now"},
    "timestamp fraction": {"timestamp": time.time() // 1 + 0.5},
    "timestamp bool": {"timestamp": True},
    "author number": {"author_id": 7},
    "author no did": {"author_id": "alice"},
    "content list": {"content": []},
    "content without type": {"content": {"text": "x"}},
    "content type number": {"content": {"type": 7}},
    "content text number": {"content": {"type": "POST", "text": 7}},
    "expires text": {"expires_at": "soon"},
    "nonce number": {"nonce": 7},
    "header list": {"provenance_header": []},
    "attestations object": {"attestations": {}},
    "attestations of text": {"attestations": ["x"]},
    "metrics": {"consensus_metrics": {"human_votes": 1}},
    "media without header": {"content": {"type": "POST", "media": [{"media_hash": "0x" + "00" * 32}]}},
    "media without hash": {"content": {"type": "POST", "media": [{}]}, "provenance_header": {}},
    "media uri as hash": {
        "content": {"type": "POST", "media": [{"media_hash": "ipfs://x"}]},
        "provenance_header": {"origin_type": "UNKNOWN"},
    },
}


@pytest.mark.req("R-017", "R-027", "R-031", "R-032", "R-033", "R-035", "R-037", "R-182")
@pytest.mark.parametrize("fault", SCHEMA_FAULTS)
async def test_a_wrong_member_is_invalid_schema_though_signed(client: BareClient, fault):
    identity = new_identity()
    error = await expect_refusal(
        client, seal(identity, members(identity, **SCHEMA_FAULTS[fault])), "invalid_schema"
    )
    assert fault != "version 2" or "2" in error["reason"]
    events, _ = await client.subscribe("s", {"authors": [identity.did]})
    assert events == []


@pytest.mark.req("R-007", "R-014", "R-038", "R-041", "R-042")
@pytest.mark.parametrize(
    "changes",
    [
        {"consensus_metrics": {}},
        {"consensus_metrics": None},
        {"expires_at": None, "nonce": None, "provenance_header": None, "attestations": None},
        {"nonce": "the same"},
        {"nonce": "the same", "x": 1},
        {"content": {"type": "ZZZ_TEST"}},
        {"content": {"type": "POST", "thread_ref": None}},
        {"content": {"type": "POST", "thread_ref": "0x" + "12" * 32}},
        {"content": {"type": "ATTESTATION_DISPUTE", "dispute_type": "NEW_KIND", "reason": "NEW_REASON"}},
    ],
)
async def test_what_is_open_or_optional_is_accepted(client: BareClient, changes):
    identity = new_identity()
    assert (await client.publish(seal(identity, members(identity, **changes))))["type"] == "OK"


def raw_member(packet: bytes, text: str) -> bytes:
    """The packet with one more member, as text that no encoder would write."""
    return packet[:-1] + b"," + text.encode("utf-8", "surrogatepass") + b"}"


@pytest.mark.req("R-011", "R-012")
@pytest.mark.parametrize(
    "text",
    [
        '"version":1',
        '"x":{"a":1,"a":1}',
        '"x":"\\ud800"',
        '"x":NaN',
        '"x":Infinity',
        '"x":1e999',
        '"x":9007199254740993',
        '"x":-9007199254740992',
        '"x":' + "[" * 65 + "]" * 65,
    ],
)
async def test_text_without_one_canonical_form_is_refused(client: BareClient, text):
    # If the text is not even JSON no id can be read from it, so the answer is simply the next message.
    await client.send(publish_text(raw_member(make(new_identity()).canonical, text)))
    error = await client.receive()
    assert (error["type"], error["code"]) == ("ERROR", "invalid_schema")
    await client.barrier()


@pytest.mark.req("R-009", "R-013", "R-016")
async def test_any_spelling_of_the_canonical_form_is_the_same_packet(client: BareClient):
    identity = new_identity()
    packet = make(identity, "Grüße 🦀", n=1)
    spelled = json.dumps(json.loads(packet.canonical), indent=1, sort_keys=False, ensure_ascii=True)
    spelled = spelled.replace(str(packet.timestamp), f"{packet.timestamp}.0")
    assert (await client.publish(spelled))["packet_id"] == packet.packet_id
    assert (await client.publish(packet))["duplicate"] is True


@pytest.mark.req("R-020")
@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda text: text[2:],
        lambda text: "z" + text[3:],
        lambda text: "0x1e20" + text[2:],
        lambda _: 7,
    ],
)
async def test_a_packet_id_of_another_spelling_is_invalid_schema(
    client: BareClient, change: Callable[[str], Any]
):
    made = members(new_identity())
    made["packet_id"] = change(made["packet_id"])
    await expect_refusal(client, json.dumps(made), "invalid_schema")


@pytest.mark.req("R-025")
@pytest.mark.parametrize("signature", ["0x", "0x" + "ab" * 63, "0x" + "zz" * 64, "ab" * 64, None, 7])
async def test_a_signature_of_wrong_shape_is_invalid_schema(client: BareClient, signature):
    await expect_refusal(
        client, json.dumps(members(new_identity()) | {"signature": signature}), "invalid_schema"
    )


@pytest.mark.req("R-023", "R-025", "R-182")
@pytest.mark.parametrize("kind", ["flipped", "malleated", "foreign", "of the hash"])
async def test_a_signature_that_does_not_verify(client: BareClient, kind):
    identity = new_identity()
    made = members(identity)
    signature = bytes.fromhex(made["signature"][2:])
    signed = canonical.encode({k: v for k, v in made.items() if k not in ("packet_id", "signature")})
    if kind == "flipped":
        signature = bytes([signature[0] ^ 1]) + signature[1:]
    elif kind == "malleated":
        signature = signature[:32] + (int.from_bytes(signature[32:], "little") + L).to_bytes(32, "little")
    elif kind == "foreign":
        signature = new_identity().sign(signed)
    else:
        signature = identity.sign(bytes.fromhex(made["packet_id"][2:]))
    made["signature"] = "0x" + signature.hex()
    await client.subscribe("s", {"authors": [identity.did]})
    await expect_refusal(client, json.dumps(made), "invalid_signature")
    assert await client.quiet("s") == []


@pytest.mark.req("R-024")
async def test_an_upper_case_signature_is_accepted_and_kept(client: BareClient):
    identity = new_identity()
    made = members(identity)
    made["signature"] = "0x" + made["signature"][2:].upper()
    assert (await client.publish(json.dumps(made)))["type"] == "OK"
    events, _ = await client.subscribe("s", {"authors": [identity.did]})
    assert events[0]["packet"] == made


@pytest.mark.req("R-022", "R-112", "R-183")
async def test_an_id_that_does_not_recompute_is_refused_even_if_it_is_known(client: BareClient):
    identity = new_identity()
    known = make(identity)
    await client.publish(known)
    made = members(identity) | {"packet_id": known.packet_id}
    await expect_refusal(client, json.dumps(made), "invalid_signature", "packet_id_mismatch")


@pytest.mark.req("R-092", "R-093", "R-094", "R-095", "R-101", "R-103", "R-029")
@pytest.mark.parametrize(
    ("age", "expires_in", "code"),
    [
        (-299, None, None),
        (-200, None, None),
        (-302, None, "timestamp_in_future"),
        (DAY - 2, None, None),
        (DAY + 1, None, "timestamp_too_old"),
        (0, -1, "packet_expired"),
        (0, 30, None),
    ],
)
async def test_freshness(client: BareClient, age, expires_in, code):
    packet = make(new_identity(), age=age, expires_in=expires_in)
    answer = await client.publish(packet)
    assert answer.get("code") == code, answer


@pytest.mark.req("R-029", "R-103")
async def test_milliseconds_are_the_far_future_and_content_expiry_is_content(client: BareClient):
    identity = new_identity()
    now = int(time.time())
    await expect_refusal(
        client, seal(identity, members(identity, timestamp=now * 1000)), "timestamp_in_future"
    )
    assert (await client.publish(make(identity, expires_at=now - 9)))["type"] == "OK"


@pytest.mark.req("R-100", "R-102", "R-103")
async def test_an_expired_packet_is_served_nowhere_and_stays_known(relay: RelayProcess, client: BareClient):
    identity = new_identity()
    short = make(identity, expires_in=2)
    lasting = make(identity)
    await client.publish_all([short, lasting])
    filters = {"authors": [identity.did]}
    events, _ = await client.subscribe("s", filters)
    if time.time() < (short.expires_at or 0):  # a slow machine may be past that time already
        assert ids_of(events) == [short.packet_id, lasting.packet_id]
    wait_until(lambda: time.time() >= (short.expires_at or 0) + 1, "the expiry")
    events, _ = await client.subscribe("s", filters)
    assert ids_of(events) == [lasting.packet_id]
    events, _ = await client.subscribe("t", {"packet_ids": [short.packet_id]})
    assert events == []
    assert relay.get(f"/packets/{short.packet_id}")[0] == 410
    answer = await client.publish(short)
    assert answer.get("duplicate") is True
    assert ids_of(await client.quiet("s")) == []


@pytest.mark.req("R-109", "R-110")
async def test_a_repeat_is_ok_and_neither_stored_nor_forwarded_again(client: BareClient):
    identity = new_identity()
    await client.subscribe("s", {"authors": [identity.did], "limit": 0})
    packet = make(identity)
    first = await client.publish(packet)
    again = await client.publish(packet)
    assert "duplicate" not in first
    assert (again["type"], again["status"], again["duplicate"]) == ("OK", "ACCEPTED", True)
    assert again["received_at"] == first["received_at"]
    assert ids_of(await client.quiet("s")) == [packet.packet_id]
    events, _ = await client.subscribe("t", {"authors": [identity.did]})
    assert ids_of(events) == [packet.packet_id]


@pytest.mark.req("R-110", "R-111")
async def test_sessions_publishing_one_packet_at_once_store_it_once(relay: RelayProcess, client: BareClient):
    identity = new_identity()
    await client.subscribe("s", {"authors": [identity.did], "limit": 0})
    packets = [make(identity, n=n) for n in range(40)]

    async def publish_all() -> list[Members]:
        async with open_client(relay.ws) as publisher:
            return await publisher.publish_all(packets)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(publish_all()) for _ in range(6)]
    for answers in zip(*(task.result() for task in tasks), strict=True):
        assert {answer["type"] for answer in answers} == {"OK"}
        assert sum("duplicate" not in answer for answer in answers) == 1
        assert len({answer["received_at"] for answer in answers}) == 1
    assert sorted(ids_of(await client.quiet("s"))) == sorted(p.packet_id for p in packets)


@pytest.mark.req("R-117", "R-118", "R-121", "R-122")
async def test_the_size_limit_is_on_the_canonical_form_and_inclusive(
    strict: RelayProcess, relay: RelayProcess
):
    for process, limit in ((strict, LIMIT), (relay, 262_144)):
        async with open_client(process.ws) as client:
            identity = new_identity()
            assert (await client.publish(sized(identity, limit)))["type"] == "OK"
            error = await client.publish(sized(identity, limit + 1))
            assert (error["code"], error["max_bytes"]) == ("packet_too_large", limit)
            # Whitespace and escapes do not count as size: the canonical form does.
            spelled = json.dumps(json.loads(sized(identity, limit).canonical), indent=8)
            assert (await client.publish(spelled))["type"] == "OK"


@pytest.mark.req("R-123", "R-126")
@pytest.mark.parametrize("size_bytes", [2 * 262_144 + 65_537, 10 * 2**20])
async def test_an_oversized_frame_is_packet_too_large_then_1009(relay: RelayProcess, size_bytes):
    before = relay.rss()
    async with open_client(relay.ws) as client:
        sending = asyncio.create_task(client.send("x" * size_bytes), name="sender")
        error = await client.receive()
        assert (error["type"], error["code"], error["max_bytes"]) == ("ERROR", "packet_too_large", 262_144)
        with pytest.raises(ConnectionClosedError) as closed:
            await client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        await asyncio.gather(sending, return_exceptions=True)
    assert relay.rss() - before < 24 * 2**20


@pytest.mark.req("R-185", "R-186", "R-187")
async def test_what_is_blocked(strict: RelayProcess):
    async with open_client(strict.ws) as client:
        await expect_refusal(client, make(BLOCKED).canonical, "blocked_author")
        media = make(new_identity(), media=[{"media_hash": HASH}])
        await expect_refusal(client, media.canonical, "policy_rejected", "blocked_media")


def _garbage_id(raw: bytes) -> bytes:
    return _flipped(raw, b'"packet_id":"0x')


def _bad_signature(raw: bytes) -> bytes:
    return _flipped(raw, b'"signature":"0x')


def _flipped(raw: bytes, before: bytes) -> bytes:
    """The packet with the first hex digit after `before` changed."""
    at = raw.index(before) + len(before)
    return raw[:at] + (b"1" if raw[at : at + 1] == b"0" else b"0") + raw[at + 1 :]


TWO_FAULTS: dict[str, tuple[Callable[[Identity], bytes], str, str | None]] = {
    "5 schema before 6 size": (
        lambda i: seal(i, members(i, version=2, x="x" * LIMIT)),
        "invalid_schema",
        None,
    ),
    "6 size before 7 id": (lambda i: _garbage_id(sized(i, LIMIT + 9).canonical), "packet_too_large", None),
    "7 id before 9 policy": (
        lambda _: _garbage_id(make(BLOCKED).canonical),
        "invalid_signature",
        "packet_id_mismatch",
    ),
    "7 id before 10 freshness": (
        lambda i: _garbage_id(make(i, age=2 * DAY).canonical),
        "invalid_signature",
        "packet_id_mismatch",
    ),
    "9 policy before 10 freshness": (lambda _: make(BLOCKED, age=2 * DAY).canonical, "blocked_author", None),
    "9 policy before 11 signature": (
        lambda _: _bad_signature(make(BLOCKED).canonical),
        "blocked_author",
        None,
    ),
    "10 age before 11 signature": (
        lambda i: _bad_signature(make(i, age=2 * DAY).canonical),
        "timestamp_too_old",
        None,
    ),
    "10 expiry before 11 signature": (
        lambda i: _bad_signature(make(i, expires_in=-5).canonical),
        "packet_expired",
        None,
    ),
    "10 future before 11 unknown key": (
        lambda i: seal(i, members(i, author_id="did:web:example.org", timestamp=int(time.time()) + 999)),
        "timestamp_in_future",
        None,
    ),
    "11 unknown key": (
        lambda i: seal(i, members(i, author_id="did:web:example.org")),
        "invalid_signature",
        "unresolved_key",
    ),
}


@pytest.mark.req("R-184", "R-196")
@pytest.mark.parametrize("fault", TWO_FAULTS)
async def test_of_two_faults_the_earlier_check_answers(strict: RelayProcess, fault):
    build, code, detail = TWO_FAULTS[fault]
    async with open_client(strict.ws) as client:
        await expect_refusal(client, build(new_identity()), code, detail)


@pytest.mark.req("R-184")
async def test_2_message_shape_before_5_packet_schema(strict: RelayProcess):
    async with open_client(strict.ws) as client:
        await client.send('{"type":"PUBLISH","client_msg_id":7,"packet":{}}')
        error = await client.receive()
        assert error["code"] == "invalid_schema"
        assert "client_msg_id" not in error


@pytest.mark.req("R-184")
async def test_8_a_duplicate_is_ok_before_any_later_check(client: BareClient):
    packet = make(new_identity())
    await client.publish(packet)
    answer = await client.publish(_bad_signature(packet.canonical))
    assert answer.get("duplicate") is True


@pytest.mark.req("R-191", "R-196")
async def test_the_author_need_not_be_the_session_and_auth_unasked_is_refused(client: BareClient):
    answers = await client.publish_all([make(new_identity()) for _ in range(5)])
    assert {answer["type"] for answer in answers} == {"OK"}
    error = await client.ask(
        {"type": "AUTH", "author_id": "did:strata:x", "challenge": "eA==", "signature": "0x"}
    )
    assert (error["type"], error["code"]) == ("ERROR", "unauthenticated")


@pytest.mark.req("R-192", "R-198")
async def test_a_mixture_of_good_and_bad_gets_one_answer_each(client: BareClient):
    identity = new_identity()
    good = [make(identity, n=n) for n in range(100)]
    frames: dict[str, tuple[str, str]] = {}
    for number, packet in enumerate(good):
        frames[f"good{number}"] = (publish_text(packet, f"good{number}"), "OK")
        frames[f"bad{number}"] = (
            publish_text(_bad_signature(make(identity).canonical), f"bad{number}"),
            "ERROR",
        )
        frames[f"shape{number}"] = (publish_text("{}", f"shape{number}"), "ERROR")
    for text, _ in frames.values():
        await client.send(text)
    answers = {}
    for _ in frames:
        message = await client.receive()
        assert message["client_msg_id"] not in answers
        answers[message["client_msg_id"]] = message["type"]
    assert answers == {name: kind for name, (_, kind) in frames.items()}


@pytest.mark.req("R-312")
async def test_values_reach_the_database_as_parameters(client: BareClient):
    identity = new_identity()
    types = ["'; DROP TABLE packets; --", "a\u0000b", "\\", "$1", "%s", "x" * 3000, "ü\U0001f980", ""]
    packets = [make(identity, type=kind) for kind in types]
    for answer in await client.publish_all(packets):
        assert answer["type"] == "OK"
    for kind, packet in zip(types, packets, strict=True):
        events, _ = await client.subscribe("s", {"types": [kind], "authors": [identity.did]})
        assert ids_of(events) == [packet.packet_id]


@pytest.mark.req("R-111", "R-192")
async def test_one_row_the_store_cannot_hold_fails_alone(client: BareClient):
    identity = new_identity()
    # A legal packet whose times are outside any index must not make its batch fail.
    odd = seal(identity, members(identity, expires_at=2**53 - 1))
    good = [make(identity, n=n) for n in range(20)]
    await client.send(publish_text(odd, "odd"))
    assert {answer["type"] for answer in await client.publish_all(good)} == {"OK"}
    assert (await client.answer("odd"))["type"] == "OK"
