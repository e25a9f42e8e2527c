"""The end of a socket, with times chosen by the test."""

from relayd.sessions.parting import Due, Parting


def look(parting: Parting, now: float, waiting: int = 0, is_closed: bool = False) -> Due:
    return parting.check(now, waiting_bytes=waiting, is_closed=is_closed)


def test_whoever_is_to_go_has_five_seconds():
    parting = Parting(most_bytes=100)
    states = [(parting.has_begun, parting.is_lingering)]
    parting.begin(10.0)
    states.append((parting.has_begun, parting.is_lingering))
    assert states == [(False, False), (True, False)]
    assert look(parting, 14.9) is Due.NOTHING
    assert look(parting, 15.0) is Due.ABORT


def test_after_the_last_word_a_socket_lingers_and_then_has_as_long_as_after_a_close():
    parting = Parting(most_bytes=100)
    parting.begin(0.0)
    parting.linger(9.0)
    assert look(parting, 10.9) is Due.NOTHING, "that it lingers counts more than that it was to go"
    assert look(parting, 11.0) is Due.CLOSE
    parting.closed(11.0)
    assert look(parting, 15.9, is_closed=True) is Due.NOTHING
    assert look(parting, 16.0, is_closed=True) is Due.ABORT


def test_what_comes_meanwhile_is_bounded():
    parting = Parting(most_bytes=100)
    assert not parting.discard(60) and not parting.discard(40)
    assert parting.discard(1) and parting.discarded == 101


def test_a_slow_reader_of_a_response_has_time_for_each_part_and_who_takes_less_has_no_more():
    parting = Parting(most_bytes=100)
    parting.answered(50_000)
    parting.closed(0.0)
    assert look(parting, 14.0, waiting=30_000, is_closed=True) is Due.NOTHING
    assert look(parting, 28.9, waiting=29_000, is_closed=True) is Due.NOTHING
    assert look(parting, 29.0, waiting=29_000, is_closed=True) is Due.ABORT
