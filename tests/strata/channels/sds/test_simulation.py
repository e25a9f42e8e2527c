"""Many participants on bad networks, from seeds: one log for all, each message once, correct errors.

`STRATA_SDS_RUNS` sets the number of runs of each scenario.
"""

from __future__ import annotations

import os
import random

import pytest
from strata.channels.sds import SdsConfig

from tests.support.sds_network import SMALL, Network

RUNS = int(os.environ.get("STRATA_SDS_RUNS", "20"))
HOUR = 3_600_000


def settle(network: Network) -> None:
    """Run for an hour, and longer if a long chain of losses is still being repaired, link by link."""
    for _ in range(6):
        network.run(HOUR)
        if len(set(map(tuple, network.logs().values()))) == 1:
            return


def check(network: Network) -> None:
    """Check what must hold at the end of every run that had time to settle."""
    sent = {message_id for peer in network.peers.values() for message_id in peer.sent}
    logs = network.logs()
    assert len(set(map(tuple, logs.values()))) == 1
    assert set(next(iter(logs.values()))) == sent
    for peer in network.peers.values():
        assert sorted(peer.delivered) == sorted(sent - set(peer.sent))
        assert len(set(peer.acknowledged)) == len(peer.acknowledged)
        # An error comes once, and never after the acknowledgement; when everybody is back, it is repaired.
        assert len(set(peer.failed)) == len(peer.failed)
        assert set(peer.acknowledged) | set(peer.failed) >= set(peer.sent)


def bad_network(
    seed: int, *, track_changes: bool = False, receipts: str = ""
) -> tuple[Network, random.Random]:
    source = random.Random(seed)
    names = "abcde"[: source.choice([2, 3, 4, 5])]
    network = Network(
        seed,
        names,
        loss=source.choice([0, 0.1, 0.3, 0.5]),
        repeat=source.choice([0, 0.2]),
        delay_ms=source.choice([10, 300, 3_000]),
        track_changes=track_changes,
        receipts=receipts,
    )
    for number in range(12):
        network.at(source.randrange(60_000), "send", source.choice(names), b"message %d" % number)
    return network, source


@pytest.mark.req("C-141", "C-118", "C-112", "C-093", "C-298")
@pytest.mark.parametrize("seed", range(RUNS))
def test_loss_repetition_and_reordering(seed: int) -> None:
    network, _ = bad_network(seed)
    settle(network)
    check(network)


@pytest.mark.req("C-141", "C-101")
@pytest.mark.parametrize("seed", range(1_000, 1_000 + RUNS))
def test_clocks_that_jump(seed: int) -> None:
    network, source = bad_network(seed)
    for _ in range(4):
        jump = source.choice([-HOUR, -5_000, 5_000, 600_000, 25 * HOUR])
        network.at(source.randrange(60_000), "skew", source.choice("ab"), str(jump).encode())
    settle(network)
    check(network)


@pytest.mark.req("C-141", "C-296")
@pytest.mark.parametrize("seed", range(2_000, 2_000 + RUNS))
def test_peers_that_are_cut_off_for_minutes(seed: int) -> None:
    network, source = bad_network(seed)
    for _ in range(3):
        network.at(source.randrange(60_000), "cut", source.choice("ab"), b"%d" % source.randrange(300_000))
    settle(network)
    check(network)


@pytest.mark.req("C-248", "C-255", "C-257")
@pytest.mark.parametrize("seed", range(3_000, 3_000 + RUNS))
def test_processes_that_begin_anew_from_what_they_stored(seed: int) -> None:
    network, source = bad_network(seed, track_changes=True)
    for _ in range(6):
        network.at(source.randrange(90_000), "restart", source.choice("ab"))
    settle(network)
    check(network)


@pytest.mark.req("C-141", "C-093", "C-296", "C-298")
@pytest.mark.parametrize("listing", ["ab", "abcde"])
@pytest.mark.parametrize("seed", range(4_000, 4_000 + RUNS // 4))
def test_some_or_all_list_what_they_received(seed: int, listing: str) -> None:
    network, source = bad_network(seed, track_changes=True, receipts=listing)
    for _ in range(2):
        network.at(source.randrange(90_000), "restart", source.choice("ab"))
        network.at(source.randrange(60_000), "cut", source.choice("ab"), b"%d" % source.randrange(300_000))
    settle(network)
    check(network)


@pytest.mark.req("C-141", "C-296")
def test_a_busy_room_loses_no_message_that_nobody_names() -> None:
    """Fifty participants send three messages at once, and none of them can query a store."""
    names = [f"p{number}" for number in range(50)]
    config = SdsConfig(lost_message_timeout_ms=0)
    network = Network(5, names, loss=0.05, delay_ms=300, config=config, receipts=names)
    for number in range(150):
        network.at(number * 5, "send", names[number % 50], b"message %d" % number)
    for _ in range(60):
        network.run(60_000)
        if len(set(map(tuple, network.logs().values()))) == 1:
            break
    check(network)


@pytest.mark.req("C-136")
@pytest.mark.parametrize("seed", range(RUNS))
def test_two_live_peers_never_send_again_what_has_arrived(seed: int) -> None:
    source = random.Random(seed)
    network = Network(seed, "ab", delay_ms=200, config=SdsConfig())
    spread = source.choice([100, 1_000, 10_000, 60_000])
    for number in range(20):
        network.at(source.randrange(spread), "send", source.choice("ab"), b"message %d" % number)
    network.run(120_000)
    assert [peer.retransmissions for peer in network.peers.values()] == [0, 0]
    assert not any(peer.participant.outgoing() for peer in network.peers.values())


@pytest.mark.req("C-084", "C-297")
def test_nobody_there_means_an_error_for_each_message_and_no_acknowledgement() -> None:
    network = Network(1, "ab", loss=1.0)
    sent = [network.send("a", b"message %d" % number) for number in range(5)]
    network.run(60_000)
    alice = network.peers["a"]
    assert alice.failed == sent
    assert alice.acknowledged == []
    assert alice.retransmissions == 5 * SMALL.max_retransmissions
