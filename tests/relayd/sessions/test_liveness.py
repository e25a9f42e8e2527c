"""Deadlines of a connection, with times chosen by the test."""

import pytest

from relayd.sessions.liveness import Liveness, PeerState


def liveness() -> Liveness:
    return Liveness(ping_interval=30.0, ping_misses=2, slow_consumer_timeout=60.0, heard_at=0.0)


def look(peer: Liveness, now: float, waiting: int = 0, listening: bool = True) -> PeerState:
    return peer.check(now, waiting_bytes=waiting, listening=listening)


@pytest.mark.req("R-130")
def test_a_silent_peer_is_pinged_twice_and_then_gone():
    peer = liveness()
    assert look(peer, 30.0) is PeerState.FINE
    assert look(peer, 31.0) is PeerState.SILENT
    assert look(peer, 60.0) is PeerState.FINE
    assert look(peer, 61.0) is PeerState.SILENT
    assert look(peer, 91.0) is PeerState.GONE


def test_each_ping_has_its_time_even_if_nobody_looked_for_long():
    peer = liveness()
    assert look(peer, 500.0) is PeerState.SILENT
    for now in (501.0, 529.0):
        assert look(peer, now) is PeerState.FINE
    assert look(peer, 530.0) is PeerState.SILENT
    assert look(peer, 559.0) is PeerState.FINE
    assert look(peer, 560.0) is PeerState.GONE


def test_any_byte_starts_over():
    peer = liveness()
    look(peer, 31.0)
    look(peer, 61.0)
    peer.heard(90.0)
    assert look(peer, 120.0) is PeerState.FINE
    assert look(peer, 121.0) is PeerState.SILENT


def test_silence_means_nothing_while_we_do_not_listen():
    peer = liveness()
    assert look(peer, 1000.0, listening=False) is PeerState.FINE
    assert look(peer, 1030.0) is PeerState.FINE
    assert look(peer, 1031.0) is PeerState.SILENT


@pytest.mark.req("R-170")
def test_a_peer_that_takes_nothing_is_stuck_and_one_that_takes_a_byte_is_not():
    peer = liveness()
    peer.write_paused(0.0, waiting_bytes=1000)
    assert look(peer, 60.0, waiting=1000) is PeerState.FINE
    assert look(peer, 60.5, waiting=999) is PeerState.FINE
    assert look(peer, 120.0, waiting=1200) is PeerState.FINE, "what we add is not what it takes"
    assert look(peer, 121.0, waiting=1200) is PeerState.STUCK


def test_a_peer_that_took_everything_is_alive():
    peer = liveness()
    peer.write_paused(0.0, waiting_bytes=1000)
    peer.write_resumed(500.0)
    assert look(peer, 530.0) is PeerState.FINE
    assert look(peer, 531.0) is PeerState.SILENT


@pytest.mark.req("R-170")
def test_what_waited_at_another_time_is_no_sign_that_something_was_taken():
    peer = liveness()
    peer.write_paused(0.0, waiting_bytes=5_000_000)
    look(peer, 1.0, waiting=4_000_000)
    peer.write_resumed(2.0)
    peer.write_paused(100.0, waiting_bytes=1000)
    assert look(peer, 160.5, waiting=1000) is PeerState.STUCK
