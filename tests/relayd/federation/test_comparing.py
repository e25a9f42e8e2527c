"""Comparing with a misbehaving peer, in virtual time: what is fetched, counted and given up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from strata.protocol.keys import IDENTITY_TYPES
from strata_testkit.sim.loop import run_virtually

from relayd.federation.comparing import (
    LONGEST_SECONDS,
    MOST_REFUSED,
    MOST_WITHHELD,
    SETTLED_SECONDS,
    CompareParts,
    ComparisonResult,
    compare,
)
from relayd.federation.comparison_turns import ComparisonTurns
from relayd.federation.peers_file import Upstream
from relayd.federation.withholding import MOST_REMEMBERED, Withholding
from tests.support.made_sets import MadeItem, MadeLog, MadePeer, made
from tests.support.virtual_time import without_threads

NOW = 1_790_000_000
SINCE = NOW - 86_400
WHOLE = Upstream("wss://peer", "did:strata:zPeer")

without_threads = pytest.fixture(autouse=True)(without_threads)


def outcome(
    peer: MadePeer,
    log: MadeLog,
    *,
    upstream: Upstream = WHOLE,
    most: int = 10**6,
    most_refused: int = MOST_REFUSED,
    lacking: dict[bytes, None] | None = None,
) -> ComparisonResult:
    return full(peer, log, upstream=upstream, most=most, most_refused=most_refused, lacking=lacking)[0]


def full(
    peer: MadePeer,
    log: MadeLog,
    *,
    upstream: Upstream = WHOLE,
    most: int = 10**6,
    most_refused: int = MOST_REFUSED,
    lacking: dict[bytes, None] | None = None,
) -> tuple[ComparisonResult, set[bytes], float]:
    """The result, the packets certainly withheld by the peer, and the virtual seconds that it took."""
    withheld: set[bytes] = set()

    async def told(found: ComparisonResult) -> None: ...

    async def work() -> tuple[ComparisonResult, set[bytes], float]:
        began = asyncio.get_running_loop().time()
        turns = ComparisonTurns()
        parts = CompareParts(
            upstream,
            1,
            peer.connect,
            cast(Any, log),
            peer.fetch,
            most,
            lambda: NOW,
            lambda: turns.turn(1),
            most_refused,
            {} if lacking is None else lacking,
        )
        found = await compare(parts, SINCE, told, withheld.update)
        return found, withheld, asyncio.get_running_loop().time() - began

    result = run_virtually(work)
    assert peer.open == 0, "the session is closed, whatever happens"
    return result


def items(*numbers: int, at: int = NOW - 1000) -> list[MadeItem]:
    return [made(number, at + number % 600) for number in numbers]


def both(ours: list[MadeItem], theirs: list[MadeItem]) -> tuple[MadePeer, MadeLog]:
    log = MadeLog()
    log.put(*ours)
    return MadePeer(theirs, log), log


def test_what_is_missing_is_brought_and_the_next_comparison_finds_nothing():
    peer, log = both(items(*range(0, 200, 2)), items(*range(0, 200, 3)))
    found = outcome(peer, log)
    assert (found.need, found.brought, found.problem) == (33, 33, None)
    assert found.have == len(set(range(0, 200, 2)) - set(range(0, 200, 3)))
    assert not found.is_equal
    again = outcome(peer, log)
    assert (again.need, again.known, again.is_equal) == (0, 0, True)


def test_packets_that_may_be_on_their_way_are_left_out():
    peer, log = both([], [made(1, NOW - SETTLED_SECONDS + 1), made(2, NOW - SETTLED_SECONDS)])
    assert outcome(peer, log).brought == 1
    assert set(log.held) == {made(2, 0).packet_id}


def test_key_events_of_all_times_come_first_whatever_is_read():
    old = made(1, 1000, "KEY_EVENT")
    peer, log = both([], [old, made(2, NOW - 500, "NOTE"), made(3, NOW - 500)])
    upstream = Upstream("wss://peer", "did:strata:zPeer", types=("NOTE",))
    found = outcome(peer, log, upstream=upstream)
    assert found.brought == 2
    assert [span.types for span in peer.asked] == [tuple(sorted(IDENTITY_TYPES)), ("NOTE",)]
    assert [span.since for span in peer.asked] == [0, SINCE]
    assert peer.fetched[0] == [old.packet_id]


def test_where_one_set_cannot_hold_all_the_range_is_halved():
    """Whichever side has too many."""
    for ours, theirs in ((1000, 30), (30, 1000)):
        peer, log = both(items(*range(0, 300, 3)), items(*range(300)))
        peer.most_items = theirs
        found = outcome(peer, log, most=ours)
        assert (found.brought, found.problem) == (200, None)
        assert found.parts > 10


def test_a_second_with_more_packets_than_a_set_may_hold_is_told_and_the_rest_is_compared():
    crowd = [made(number, NOW - 700) for number in range(1, 50)]
    peer, log = both([], [*crowd, made(900, NOW - 600), made(901, NOW - 800)])
    peer.most_items = 20
    found = outcome(peer, log)
    assert str(NOW - 700) in str(found.problem)
    assert found.brought == 2


def test_a_busy_peer_is_asked_again_when_it_says_and_given_up_in_the_end():
    peer, log = both([], items(1))
    peer.busy = 3
    found, _, seconds = full(peer, log)
    assert (found.brought, found.problem, seconds) == (1, None, 45)
    peer.busy, peer.retry_after = 10**9, 10**9
    found, _, seconds = full(peer, log)
    assert "busy" in str(found.problem)
    assert seconds == 7 * 300
    peer.retry_after = -5  # a value below zero still means a wait
    assert full(peer, log)[2] == 7
    peer.retry_after = None
    assert full(peer, log)[2] == 0, "refused for good"


def test_a_peer_that_falls_silent_costs_an_hour_at_the_most():
    peer, log = both([], items(*range(5)))
    peer.delay = 1e9
    found, _, seconds = full(peer, log)
    assert (found.brought, seconds) == (0, LONGEST_SECONDS)
    assert "longer than" in str(found.problem)
    assert not found.is_equal


def test_what_was_brought_before_the_peer_fell_silent_stays():
    peer, log = both([], [made(1, 1000, "KEY_EVENT"), made(2, NOW - 500)])
    original = peer.compare

    async def slow_for_the_rest(items: Any, **span: Any) -> Any:
        peer.delay = 0 if span["types"] else 1e9
        return await original(items, **span)

    cast(Any, peer).compare = slow_for_the_rest
    assert outcome(peer, log).brought == 1
    assert set(log.held) == {made(1, 0).packet_id}


@pytest.mark.parametrize(
    "distort",
    [
        lambda message: b"",
        lambda message: b"\x61\x00",  # a range that ends too soon
        lambda message: b"\x61" + b"\xff" * 40,  # a number without an end
        lambda message: b"\x61\x00\x00\x02" + b"\xff" * 8 + b"\x7f",  # ids without a count
        lambda message: b"\x62",  # an unknown version
        lambda message: b"\x61\x00\x00\x09",  # no mode
    ],
)
def test_an_answer_that_is_none_ends_it(distort: Callable[[bytes], bytes]):
    peer, log = both(items(1), items(2))
    peer.distort = distort
    found = outcome(peer, log)
    assert found.problem
    assert found.brought == 0


def test_a_peer_that_lies_about_what_it_has():
    """A bounded number of ids that nobody has seen is requested, and nothing is stored."""
    peer, log = both(items(1), items(*range(5000)))
    peer.serves = lambda packet_id: False
    found, withheld, _ = full(peer, log)
    assert (found.withheld, found.brought) == (MOST_WITHHELD, 0)
    assert withheld == {each for ids in peer.fetched for each in ids}
    assert sum(map(len, peer.fetched)) == MOST_WITHHELD
    assert not found.is_equal
    assert set(log.held) == {made(1, 0).packet_id}


def test_what_a_peer_could_not_send_now_is_no_proof_of_withholding():
    peer, log = both([], items(*range(9)))
    peer.serves = lambda packet_id: packet_id == made(3, 0).packet_id
    peer.answers_whole = False
    found, withheld, _ = full(peer, log)
    assert (found.brought, found.withheld, withheld) == (1, 8, set())


def test_erased_packets_are_neither_brought_nor_missing():
    peer, log = both([], items(*range(4)))
    log.erased.update(made(n, 0).packet_id for n in range(3))
    for expected in (1, 0):
        found = outcome(peer, log)
        assert (found.known, found.need, found.brought) == (3, expected, expected)
    assert found.is_equal
    assert len(peer.fetched) == 1


def test_banned_packets_are_neither_brought_nor_different():
    """Packets stored before the ban count as held; those that came after it were refused."""
    ours = items(*range(3))
    peer, log = both(ours, items(*range(6)))
    log.declined.update(item.packet_id for item in ours)
    peer.refuses = lambda item: item.packet_id == made(5, 0).packet_id
    found = outcome(peer, log)
    assert (found.need, found.brought, found.refused) == (3, 2, 1)
    found = outcome(peer, log)
    assert (found.need, found.have, found.known, found.is_equal) == (0, 0, 0, True)
    assert len(peer.fetched) == 1, "what was refused is not asked for again"


def test_expired_packets_and_those_about_to_expire_are_on_no_side():
    ends = [made(n, NOW - 1000, expires_at=NOW - 100 + n) for n in range(0, 450, 50)]
    peer, log = both(ends[:7:2], ends)
    found = outcome(peer, log)
    assert set(log.held) - {item.packet_id for item in ends[:7:2]} == {ends[8].packet_id}
    assert (found.have, found.brought) == (0, 1)


@pytest.mark.parametrize("types", [(), ("NOTE",)])
def test_refused_packets_differ_in_no_set(types: tuple[str, ...]):
    """Whatever their type: refused ids have no type, so they are in no set of some types."""
    ours = [made(1, NOW - 900, "NOTE")]
    theirs = [*ours, made(2, NOW - 900, "NOTE"), made(3, NOW - 900), made(4, 1000, "KEY_EVENT")]
    peer, log = both(ours, theirs)
    peer.refuses = lambda item: True
    upstream = Upstream("wss://peer", "did:strata:zPeer", types=types)
    first = outcome(peer, log, upstream=upstream)
    assert first.refused == (2 if types else 3)
    again = outcome(peer, log, upstream=upstream)
    assert (again.need, again.have, again.refused, again.is_equal) == (0, 0, 0, True)
    assert len(peer.fetched) == 2


def test_refused_packets_that_are_not_remembered_are_not_all_requested_again():
    """A stranger can publish more of them at a peer than are remembered. What is missing is found."""
    random.seed(5)
    refused = [made(n, NOW - 50_000 + n) for n in range(2000)]
    missing = [made(10**6 + n, NOW - 50_000 + n * 10) for n in range(200)]
    peer, log = both([], [*refused, *missing])
    nowhere = set(refused)
    peer.refuses = lambda item: item in nowhere
    found = outcome(peer, log, most_refused=400)
    assert 400 <= found.refused < 600
    assert found.unfetched == 2200 - found.brought - found.refused
    assert found.is_whole and not found.is_equal, "a stranger makes no comparison rarer"
    assert 10 < found.brought < 100, "which ones are requested is left to chance"
    for _ in range(60):
        log.refused.clear()
        outcome(peer, log, most_refused=400)
    assert all(item.packet_id in log.held for item in missing)


def test_what_the_peer_does_not_serve_is_compared_once():
    """It may have refused any number; each would cost hundreds of bytes in each comparison."""
    random.seed(6)
    common = [made(n, NOW - 80_000 + n * 4) for n in range(15_000)]
    only_here = [made(10**6 + n, NOW - 80_000 + n * 6) for n in range(10_000)]
    peer, log = both([*common, *only_here], common)
    log.page_items = 5000
    lacking: dict[bytes, None] = {}
    first = outcome(peer, log, lacking=lacking)
    assert (first.have, first.need) == (10_000, 0) and first.bytes > 300_000
    for _ in range(3):
        again = outcome(peer, log, lacking=lacking)
        assert (again.have, again.need, again.rounds, again.is_equal) == (0, 0, 2, True)
        assert again.bytes < 2000
    # Once the peer serves some of them, it names them, and they are known here.
    for item in only_here[:100]:
        peer.claims[item.packet_id] = item
    found = outcome(peer, log, lacking=lacking)
    assert (found.known, found.need) == (100, 0) and len(lacking) == 9900
    assert outcome(peer, log, lacking=lacking).known == 0 and len(peer.fetched) == 0


def test_what_was_refused_and_lost_by_the_peer_is_not_fetched_when_it_is_back():
    peer, log = both([], items(1, 2))
    peer.refuses = lambda item: True
    lacking: dict[bytes, None] = {}
    assert outcome(peer, log, lacking=lacking).refused == 2
    lost, peer.claims = peer.claims, {}
    assert outcome(peer, log, lacking=lacking).have == 2
    peer.claims = lost
    for _ in range(2):
        found = outcome(peer, log, lacking=lacking)
        assert (found.need, found.refused, found.withheld, found.problem) == (0, 0, 0, None)


def test_refused_keys_leave_packets_their_share():
    keys = [made(n, 1000 + n, "KEY_EVENT") for n in range(500)]
    post = made(10**6, NOW - 500)
    peer, log = both([], [*keys, post])
    peer.refuses = lambda item: item is not post
    outcome(peer, log, most_refused=200)
    assert post.packet_id in log.held


def test_a_peer_that_compares_no_sets_and_one_that_does_not_list_us():
    peer, log = both([], items(1))
    peer.extensions = frozenset()
    assert "compares no sets" in str(outcome(peer, log).problem)
    peer.extensions, peer.granted = frozenset({"reconcile"}), ("subscribe",)
    assert "replication_peers" in str(outcome(peer, log).problem)
    assert (peer.asked, peer.fetched, log.pages) == ([], [], 0)


def test_a_comparison_that_is_cut_off_leaves_what_it_has_brought_and_the_next_one_does_the_rest():
    peer, log = both([], items(*range(450)))
    original, served = peer.fetch, list[int]()

    async def until_killed(ids: Any) -> Any:
        if len(served) == 2:
            raise asyncio.CancelledError
        served.append(len(ids))
        return await original(ids)

    cast(Any, peer).fetch = until_killed
    with pytest.raises(asyncio.CancelledError):
        outcome(peer, log)
    assert len(log.held) == 400
    cast(Any, peer).fetch = original
    assert (outcome(peer, log).brought, len(log.held)) == (50, 450)


def test_twice_withheld_is_a_contradiction_and_once_is_none():
    withholding = Withholding()
    ids = [made(n, 0).packet_id for n in range(5)]
    withholding.withheld(ids[:2])
    withholding.withheld(ids[:3])
    assert withholding.round_ended() is False
    assert withholding.round_ended() is False
    withholding.withheld(ids[3:])
    assert withholding.round_ended() is False
    withholding.withheld(ids[2:3])
    assert withholding.round_ended() is True
    # The memory is bounded, and the oldest entry is dropped first.
    withholding.withheld(made(n, 0).packet_id for n in range(10, 10 + MOST_REMEMBERED))
    assert withholding.round_ended() is False
    withholding.withheld(ids)
    assert withholding.round_ended() is False


@pytest.mark.parametrize("seed", range(8))
def test_two_rounds_after_all_is_well_everybody_has_everything_or_a_reason(seed: int):
    """Relays that hold, refuse and have erased at random; one names packets that it does not serve."""
    chance = random.Random(seed)
    everything = [made(n, NOW - chance.randint(200, 80_000), chance.choice(["A", "B"])) for n in range(120)]
    logs = [MadeLog() for _ in range(3)]
    for log in logs:
        log.put(*chance.sample(everything, chance.randint(0, 120)))
        for item in chance.sample(everything, 10):
            log.held.pop(item.packet_id, None)
            log.erased.add(item.packet_id)
    refusing = {id(log): {item.packet_id for item in chance.sample(everything, 15)} for log in logs}
    inventions = [made(1000 + n, NOW - 500) for n in range(5)]

    def compare_with(reader: MadeLog, other: MadeLog, invents: bool) -> ComparisonResult:
        peer = MadePeer([*other.held.values(), *(inventions if invents else [])], reader)
        peer.serves = lambda packet_id: packet_id in other.held
        peer.refuses = lambda item: item.packet_id in refusing[id(reader)]
        return outcome(peer, reader, most=chance.choice([40, 1000]))

    for _ in range(2):
        for n, reader in enumerate(logs):
            for m in sorted({0, 1, 2} - {n}, key=lambda _: chance.random()):
                compare_with(reader, logs[m], invents=m == 0)
    served = set().union(*(log.held for log in logs))
    for reader in logs:
        assert served <= reader.held.keys() | reader.refused.keys() | reader.erased
        assert not reader.held.keys() & reader.erased
        assert not reader.held.keys() & {item.packet_id for item in inventions}
    for n, reader in enumerate(logs):  # and then nothing remains to be done
        for m in {0, 1, 2} - {n}:
            found = compare_with(reader, logs[m], invents=False)
            assert (found.need, found.brought, found.refused, found.problem) == (0, 0, 0, None)
