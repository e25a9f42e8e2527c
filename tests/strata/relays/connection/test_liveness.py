"""Silence, pauses of the program and probes, as plain functions: `now` chosen by the test."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import msgspec
import pytest
from strata.protocol import wire
from strata.protocol.errors import RequestTimeout
from strata.relays.connection.core import AuthenticationSettled, Core
from strata.relays.connection.liveness import PROBE_SECONDS, SILENT_SECONDS
from strata.relays.connection.options import Options
from strata.relays.connection.publishing import PublishSettled
from strata.relays.connection.stream import Stream
from strata.relays.connection.values import Announced, Published, Query


class Program:
    """A program that looks whenever the core asks for it, until it pauses, and a relay that answers pings."""

    def __init__(self, identity=None, extensions=(), **options):
        options = {"publish_timeout": 30, "ack_timeout": 15, "history_timeout": 30, **options}
        self.core = Core(Options(**options), random=random.Random(0).random, signer=identity)
        self.now = 0.0
        self.slept = 0.0
        """How far the wall clock has gone beyond the monotonic one."""
        self.heard_at = -math.inf
        self.pings = []
        self.pong_at = math.inf
        self.answers_pings = True
        self.look()
        self.connect(extensions)

    def connect(self, extensions=()):
        self.core.connection_made(Announced(frozenset(extensions)), self.now)

    def look(self):
        if self.pong_at <= self.now:
            self.heard_at, self.pong_at = self.pong_at, math.inf
            self.core.answered()
        away = self.core.look(self.now, unix_now=self.now + self.slept, heard_at=self.heard_at)
        if self.core.wants_ping:
            self.pings.append(self.now)
            self.core.pinged(self.now)
            self.pong_at = self.now + 0.01 if self.answers_pings else math.inf
        return away

    def run(self, until):
        """Do what is due until this moment, or until the connection is to be dropped."""
        while not self.core.is_gone and self.core.get_timer() <= until:
            self.now = max(self.now, self.core.get_timer())
            self.look()
            self.core.handle_timer(self.now)
            self.look()
        if not self.core.is_gone:
            self.now = until

    def pause(self, seconds):
        """Look at nothing, and then do what is overdue before anything is read."""
        self.now += seconds
        away = self.look()
        self.core.handle_timer(self.now)
        self.look()
        return away

    def publish(self, name="a", timeout=30.0, size=10):
        self.look()
        handle = self.core.publish(name, b'{"packet":"%s"}' % (b"x" * size), timeout=timeout, now=self.now)
        self.core.data_to_send()
        return handle

    def receive(self, message):
        self.heard_at = self.now
        self.look()
        self.core.receive_message(wire.encode(message), self.now)

    def ok(self, handle, name="a"):
        self.receive(wire.Ok(packet_id=name, status="ACCEPTED", client_msg_id=handle))

    def outcomes(self):
        return [each.outcome for each in self.core.changes() if isinstance(each, PublishSettled)]


@pytest.mark.parametrize("at", [0.0, 0.5, 14.9, 29.999])
def test_an_answer_that_came_during_a_pause_counts(at):
    program = Program()
    handle = program.publish()
    program.run(at)
    program.pause(600)
    assert program.outcomes() == []
    program.ok(handle)
    assert program.outcomes() == [Published("a", None)]


def test_a_relay_that_is_silent_while_the_program_looks_is_judged_on_time():
    program = Program(ack_timeout=None)
    program.publish(timeout=30.0)
    program.run(29.99)
    assert program.outcomes() == []
    program.run(30.0)
    (outcome,) = program.outcomes()
    assert isinstance(outcome, RequestTimeout)
    assert program.core.statistics.connections_lost == 0


def test_after_a_pause_a_silent_relay_has_the_time_that_was_left_and_little_more():
    program = Program()
    program.publish(timeout=30.0)
    program.run(20.0)
    program.pause(100)
    program.run(129.9)
    assert program.outcomes() == []
    program.run(131.0)
    assert isinstance(program.outcomes()[0], RequestTimeout)


def test_a_program_that_pauses_again_and_again_still_gives_a_silent_relay_up():
    program = Program()
    program.publish(timeout=3.0)
    for _ in range(200):
        program.run(program.now + 0.1)
        program.pause(3)
    assert len(program.outcomes()) == 1


def test_a_page_of_history_that_came_during_a_pause_counts():
    program = Program(extensions=["history_marker"])
    stream = program.core.subscribe(Query(live=False), program.now)
    program.run(29.9)
    program.pause(60)
    assert stream.error is None and stream.wire_id is not None
    program.receive(wire.EndOfHistory(subscription_id=stream.wire_id, complete=True))
    assert stream in program.core.changes() and stream.error is None


def test_a_history_that_does_not_come_ends_on_time():
    program = Program(extensions=["history_marker"])
    stream = program.core.subscribe(Query(live=False), program.now)
    program.run(29.9)
    assert stream.error is None
    program.run(30.1)
    assert isinstance(stream.error, RequestTimeout)


def test_a_challenge_and_its_answer_may_come_during_a_pause(identities):
    program = Program(identities[0], authenticate="always", auth_timeout=5)
    program.run(4.9)
    program.pause(60)
    assert not [each for each in program.core.changes() if isinstance(each, AuthenticationSettled)]
    program.run(program.now + 6)  # and a relay that then does not ask is given up
    assert [each for each in program.core.changes() if isinstance(each, AuthenticationSettled)]


@pytest.mark.req("R-130")
def test_an_idle_connection_is_pinged_every_interval_and_given_up_after_two_misses():
    program = Program()
    program.run(95.0)
    assert program.pings == [30.0, 60.0, 90.0]
    program.answers_pings = False
    program.run(1000.0)
    assert program.core.is_gone
    assert program.now == pytest.approx(120.0 + 60.0)


@pytest.mark.req("R-130")
def test_a_pong_that_came_during_a_pause_counts():
    program = Program()
    program.answers_pings = False
    program.run(89.0)  # the ping of the 30th second has one more second
    program.pong_at = program.now + 0.5
    program.answers_pings = True
    program.pause(3600)
    assert not program.core.is_gone
    program.run(program.now + 100)
    assert not program.core.is_gone


@pytest.mark.parametrize(("seconds", "slept"), [(20.0, 0.0), (0.0, 3600.0)], ids=["stopped", "suspended"])
def test_after_a_long_pause_a_dead_connection_is_found_at_once(seconds, slept):
    """In a suspend the monotonic clock may stand still: then the wall clock shows it."""
    program = Program()
    program.run(10.0)
    program.answers_pings = False
    program.slept += slept
    assert program.pause(seconds)
    began = program.now
    assert program.pings == [began]
    program.run(began + 60)
    assert program.core.is_gone
    assert program.now - began <= PROBE_SECONDS + 1


def test_after_a_long_pause_a_living_connection_stays():
    program = Program()
    program.run(10.0)
    assert program.pause(20.0)
    program.run(100.0)
    assert not program.core.is_gone


def test_a_short_pause_and_a_clock_set_back_are_no_reason_for_doubt():
    program = Program()
    program.run(10.0)
    program.slept -= 3600
    assert not program.pause(0.5)
    assert not program.pause(3.0)
    assert program.pings == []


def test_a_pause_during_a_probe_does_not_count():
    program = Program()
    program.answers_pings = False
    program.pause(20.0)
    program.pause(20.0)
    assert not program.core.is_gone
    program.pong_at = program.now + 0.1  # it lay in the socket, behind much else
    program.run(program.now + 20)
    assert not program.core.is_gone


def test_what_came_before_the_link_died_is_no_answer_to_the_ping_after_a_pause():
    program = Program()
    program.run(10.0)
    program.answers_pings = False
    program.pause(20.0)
    program.heard_at = program.now + 0.5
    began = program.now
    program.run(began + 60)
    assert program.core.is_gone
    assert program.now - began <= PROBE_SECONDS + 1


def test_a_publish_without_an_answer_is_a_reason_to_probe_and_is_sent_again():
    program = Program()
    program.run(10.3)
    program.answers_pings = False
    handle = program.publish()
    program.run(60.0)
    assert program.core.is_gone
    assert program.now - 10.3 <= SILENT_SECONDS + PROBE_SECONDS
    program.core.connection_lost()
    program.connect()
    (frame,) = program.core.data_to_send()
    assert wire.decode_client_message(frame).client_msg_id == handle
    program.ok(handle)
    assert program.outcomes() == [Published("a", None)]


def test_a_history_without_an_answer_is_a_reason_too():
    program = Program(extensions=["history_marker"])
    program.answers_pings = False
    program.core.subscribe(Query(live=False), program.now)
    program.run(60.0)
    assert program.core.is_gone and program.now <= SILENT_SECONDS + PROBE_SECONDS + 1


def test_a_relay_that_is_slow_but_there_is_kept():
    program = Program()
    program.publish()
    program.run(29.0)
    assert program.outcomes() == [] and not program.core.is_gone
    assert len(program.pings) < 12


def test_large_packets_ahead_of_a_ping_give_it_time():
    program = Program(ping_timeout=600)
    program.answers_pings = False
    program.publish(size=2**20)
    program.run(15.0)
    assert program.pings and not program.core.is_gone
    program.run(60.0)
    assert program.core.is_gone


def test_a_line_that_takes_long_for_one_large_packet_is_kept():
    program = Program()
    program.answers_pings = False  # the ping is behind the packet
    handle = program.publish(size=200_000)
    program.run(200_000 / 10_000)
    assert program.pings and not program.core.is_gone
    program.ok(handle)
    assert len(program.outcomes()) == 1


def test_a_relay_too_busy_for_pings_is_not_left_ever_so_often():
    program = Program()
    program.answers_pings = False
    program.publish(timeout=100.0)
    lost_at: list[float] = []
    while len(lost_at) < 4:
        program.run(1000.0)
        lost_at.append(program.now)
        program.core.connection_lost()
        program.connect()
        program.core.data_to_send()
    gaps = [after - before for before, after in pairwise(lost_at)]
    assert gaps == sorted(gaps) and gaps[-1] > 4 * PROBE_SECONDS


def test_nothing_is_judged_while_reading_is_paused():
    """A relay without cursors, and a consumer that takes nothing: the pong would not be read."""
    program = Program(queue_events=2, page_events=1)
    stream = program.core.subscribe(Query(), program.now)
    for number in range(2):
        event = wire.Event(packet=_raw(number), received_at=1, subscription_id=stream.wire_id)
        program.receive(event)
    assert program.core.must_pause
    program.answers_pings = False
    program.run(300.0)
    assert not program.core.is_gone


def test_the_end_asks_for_no_further_look():
    program = Program()
    program.run(10.0)
    program.core.fail(RequestTimeout("x", 1.0))
    program.look()
    assert program.core.get_timer() == math.inf
    assert isinstance(program.core.subscribe(Query(), program.now), Stream)


def _raw(number):
    return msgspec.Raw(b'{"n":%d}' % number)
