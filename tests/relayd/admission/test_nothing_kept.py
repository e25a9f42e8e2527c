"""Nothing of a refused publish is kept, and no run of the cycle collector is needed for that."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
from strata.protocol import packets
from strata.protocol.errors import ErrorCode
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from relayd.admission.budgets import TrustAct
from relayd.admission.request import PublishRequest
from relayd.policy import Plugins, Policy, Refusal
from relayd.policy.rules import Lists
from tests.relayd.admission.admission_rig import ALICE, NOW, Peer, Rig, made, signed, tampered

BLOCKED = Identity(bytes([8]) * 32)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> int:
    """The number of requests and packets, except the few that were verified last."""
    packets._verify_small.cache_clear()
    return sum(isinstance(thing, PublishRequest | Packet) for thing in gc.get_objects())


def refused(kind: str, number: int) -> bytes:
    edge = {"type": "TRUST_EDGE", "from": ALICE.did, "to": ALICE.did, "strength": 0.9, "created_at": NOW}
    match kind:
        case "garbage":
            return b'{"packet_id":7}'
        case "not json":
            return b'{"x":1e400,"packet_id":"\\ud800"}'
        case "stale":
            return made(number, timestamp=NOW - 10**6)
        case "blocked":
            return made(number, author=BLOCKED)
        case "signature":
            return tampered(made(number))
        case "large":
            return tampered(made(number, padding=20_000))
        case "origin":
            header = {"origin_type": "AI_MODEL", "edit_history": []}
            return signed(ALICE, {"type": "POST", "n": number}, provenance_header=header).canonical
        case "typed":
            return signed(ALICE, {**edge, "strength": 7, "n": number}).canonical
        case "budget":
            return signed(ALICE, {**edge, "n": number}).canonical
        case "evil":
            return signed(ALICE, {"type": "EVIL", "n": number}).canonical
    raise AssertionError(kind)


KINDS = [
    "garbage",
    "not json",
    "stale",
    "blocked",
    "signature",
    "large",
    "origin",
    "typed",
    "budget",
    "evil",
    "database away",
]


@pytest.mark.req("R-192", "R-321")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_collector")
async def test_a_refused_publish_is_gone_with_its_answer(kind: str):
    async def plugin(request: object) -> Refusal:
        return Refusal(ErrorCode.POLICY_REJECTED, "not here")

    plugins = {"no": plugin} if kind == "evil" else {}
    rig, peer = Rig(plugins=Plugins(plugins), budgets={TrustAct.STRONG_EDGES: 1}), Peer()
    rig.admission.policy = Policy(Lists(blocked_authors=frozenset({BLOCKED.did})))
    if kind == "budget":
        rig.publish(peer, refused("budget", -1), "first")
        await rig.answers(peer, 1)
        peer.answers.clear()
    if kind == "database away":
        rig.log.down = True
        rig.identities._authors.add(ALICE.did, "KEY_EVENT")
    before = alive()
    for batch in range(10):
        for number in range(50):
            raw = made(number) if kind == "database away" else refused(kind, 50 * batch + number)
            rig.publish(peer, raw, "m")
            del raw
        await rig.answers(peer, 50)
        assert {what for _, what in peer.answers} <= set(ErrorCode)
        peer.answers.clear()
        peer.errors.clear()
    assert rig.admission.pending == rig.admission.pending_bytes == 0
    async with asyncio.timeout(10):  # for the tasks that have just answered the last ones
        while alive() > before:  # noqa: ASYNC110 - nothing tells that an object is gone
            await asyncio.sleep(0.001)
    await rig.close()
