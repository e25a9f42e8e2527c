"""Trust budgets: limited edges and revocations in 24 hours, counted in the log and on the way to it."""

from __future__ import annotations

import asyncio
import time

import pytest
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity

from relayd.admission.budgets import TrustAct, TrustBudgets
from relayd.store.types import LogEntry, NewPacket, TrustRow
from tests.relayd.admission.admission_rig import ALICE, NOW, Peer, Rig, signed

BOB = Identity(bytes(32))
LIMITS = {TrustAct.STRONG_EDGES: 3, TrustAct.WEAK_EDGES: 5, TrustAct.REVOCATIONS: 2}


def edge(number: int, strength: float, *, author: Identity = ALICE, at: int = NOW):
    content = {
        "type": "TRUST_EDGE",
        "from": author.did,
        "to": BOB.did,
        "strength": strength,
        "context": f"c{number}",
        "created_at": at,
    }
    return signed(author, content, timestamp=at)


def revocation(number: int, *, at: int = NOW):
    content = {
        "type": "TRUST_REVOCATION",
        "from": ALICE.did,
        "to": BOB.did,
        "created_at": at,
        "reason": str(number),
    }
    return signed(ALICE, content, timestamp=at)


@pytest.fixture
async def rig():
    rig = Rig(budgets=LIMITS)
    yield rig
    await rig.close()


async def outcomes(rig, *sent):
    peer = Peer()
    for number, packet in enumerate(sent):
        rig.publish(peer, packet, str(number))
    await rig.answers(peer, len(sent))
    return [what for _, what in sorted(peer.answers, key=number_of)], peer


def number_of(answer: tuple[str | None, str]) -> int:
    assert answer[0] is not None
    return int(answer[0])


@pytest.mark.req("R-242", "R-320")
async def test_a_flood_is_cut_at_the_budget_and_each_kind_has_its_own(rig):
    strong, _ = await outcomes(rig, *(edge(n, 0.6) for n in range(5)))
    assert sorted(strong) == ["ok"] * 3 + [ErrorCode.RATE_LIMITED] * 2
    weak, _ = await outcomes(rig, *(edge(n, 0.5) for n in range(10, 17)))
    assert sorted(weak) == ["ok"] * 5 + [ErrorCode.RATE_LIMITED] * 2
    others, _ = await outcomes(rig, edge(20, 1, author=BOB))
    assert others == ["ok"]


@pytest.mark.req("R-241")
async def test_revocations_have_a_budget_and_give_nothing_back(rig):
    await outcomes(rig, *(edge(n, 0.9) for n in range(3)))
    assert (await outcomes(rig, *(revocation(n) for n in range(3))))[0].count("ok") == 2
    assert (await outcomes(rig, edge(9, 0.9)))[0] == [ErrorCode.RATE_LIMITED]


@pytest.mark.req("R-242", "R-314", "R-319")
async def test_the_window_rolls_and_retry_after_is_true(rig):
    for number in range(3):
        rig.now = NOW + 100 * number
        assert (await outcomes(rig, edge(number, 0.9, at=rig.now)))[0] == ["ok"]
    _, peer = await outcomes(rig, edge(7, 0.9))
    error = peer.errors["0"]
    assert (error.retry_after, error.limit, error.window_seconds) == (86_400 - 200, 3, 86_400)
    rig.now += error.retry_after - 1
    assert (await outcomes(rig, edge(8, 0.9, at=rig.now)))[0] == [ErrorCode.RATE_LIMITED]
    rig.now += 1
    assert (await outcomes(rig, edge(9, 0.9, at=rig.now)))[0] == ["ok"]


@pytest.mark.req("R-242")
async def test_a_refused_edge_costs_nothing(rig):
    bad = edge(1, 0.9).canonical.replace(b"c1", b"c2")
    await outcomes(rig, *[bad] * 9)
    assert (await outcomes(rig, *(edge(n, 0.9) for n in range(3))))[0] == ["ok"] * 3
    again, _ = await outcomes(rig, *(edge(n, 0.9) for n in range(3)))
    assert again == ["duplicate"] * 3


@pytest.mark.req("R-242")
async def test_it_is_counted_in_the_log_so_a_restart_forgets_nothing(rig):
    await outcomes(rig, *(edge(n, 0.9) for n in range(3)))
    again = Rig(log=rig.log, budgets=LIMITS)
    assert (await outcomes(again, edge(9, 0.9)))[0] == [ErrorCode.RATE_LIMITED]
    await again.close()


@pytest.mark.req("R-242")
async def test_what_is_stored_counts_before_the_feed_has_passed_it():
    class EmptyLog:
        async def trust_acts(self, *_: object, **__: object) -> list[TrustRow]:
            return []

    budgets = TrustBudgets(EmptyLog(), LIMITS, clock=lambda: NOW)
    for number in range(3):
        await budgets.take(packet := edge(number, 0.9))
        budgets.settled(packet, NOW)
    with pytest.raises(InvalidPacket):
        await budgets.take(edge(3, 0.9))
    await budgets.close()


async def test_one_packet_sent_by_many_sessions_counts_once(rig):
    peers = [Peer() for _ in range(4)]
    for peer in peers:
        rig.publish(peer, edge(1, 0.9), "m")
    for peer in peers:
        assert (await rig.answers(peer, 1))[0][1] in ("ok", "duplicate")
    assert (await outcomes(rig, edge(2, 0.9), edge(3, 0.9)))[0] == ["ok"] * 2


@pytest.mark.req("R-184")
async def test_a_budget_comes_before_the_origin(rig):
    def claiming(number: int):
        content = edge(number, 0.9).content
        return signed(ALICE, content, provenance_header={"origin_type": "AI_MODEL", "edit_history": []})

    assert (await outcomes(rig, claiming(1)))[0] == [ErrorCode.MISSING_PROOF]
    await outcomes(rig, *(edge(n, 0.9) for n in range(3)))
    assert (await outcomes(rig, claiming(2)))[0] == [ErrorCode.RATE_LIMITED]


async def test_a_log_that_cannot_be_read_refuses_for_now(rig):
    rig.log.down = True
    results, peer = await outcomes(rig, edge(1, 0.9))
    assert results == [ErrorCode.INTERNAL_ERROR] and peer.errors["0"].detail == "store_unavailable"
    rig.log.down = False
    assert (await outcomes(rig, edge(1, 0.9)))[0] == ["ok"]


@pytest.mark.req("R-192", "R-242")
async def test_what_is_lost_while_its_budget_is_read_costs_nothing():
    rig, peer = Rig(budgets={TrustAct.STRONG_EDGES: 1}), Peer()
    rig.log.gate.clear()
    rig.publish(peer, edge(1, 0.9), "lost")
    await rig.log.asked.wait()
    rig.admission.lost(peer.lane.requests[0], ValueError("ours"))
    rig.log.gate.set()
    async with asyncio.timeout(20):
        while rig.admission._last_checks._tasks:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert peer.answers == [("lost", ErrorCode.INTERNAL_ERROR)]
    assert (await outcomes(rig, edge(2, 0.9)))[0] == ["ok"]
    await rig.close()


@pytest.mark.req("R-242")
async def test_the_log_is_read_once_for_an_identity_and_the_feed_brings_the_rest(rig):
    await outcomes(rig, edge(1, 0.9))
    reads = len(rig.log.reads)
    rig.elsewhere(edge(2, 0.9))  # another process has accepted it
    assert (await outcomes(rig, edge(3, 0.9), edge(4, 0.9)))[0].count("ok") == 1
    assert (await outcomes(rig, *(edge(n, 0.9) for n in range(5, 30))))[0] == [ErrorCode.RATE_LIMITED] * 25
    assert len(rig.log.reads) == reads


@pytest.mark.req("R-241", "R-242")
async def test_what_another_process_commits_meanwhile_counts_when_a_packet_is_appended(rig):
    peer = Peer()
    for number in range(3):
        rig.publish(peer, edge(number, 0.9), str(number))
    await rig.queued(3)
    rig.elsewhere(edge(7, 0.9), edge(8, 0.9), edge(0, 0.9))  # the last one is sent to both processes
    assert sorted(await rig.answers(peer, 3)) == [
        ("0", "duplicate"),
        ("1", ErrorCode.RATE_LIMITED),
        ("2", ErrorCode.RATE_LIMITED),
    ]
    assert peer.errors["1"].detail == "trust_budget"
    rig.now += 86_400
    assert (await outcomes(rig, *(edge(n, 0.9, at=rig.now) for n in range(20, 23))))[0] == ["ok"] * 3


@pytest.mark.req("R-242")
async def test_a_packet_whose_author_s_acts_left_memory_on_its_way_may_be_published_again(rig):
    peer = Peer()
    rig.publish(peer, edge(1, 0.9), "m")
    await rig.queued(1)
    rig.budgets._known.clear()
    assert await rig.answers(peer, 1) == [("m", ErrorCode.INTERNAL_ERROR)]
    assert (await outcomes(rig, *(edge(n, 0.9) for n in range(1, 4))))[0] == ["ok"] * 3


async def test_of_many_identities_the_ones_that_were_quiet_longest_are_read_again(rig, monkeypatch):
    monkeypatch.setattr("relayd.admission.budgets._MAX_AUTHORS", 2)
    authors = [Identity(bytes([n]) * 32) for n in range(1, 5)]
    for author in authors:
        assert (await outcomes(rig, edge(1, 0.6, author=author)))[0] == ["ok"]
    assert list(rig.budgets._known) == [author.did for author in authors[2:]]
    strong, _ = await outcomes(rig, *(edge(n, 0.6, author=authors[0]) for n in range(2, 6)))
    assert strong.count("ok") == 2, "the first one counts still"


async def test_of_one_identity_no_more_acts_are_kept_than_can_count(rig, monkeypatch):
    monkeypatch.setattr(rig.budgets, "_max_acts", 20)
    await outcomes(rig, edge(0, 0.6))
    rig.elsewhere(*(edge(n, 0.6) for n in range(1, 30)))
    assert ALICE.did not in rig.budgets._known, "an import, say, has brought too many: they are read again"
    assert (await outcomes(rig, edge(99, 0.6)))[0] == [ErrorCode.RATE_LIMITED]


async def test_many_at_once_share_one_read_and_each_hears_of_its_failure(rig):
    rig.log.down = True
    results, _ = await outcomes(rig, *(edge(n, 0.1) for n in range(20)))
    assert results == [ErrorCode.INTERNAL_ERROR] * 20
    assert len(rig.log.reads) <= 2
    rig.log.down = False
    assert (await outcomes(rig, edge(1, 0.9)))[0] == ["ok"]


@pytest.mark.req("R-241", "R-242")
async def test_an_act_committed_while_the_log_is_read_counts_once(rig):
    rig.elsewhere(edge(1, 0.9))
    rig.log.gate.clear()
    peer = Peer()
    rig.publish(peer, edge(2, 0.9), "slow")
    await rig.log.asked.wait()
    rig.elsewhere(edge(3, 0.9))
    rig.log.gate.set()
    assert (await rig.answers(peer, 1)) == [("slow", "ok")]
    assert (await outcomes(rig, edge(4, 0.9)))[0] == [ErrorCode.RATE_LIMITED]


@pytest.mark.parametrize("junk", ["x", [], {}, True], ids=repr)
async def test_junk_for_the_strength_of_a_revocation_is_a_revocation(rig, junk):
    def bad(number: int):
        content = {"type": "TRUST_REVOCATION", "from": ALICE.did, "strength": junk, "n": number}
        return signed(ALICE, content)

    assert (await outcomes(rig, *(bad(n) for n in range(3))))[0].count("ok") == 2
    again = Rig(log=rig.log, budgets=LIMITS)
    assert (await outcomes(again, bad(9)))[0] == [ErrorCode.RATE_LIMITED]
    await again.close()


async def test_what_the_log_says_of_a_revocation_is_not_decoded(rig):
    """Its `strength` may be any JSON, and the loop looks at the content of everybody's packets."""
    assert (await outcomes(rig, revocation(1)))[0] == ["ok"]  # from now on the feed is followed
    content = {"type": "TRUST_REVOCATION", "from": ALICE.did, "strength": [1.5e300] * 20_000}
    junk = signed(ALICE, content, timestamp=NOW)
    new = NewPacket(junk.digest, ALICE.did, "TRUST_REVOCATION", NOW, None, junk.canonical)
    began = time.process_time()
    rig.budgets.observe([LogEntry(99, NOW, new)])
    assert time.process_time() - began < 0.1  # decoding it all takes half a second
    assert (await outcomes(rig, revocation(2)))[0] == [ErrorCode.RATE_LIMITED]


@pytest.mark.parametrize(("text", "strong"), [("1", True), ("0.6", True), ("0.5", False), ("-1", False)])
async def test_what_the_log_says_of_an_edge_counts_by_its_strength(rig, text, strong):
    assert (await outcomes(rig, edge(0, 0.1)))[0] == ["ok"]
    for number in range(3):
        body = b'{"content":{"strength":%b,"n":%d}}' % (text.encode(), number)
        new = NewPacket(bytes([number]) * 32, ALICE.did, "TRUST_EDGE", NOW, None, body)
        rig.budgets.observe([LogEntry(90 + number, NOW, new)])
    refused = (await outcomes(rig, edge(1, 0.7)))[0] == [ErrorCode.RATE_LIMITED]
    assert refused is strong
