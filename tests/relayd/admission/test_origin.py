"""Check 13 in admission: findings are stored beside the packet, and refusals have their codes."""

from __future__ import annotations

import asyncio

import pytest
from strata.protocol.errors import ErrorCode
from strata.protocol.provenance import Downgrade, ProvenanceTrust

from relayd.policy import Plugins
from tests.relayd.admission.admission_rig import ALICE, NOW, Peer, Rig, signed
from tests.support.made_origins import CLIENT, attested, software_header


def claiming(origin: str, *, number: int = 1, **header: object):
    content = {"type": "POST", "text": f"photo {number}"}
    return signed(ALICE, content, provenance_header={"origin_type": origin, "edit_history": [], **header})


@pytest.mark.req("R-202", "R-208")
@pytest.mark.parametrize("origin", ["SOFTWARE", "SATELLITE"])
async def test_an_unproven_claim_is_stored_as_signed_with_what_was_found(rig, origin):
    peer = Peer()
    packet = claiming(origin)
    rig.publish(peer, packet, "m")
    assert await rig.answers(peer, 1) == [("m", "ok")]
    (stored,) = [entry.packet for entry in rig.log.entries]
    assert stored.body == packet.canonical
    assert stored.annotation is not None
    found = Downgrade.decode(stored.annotation)
    assert (found.claimed_origin_type, found.effective_origin_type) == (origin, "UNKNOWN")
    assert found.place, "serving it would have to read the packet"


@pytest.mark.req("R-203", "R-208")
async def test_what_claims_nothing_is_stored_without_a_finding(rig):
    peer = Peer()
    rig.publish(peer, claiming("UNKNOWN"), "m")
    assert await rig.answers(peer, 1) == [("m", "ok")]
    assert [entry.packet.annotation for entry in rig.log.entries] == [None]


@pytest.mark.req("R-202", "R-217")
async def test_a_high_claim_without_proof_is_refused(rig):
    peer = Peer()
    rig.publish(peer, claiming("AI_MODEL"), "m")
    assert await rig.answers(peer, 1) == [("m", ErrorCode.MISSING_PROOF)]
    assert not rig.log.entries


@pytest.mark.req("R-110", "R-209")
async def test_the_answer_to_a_repeat_says_what_was_found_when_it_was_stored(rig):
    unproven, proven = claiming("SOFTWARE"), attested(software_header())
    peer = Peer()
    for packet in (unproven, proven, unproven, proven):
        rig.publish(peer, packet, "m")
        await rig.answers(peer, len(peer.answers) + 1)
    # Another process, or this one restarted, after the client has changed its statement on its keys.
    later = Rig(log=rig.log, trust=ProvenanceTrust(refused_clients=frozenset([CLIENT.did])))
    for packet in (unproven, proven):
        later.publish(peer, packet, "m")
        await later.answers(peer, len(peer.answers) + 1)
    await later.close()
    assert [what for _, what in peer.answers] == ["ok", "ok", *["duplicate"] * 4]
    assert peer.downgrades == ["client_attestation_missing", None] * 3


async def test_a_repeat_is_answered_although_nobody_can_say_what_was_found(rig):
    peer = Peer()
    rig.publish(peer, claiming("SOFTWARE"), "m")
    await rig.answers(peer, 1)
    later = Rig(log=rig.log)
    later.publish(peer, claiming("SOFTWARE"), "m")
    await later.queued(1)
    rig.log.down = True
    assert await later.answers(peer, 2) == [("m", "ok"), ("m", "duplicate")]
    assert not later.caught
    await later.close()


@pytest.mark.req("R-184")
async def test_the_signature_and_the_type_come_before_the_origin(rig):
    peer = Peer()
    raw = claiming("AI_MODEL").canonical
    at = raw.index(b'"signature":"0x') + 15
    rig.publish(peer, raw[:at] + (b"1" if raw[at : at + 1] != b"1" else b"2") + raw[at + 1 :], "signature")
    header = {"origin_type": "AI_MODEL", "edit_history": []}
    wrong = signed(ALICE, {"type": "CORRECTION", "action": "replace"}, provenance_header=header)
    rig.publish(peer, wrong, "type")
    assert sorted(await rig.answers(peer, 2)) == [
        ("signature", ErrorCode.INVALID_SIGNATURE),
        ("type", ErrorCode.INVALID_SCHEMA),
    ]


async def test_plug_ins_are_asked_last_and_once_and_hold_up_only_their_packet():
    asked: list[str] = []
    release = asyncio.Event()

    async def plugin(request):
        asked.append(request.packet.content["text"])
        if request.packet.content["text"] == "slow":
            await release.wait()
        return None

    rig = Rig(plugins=Plugins({"mine": plugin}, timeout=5.0))
    slow, fast = Peer(), Peer()
    rig.publish(slow, signed(ALICE, {"type": "POST", "text": "slow"}), "slow")
    rig.publish(slow, signed(ALICE, {"type": "POST", "text": "behind"}), "behind")
    rig.publish(fast, signed(ALICE, {"type": "POST", "text": "fast"}), "fast")
    rig.publish(fast, claiming("AI_MODEL"), "refused before")
    rig.publish(fast, signed(ALICE, {"type": "POST", "text": "old"}, timestamp=NOW - 99_999), "stale")
    assert len(await rig.answers(fast, 3)) == 3
    assert not slow.answers  # in order of the session
    release.set()
    assert await rig.answers(slow, 2) == [("slow", "ok"), ("behind", "ok")]
    assert sorted(asked) == ["behind", "fast", "slow"]
    await rig.close()
