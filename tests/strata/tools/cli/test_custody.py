"""`strata identity` against the naive relay, which here uses the real clock."""

from __future__ import annotations

import asyncio
import json
import stat
import time

import pytest
import strata
from strata.protocol import packets, wire
from strata.protocol.ids import Identity
from strata.protocol.keys import IDENTITY_TYPES, KeyChain
from strata.tools.cli import app
from typer.testing import CliRunner


@pytest.fixture
def relay(extended):
    """The naive relay, but with the real received_at: keys have windows."""
    received_at: dict[str, int] = {}
    model = extended.model

    def stamp(event: wire.Event) -> wire.Event:
        packet_id = strata.Packet.parse(event.packet).packet_id
        return wire.Event(
            packet=event.packet,
            received_at=received_at.setdefault(packet_id, int(time.time())),
            subscription_id=event.subscription_id,
            cursor=event.cursor,
        )

    model.disguise = stamp
    return extended


@pytest.fixture
def run(relay, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The command runs in a thread: the relay runs in this one, and the command has its own event loop.
    runner = CliRunner(env={"STRATA_RELAY": relay.url})

    async def strata_identity(*arguments, code=0, record=True):
        line = ["identity", *map(str, arguments), *(["--json"] if record else [])]
        async with asyncio.timeout(60):
            result = await asyncio.to_thread(runner.invoke, app, line)
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code == code, result.output
        for path in tmp_path.glob("*.json"):  # no output of a command contains a key
            assert Identity.load(path).seed.hex() not in result.stdout + result.stderr
        return json.loads(result.stdout) if code == 0 and record else result.stdout + result.stderr

    return strata_identity


def chain(relay) -> KeyChain:
    packets_held = [packet for packet, _ in relay.model.log if packet.content_type in IDENTITY_TYPES]
    return KeyChain.replay(packets_held[0].author_id, [(packet, int(time.time())) for packet in packets_held])


@pytest.mark.req("R-090")
async def test_create_without_recovery_is_a_private_file_and_no_packet(run, relay, tmp_path):
    made = await run("create", "-o", "me.json")
    assert Identity.load(tmp_path / "me.json").did == made["did"]
    assert stat.S_IMODE((tmp_path / "me.json").stat().st_mode) == 0o600
    assert not relay.model.log
    assert "exists already" in await run("create", "-o", "me.json", code=1)
    assert "next: publish" in await run("create", "-o", "you.json", record=False)


async def test_recovery_keys_go_into_files_of_their_own_and_into_a_document(run, relay, tmp_path):
    made = await run("create", "-o", "me.json", "--recovery", 3, "--relay", relay.url)
    assert made["threshold"] == 2
    keys = [Identity.load(tmp_path / path) for path in made["recovery_paths"]]
    assert {key.did for key in keys} == {made["did"]}
    known = chain(relay)
    assert known.head is not None
    assert known.head.hash == made["did_doc_hash"]
    assert {m.public_key for m in known.head.methods if m.recovery} == {key.public_key for key in keys}
    again = await run("document", "--identity", "me.json", "--recovery-key", "me-recovery-1.json", code=1)
    assert "has a document already" in again


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "--recovery", "2"),
        ("create", "--recovery", "2", "--threshold", "3", "--relay", "ws://x"),
        ("show", "z6Mk"),
        ("approve", "0x12"),
    ],
)
async def test_what_could_not_work_is_a_usage_error(run, arguments):
    await run(*arguments, code=2)


async def test_a_document_that_does_not_reach_the_relay_can_be_published_later(
    run, relay, tmp_path, unused_tcp_port
):
    nowhere = f"ws://127.0.0.1:{unused_tcp_port}/strata"
    said = await run("create", "-o", "me.json", "--recovery", 2, "--relay", nowhere, "--timeout", 1, code=1)
    assert "try again with:\n  strata identity document --identity me.json" in said
    arguments = said.partition("strata identity ")[2].splitlines()[0].replace(nowhere, relay.url).split()
    assert (await run(*arguments))["did_doc_hash"]
    assert chain(relay).head is not None


async def test_a_rotated_key_speaks_for_the_same_did(run, relay, tmp_path):
    did = (await run("create", "-o", "me.json"))["did"]
    rotated = await run("rotate", "--identity", "me.json", "-o", "new.json", "--reason", "new phone")
    assert rotated["did"] == did
    new = Identity.load(tmp_path / "new.json")
    assert new.did == did
    now = int(time.time())
    chain(relay).verify(packets.build(new, {"type": "POST"}, timestamp=now), now)
    # Once more, with the new key: it names itself by the id that it was given.
    await run("rotate", "--identity", "new.json", "-o", "newest.json")
    assert len(chain(relay).keys(now)) == 3
    shown = await run("show", "--identity", "newest.json")
    assert [key["state"] for key in shown["keys"]] == ["valid"] * 3  # within the skew
    assert [key["valid_until"] is None for key in shown["keys"]] == [False, False, True]


async def test_a_refused_rotation_leaves_no_key_file(run, relay, tmp_path):
    await run("create", "-o", "me.json")
    relay.model.answer = lambda message: wire.Error(
        code="policy_rejected", reason="no", client_msg_id=message.client_msg_id
    )
    assert "policy_rejected" in await run("rotate", "--identity", "me.json", "-o", "new.json", code=1)
    assert not (tmp_path / "new.json").exists()


async def test_a_refusal_that_may_pass_keeps_the_key_file(run, relay, tmp_path):
    """The relay has the packet, its OK is lost with the connection, and it refuses the second sending."""
    await run("create", "-o", "me.json")
    loop = asyncio.get_running_loop()

    def answer(message):
        if not relay.model.log:
            relay.model.append(strata.Packet.parse(message.packet))
            loop.call_soon(relay.cut)
            return "silence"
        return wire.Error(
            code="rate_limited", reason="no", retry_after=600, client_msg_id=message.client_msg_id
        )

    relay.model.answer = answer
    said = await run("rotate", "--identity", "me.json", "-o", "new.json", code=1)
    assert "rate_limited" in said and "new.json is kept" in said
    now = int(time.time())
    assert Identity.load(tmp_path / "new.json").public_key in chain(relay).candidates(now)


async def test_a_rotation_without_an_answer_keeps_the_key_file(run, relay, tmp_path):
    await run("create", "-o", "me.json")
    relay.model.answer = lambda message: "silence"
    said = await run("rotate", "--identity", "me.json", "-o", "new.json", "--timeout", "2", code=1)
    assert "new.json is kept" in said
    assert "its outcome is unknown" in said
    Identity.load(tmp_path / "new.json")


async def test_revoking_the_last_key_has_to_be_meant(run, relay):
    await run("create", "-o", "me.json")
    assert "no key would be left" in await run("revoke", "keys-1", "--identity", "me.json", code=1)
    assert "has no key keys-9" in await run("revoke", "keys-9", "--identity", "me.json", code=1)
    await run("revoke", "keys-9", "--at", "whenever", "--identity", "me.json", code=2)
    assert not relay.model.log
    await run("revoke", "keys-1", "--at", "10s", "--yes", "--identity", "me.json")
    assert not chain(relay).candidates(int(time.time()))
    shown = await run("show", "--identity", "me.json", record=False)
    assert "no key can sign at the moment" in shown


async def test_a_lost_key_is_recovered_by_two_of_three(run, relay, tmp_path):
    await run("create", "-o", "me.json", "--recovery", 3, "--relay", relay.url)
    (tmp_path / "me.json").rename(tmp_path / "lost")
    proposed = await run("rotate", "--identity", "me-recovery-1.json", "-o", "back.json")
    event = proposed["packet_id"]
    shown = await run("show", "--identity", "me-recovery-1.json", record=False)
    assert f"strata identity approve {event}" in shown
    assert "pending: ROTATE" in shown
    await run("approve", event, "--identity", "me-recovery-2.json")
    made, now = chain(relay), int(time.time())
    assert made.is_pending(event, now)
    later = now + made.rules.recovery_delay_seconds + 1
    assert not made.is_pending(event, later)
    assert Identity.load(tmp_path / "back.json").public_key in made.candidates(later)


async def test_an_approval_counts_although_the_relay_then_does_not_say_what_is_missing(run, relay):
    await run("create", "-o", "me.json", "--recovery", 3, "--relay", relay.url)
    event = (await run("rotate", "--identity", "me-recovery-1.json", "-o", "back.json"))["packet_id"]
    receive = relay.model.receive

    def fall_silent(session, data):
        if "RECOVERY_APPROVAL" not in [packet.content_type for packet, _ in relay.model.log]:
            receive(session, data)

    relay.model.receive = fall_silent
    approved = await run("approve", event, "--identity", "me-recovery-2.json", "--timeout", 3)
    assert approved["packet_id"] == relay.model.log[-1][0].packet_id


async def test_a_thief_with_a_recovery_key_is_stopped_by_a_veto(run, relay):
    await run("create", "-o", "me.json", "--recovery", 1, "--relay", relay.url)
    await run("rotate", "--identity", "me-recovery-1.json", "-o", "thief.json")
    shown = await run("show", "--identity", "me.json", record=False)
    stop = next(line for line in shown.splitlines() if line.startswith("  stop:"))
    key_id = stop.split()[-1]
    await run("revoke", key_id, "--identity", "me.json")
    assert "pending" not in await run("show", "--identity", "me.json", record=False)


async def test_a_key_that_is_none_of_the_dids_is_told_so(run, relay, tmp_path):
    did = (await run("create", "-o", "me.json"))["did"]
    Identity.generate().speaking_for(did).save(tmp_path / "stranger.json")
    assert "none of the DID's" in await run("rotate", "--identity", "stranger.json", "-o", "x.json", code=1)
    assert "none of the DID's" in await run("revoke", "keys-1", "--identity", "stranger.json", code=1)
    assert "strata identity create" in await run("rotate", "--identity", "none.json", "-o", "x.json", code=1)


async def test_show_says_when_a_did_has_no_key(run):
    said = await run("show", "did:strata:relay_1", record=False, code=1)
    assert "knows no key" in said
