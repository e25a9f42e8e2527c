"""What each peer of a group is asked to leave out, and to which place reading goes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from relayd.federation import marking
from relayd.federation.mesh import DOWN_SECONDS, Mesh
from relayd.federation.peers_file import Upstream
from relayd.store.peers import PeerPlace

A, B, C = "did:a", "did:b", "did:c"


def mesh() -> Mesh:
    made = Mesh("did:me", {A: "g", B: "g", C: ""}, 0.0)
    for did in (A, B, C):
        made.start(did, "start", 0.0)
        made.heard(did)
        made.read(did, 0.0)
        made.caught_up(did)
    return made


def test_the_others_of_its_group_are_left_out_and_nobody_else():
    made = mesh()
    assert made.read(A, 1.0).not_via == ("did:me", B)
    assert made.read(B, 1.0).not_via == ("did:me", A)
    assert made.read(C, 1.0).not_via == ("did:me",)


def test_a_silent_peer_is_left_out_no_more_and_the_others_are_read_again():
    made = mesh()
    for at in range(10, 130, 10):
        # What may be withheld because B is gone and nobody knows it yet must not be skipped by a restart.
        assert made.to_store(A, f"at {at}", float(at)) == (f"at {at - 60}" if at > 60 else "start")
    made.lost(B, 130.0)
    # Packets that A has withheld since B may have fallen silent must not be skipped.
    assert made.to_store(A, "at 131", 131.0) == "at 70"
    assert not made.is_due(A, 130 + DOWN_SECONDS - 1)
    assert made.is_due(A, 130 + DOWN_SECONDS)
    reading = made.read(A, 130 + DOWN_SECONDS)
    assert (reading.not_via, reading.rewinds, reading.from_cursor) == (("did:me",), True, "at 70")
    assert made.to_store(A, "at 75", 161.0) == "at 75"


@pytest.mark.req("R-364")
def test_nothing_goes_back_to_a_place_behind_packets_that_could_not_be_stored(monkeypatch):
    """They are still tried, and a place behind them would be kept as read once the database is back."""
    made, now = mesh(), 50.0
    monkeypatch.setattr(marking, "time", SimpleNamespace(monotonic=lambda: now))
    peer = Upstream("wss://a", A)
    ours = marking.Marking(peer, 1, 1, PeerPlace("start", None), made, cast(Any, None))
    item = ours.intake.add(b"{}", 0, "behind it")
    made.lost(B, 0.0)
    made.read(A, DOWN_SECONDS)  # nothing is left out any more
    assert ours.offer({item}).cursor == "behind it"  # if the commit succeeds; it does not
    made.heard(B)
    made.read(A, now)
    made.caught_up(B)
    made.lost(B, 130.0)
    assert made.read(A, 130 + DOWN_SECONDS).from_cursor == "start"


def test_a_peer_that_comes_back_is_left_out_again_and_trusted_once_it_has_caught_up():
    made = mesh()
    made.to_store(A, "before", 50.0)
    made.lost(B, 130.0)
    made.read(A, 200.0)
    made.heard(B)
    assert made.is_due(A, 201.0)
    assert made.read(A, 201.0).not_via == ("did:me", B)
    made.to_store(A, "later", 202.0)
    assert made.to_store(A, "later", 202.0) == "before"
    made.caught_up(B)
    assert made.to_store(A, "later", 203.0) == "before"
    assert made.to_store(A, "still later", 263.0) == "later"


def test_a_restart_goes_back_to_where_nothing_was_withheld():
    made = Mesh("did:me", {A: "g", B: "g"}, 0.0)
    made.start(A, None, 0.0)
    made.heard(A)
    made.read(A, 0.0)
    made.caught_up(A)
    assert made.to_store(A, "far", 10.0) is None  # B was presumed to be there, and has not been heard
    reading = made.read(A, DOWN_SECONDS)
    assert (reading.rewinds, reading.from_cursor) == (True, None)


def test_of_several_silent_peers_the_one_that_went_first_counts_and_its_first_silence():
    made = Mesh("did:me", {A: "g", B: "g", C: "g"}, 0.0)
    for did in (A, B, C):
        made.start(did, "start", 0.0)
        made.heard(did)
        made.read(did, 0.0)
        made.caught_up(did)
    for at in range(10, 130, 10):
        made.to_store(A, f"at {at}", float(at))
    for did, moment in ((C, 130.0), (B, 95.0), (B, 135.0)):
        made.lost(did, moment)
    assert made.to_store(A, "at 136", 136.0) == "at 30"
    reading = made.read(A, 130 + DOWN_SECONDS)
    assert (reading.not_via, reading.from_cursor) == (("did:me",), "at 30")
    # The entries behind that place are being read anew: nothing goes back to the earlier place.
    made.heard(B)
    made.caught_up(B)
    assert made.read(A, 161.0).not_via == ("did:me", B)
    made.lost(B, 165.0)
    assert made.to_store(A, "at 50", 166.0) == "at 30"


@pytest.mark.req("R-364")
def test_a_restart_before_a_death_is_noticed_skips_nothing():
    """B died at 100, and A has withheld what B had sent it; at 125 nobody here knows that yet."""
    made = mesh()
    stored = None
    for at in range(10, 130, 5):
        stored = made.to_store(A, f"at {at}", float(at))
    assert stored in {f"at {at}" for at in range(45, 70, 5)}
    again = Mesh("did:me", {A: "g", B: "g"}, 0.0)
    again.start(A, stored, 0.0)
    again.heard(A)
    again.read(A, 0.0)
    again.caught_up(A)
    for at in range(10, 30, 5):
        assert again.to_store(A, f"at {130 + at}", float(at)) == stored
    reading = again.read(A, DOWN_SECONDS)
    assert (reading.rewinds, reading.from_cursor) == (True, stored)


def test_where_nothing_is_left_out_the_place_of_the_moment_is_stored():
    made = mesh()
    assert made.to_store(C, "there", 10.0, with_batch="further") == "further"


def test_links_that_each_last_less_than_a_minute_get_further_all_the_same():
    made, stored, read = mesh(), "0", 0
    made.start(A, stored, 0.0)
    for at in range(0, 900, 5):
        if at % 45 == 0:  # the link ends, and another one begins at the stored place
            made.start(A, stored, float(at))
            read = int(stored)
        read += 5
        stored = made.to_store(A, str(read), float(at)) or "0"
    assert int(stored) > 200
    made.start(A, None, 900.0)  # an operator has it read again from the beginning
    assert made.to_store(A, "5", 905.0) is None
