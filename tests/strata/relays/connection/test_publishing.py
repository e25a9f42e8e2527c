"""Publishes in progress as plain functions: frames out, answers in, `now` chosen by the test."""

from __future__ import annotations

import random

import msgspec
import pytest
from strata.protocol import wire
from strata.protocol.errors import Closed, RequestRefused, RequestTimeout
from strata.relays.connection.core import Core
from strata.relays.connection.options import Options
from strata.relays.connection.publishing import PublishSettled
from strata.relays.connection.values import Announced, Published

OPTIONS = Options(ack_timeout=5, backoff_base=0.5)


class Bench:
    def __init__(self, seed=0):
        self.core = Core(OPTIONS, random=random.Random(seed).random)
        self.core.connection_made(Announced(), 0)

    def publish(self, name, timeout=100.0, now=0.0):
        return self.core.publish(name, b'{"packet":"%s"}' % name.encode(), timeout=timeout, now=now)

    def sent(self):
        return [wire.decode_client_message(frame).client_msg_id for frame in self.core.data_to_send()]

    def ok(self, handle, name, now=1.0, **extra):
        message = wire.Ok(packet_id=name, status="ACCEPTED", client_msg_id=handle, **extra)
        self.core.receive_message(wire.encode(message), now)

    def error(self, handle, code, now=1.0, **extra):
        message = wire.Error(code=code, reason="because", client_msg_id=handle, **extra)
        self.core.receive_message(wire.encode(message), now)

    def settled(self):
        return {c.handle: c.outcome for c in self.core.changes() if isinstance(c, PublishSettled)}

    def wait(self):
        """Go to the next moment that the core asks for."""
        now = self.core.get_timer()
        self.core.handle_timer(now)
        return now


@pytest.fixture
def bench():
    return Bench()


def test_an_ok_settles_its_publish_alone(bench):
    a, b = bench.publish("a"), bench.publish("b")
    assert bench.sent() == [a, b]
    bench.ok(b, "b", received_at=7, duplicate=True)
    assert bench.settled() == {b: Published("b", 7, duplicate=True)}
    bench.ok(a, "a")
    assert bench.settled() == {a: Published("a", None)}


def test_a_packet_that_is_said_to_repeat_itself_is_a_duplicate_like_any_other(bench):
    handle = bench.publish("a")
    bench.ok(handle, "a", duplicate=True, duplicate_of="a")
    assert bench.settled() == {handle: Published("a", None, duplicate=True)}


@pytest.mark.req("R-190")
def test_queued_is_success_and_told_apart(bench):
    handle = bench.publish("a")
    bench.core.receive_message(wire.encode(wire.Ok(packet_id="a", status="QUEUED", client_msg_id=handle)), 1)
    assert bench.settled() == {handle: Published("a", None, queued=True)}


def test_a_plain_relay_need_not_echo_the_request_id(bench):
    handle = bench.publish("a")
    bench.ok(None, "a")
    assert bench.settled() == {handle: Published("a", None)}


@pytest.mark.req("R-193", "R-194")
def test_without_an_answer_the_identical_frame_goes_out_again(bench):
    handle = bench.publish("a")
    (first,) = bench.core.data_to_send()
    assert bench.wait() == 5
    assert bench.core.data_to_send() == [first]
    assert bench.settled() == {}
    bench.core.handle_timer(100)
    assert isinstance(bench.settled()[handle], RequestTimeout)
    assert bench.core.get_timer() == float("inf")


@pytest.mark.req("R-194")
def test_a_new_connection_repeats_everything_unanswered_in_order(bench):
    handles = [bench.publish(name) for name in "abc"]
    frames = bench.core.data_to_send()
    bench.ok(handles[1], "b")
    bench.core.connection_lost()
    assert bench.core.data_to_send() == []
    late = bench.publish("d", now=2)
    bench.core.connection_made(Announced(), 3)
    again = bench.core.data_to_send()
    assert again[:2] == [frames[0], frames[2]]
    assert wire.decode_client_message(again[2]).client_msg_id == late


@pytest.mark.req("R-197", "R-201")
@pytest.mark.parametrize("code", ["blocked_author", "invalid_signature", "unauthenticated", "zzz"])
def test_a_permanent_refusal_is_not_tried_again(bench, code):
    handle = bench.publish("a")
    bench.sent()
    bench.error(handle, code)
    refusal = bench.settled()[handle]
    assert isinstance(refusal, RequestRefused) and refusal.code == code
    assert bench.sent() == []


@pytest.mark.req("R-197", "R-201", "R-338")
@pytest.mark.parametrize(("code", "retry_after"), [("rate_limited", 3), ("zzz", 3), ("rate_limited", 2.5)])
def test_a_relay_that_says_when_is_asked_again_then_and_not_before(code, retry_after):
    moments = set()
    for seed in range(20):
        bench = Bench(seed)
        handle = bench.publish("a")
        frames = bench.core.data_to_send()
        bench.error(handle, code, now=1, retry_after=retry_after)
        bench.core.handle_timer(3.999)
        assert bench.sent() == [] and bench.settled() == {}
        moments.add(bench.wait())
        assert bench.core.data_to_send() == frames
    assert min(moments) >= 4 and max(moments) <= 4.6 and len(moments) == 20


@pytest.mark.req("R-338")
def test_while_the_relay_wants_quiet_every_publish_waits_in_its_order(bench):
    a, b = bench.publish("a"), bench.publish("b")
    bench.sent()
    bench.error(a, "rate_limited", now=1, retry_after=10)
    c = bench.publish("c", now=2)
    assert bench.sent() == []
    bench.ok(b, "b", now=2)
    bench.core.handle_timer(13.0)
    assert bench.sent() == [a, c]


def test_a_refusal_that_cannot_pass_in_time_is_told_at_once(bench):
    handle = bench.publish("a", timeout=5)
    bench.error(handle, "rate_limited", now=1, retry_after=60)
    refusal = bench.settled()[handle]
    assert isinstance(refusal, RequestRefused) and refusal.retry_after == 60


@pytest.mark.req("R-338")
def test_a_relay_that_wants_quiet_for_longer_than_a_publish_has_is_left_in_quiet(bench):
    a = bench.publish("a", timeout=5)
    bench.sent()
    bench.error(a, "rate_limited", now=1, retry_after=60)
    b, c = bench.publish("b", timeout=5, now=2), bench.publish("c", timeout=100, now=2)
    assert bench.sent() == [], "nothing goes out before the relay takes it"
    refusal = bench.settled()[b]
    assert isinstance(refusal, RequestRefused) and refusal.retry_after in range(59, 72)
    bench.core.handle_timer(60.9)
    assert bench.sent() == []
    bench.core.handle_timer(74)
    assert bench.sent() == [c]
    d = bench.publish("d", timeout=5, now=75)
    assert bench.sent() == [d]


@pytest.mark.parametrize("timeout", [5, 100])
def test_a_budget_of_one_kind_of_packets_holds_up_no_others(bench, timeout):
    a = bench.publish("a", timeout=timeout)
    bench.sent()
    bench.error(a, "rate_limited", now=1, detail="trust_budget", retry_after=60)
    b = bench.publish("b", timeout=5, now=2)
    assert bench.sent() == [b]


@pytest.mark.parametrize("detail", ["publish_limit", "memory_limit"])
def test_a_limit_of_the_session_holds_up_all(bench, detail):
    a = bench.publish("a", timeout=5)
    bench.sent()
    bench.error(a, "rate_limited", now=1, detail=detail, retry_after=60)
    bench.publish("b", timeout=5, now=2)
    assert bench.sent() == []


def test_a_wait_that_nobody_has_time_for_holds_up_no_other_packet(bench):
    a = bench.publish("a", timeout=5)
    bench.sent()
    bench.error(a, "rate_limited", now=1, retry_after=10**9)
    b = bench.publish("b", timeout=5, now=2)
    assert bench.sent() == [b]


def test_an_internal_error_is_tried_again_with_growing_waits(bench):
    handle = bench.publish("a", timeout=1000)
    now = 0.0
    assert bench.sent() == [handle]
    for attempt in range(8):
        bench.error(handle, "internal_error", now=now)
        then = now
        while not (again := bench.sent()):
            then = bench.wait()  # may wake early, never late
        assert again == [handle]
        assert 0 <= then - now <= min(30, 0.5 * 2**attempt)
        now = then
    bench.ok(handle, "a")
    assert bench.settled() == {handle: Published("a", None)}


def test_a_second_answer_is_ignored(bench):
    handle = bench.publish("a")
    bench.error(handle, "internal_error")
    bench.error(handle, "blocked_author")  # for the same sending, which was answered already
    assert bench.settled() == {}
    bench.ok(handle, "a")
    bench.ok(handle, "a")
    assert bench.settled() == {handle: Published("a", None)}
    assert bench.core.statistics.messages_invalid == 0


def test_a_cancelled_publish_leaves_nothing(bench):
    handle = bench.publish("a")
    bench.core.cancel_publish(handle)
    bench.ok(handle, "a")
    bench.core.handle_timer(1e9)
    assert bench.settled() == {}
    assert bench.core.get_timer() == float("inf")


def test_fail_ends_everything(bench):
    handle = bench.publish("a")
    error = Closed("done")
    bench.core.fail(error)
    assert bench.settled() == {handle: error}
    assert bench.core.get_timer() == float("inf")


@pytest.mark.req("R-191")
def test_the_packet_travels_as_its_bytes(bench):
    bench.core.publish("a", b'{ "as" :"is"}', timeout=1, now=0)
    (frame,) = bench.core.data_to_send()
    assert b'{ "as" :"is"}' in frame
    assert msgspec.json.decode(frame)["type"] == "PUBLISH"
