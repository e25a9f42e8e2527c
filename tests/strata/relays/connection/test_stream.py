"""Cases of a subscription that the model relay does not produce: refusals, silence, bad relays."""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec import Raw
from strata.protocol import wire
from strata.protocol.errors import RequestRefused, RequestTimeout
from strata.relays.connection.core import Core
from strata.relays.connection.options import Options
from strata.relays.connection.queue import QueuedEvent
from strata.relays.connection.stream import Phase
from strata.relays.connection.values import RESUME_MARGIN_SECONDS, Announced, LogReset, Query

OPTIONS = Options(queue_events=8, page_events=4, idle_timeout=3, history_timeout=30, backoff_base=0.5)
NOW = 100_000
"""The time at the start, in Unix seconds."""
MARKED = Announced(frozenset({"history_marker"}))


class Bench:
    def __init__(self, announced=MARKED, query=None, options=OPTIONS):
        self.core = Core(options, random=random.Random(0).random)
        self.core.connection_made(announced, 0, unix_now=NOW)
        self.state = self.core.subscribe(query or Query(), 0)

    def sent(self):
        return [wire.decode_client_message(frame) for frame in self.core.data_to_send()]

    def receive(self, message, now=0.0):
        self.core.receive_message(wire.encode(message), now)

    def event(self, cursor=None, now=0.0, wire_id=None, body=b"{}", received_at=NOW):
        wire_id = wire_id or self.state.wire_id
        message = wire.Event(
            packet=Raw(body), received_at=received_at, subscription_id=wire_id, cursor=cursor
        )
        self.receive(message, now)

    def end(self, cursor, wire_id=None):
        wire_id = wire_id or self.state.wire_id
        assert wire_id is not None
        self.receive(wire.EndOfHistory(subscription_id=wire_id, complete=False, cursor=cursor))

    def queued(self):
        taken = []
        while (event := self.state.take()) is not None:
            taken.append(event.cursor)
            self.core.taken(self.state, delivered=True, now=0)
        return taken


@pytest.mark.req("R-339")
def test_every_subscribe_has_its_own_id_and_events_of_an_old_one_are_ignored():
    bench = Bench()
    (first,) = bench.sent()
    bench.event("c1")
    bench.core.connection_lost()
    bench.core.connection_made(MARKED, 1)
    (second,) = bench.sent()
    assert second.subscription_id != first.subscription_id
    assert second.filters.cursor == "c1"
    bench.event("c9", wire_id=first.subscription_id)
    assert bench.queued() == ["c1"]
    assert bench.core.statistics.events_unclaimed == 1


@pytest.mark.req("R-338")
def test_a_passing_refusal_is_tried_again_when_the_relay_said():
    bench = Bench()
    (first,) = bench.sent()
    bench.receive(
        wire.Error(code="rate_limited", reason="-", subscription_id=first.subscription_id, retry_after=4), 1
    )
    bench.core.handle_timer(4.99)
    assert bench.sent() == []
    bench.core.handle_timer(bench.core.get_timer())
    (second,) = bench.sent()
    assert second.filters == first.filters


def lost_place(bench, cursor=None, **members):
    bench.receive(
        wire.Error(
            code="invalid_cursor",
            reason="-",
            detail="log_reset",
            subscription_id=bench.state.wire_id,
            cursor=cursor,
            **members,
        )
    )


@pytest.mark.req("R-339")
def test_a_log_that_has_lost_its_end_is_told_between_the_packets_and_read_on_from_the_last_good_place():
    bench = Bench()
    bench.sent()
    bench.event("c1")
    bench.event("c2")
    bench.core.connection_lost()
    bench.core.connection_made(MARKED, 1)
    assert bench.sent()[-1].filters.cursor == "c2"
    bench.core.changes()
    lost_place(bench, "c0")
    assert bench.state in bench.core.changes()
    (again,) = bench.sent()
    assert (again.filters.cursor, again.filters.since) == ("c0", None)
    bench.event("d1")
    taken = []
    while (event := bench.state.take()) is not None:
        taken.append(event if isinstance(event, LogReset) else event.cursor)
        bench.core.taken(bench.state, delivered=not isinstance(event, LogReset), now=1)
    assert taken == ["c1", "c2", LogReset(lost="c2", cursor="c0", since=None), "d1"]
    assert bench.core.statistics.log_resets == 1


@pytest.mark.req("R-339")
def test_without_a_good_place_reading_goes_on_from_a_time_no_later_than_what_was_lost():
    bench = Bench()
    bench.sent()
    bench.event("c1")
    bench.core.connection_lost()
    bench.core.connection_made(MARKED, 1)
    bench.sent()
    lost_place(bench)
    (again,) = bench.sent()
    assert again.filters.cursor is None and again.filters.since == 100_000 - 86_700
    bench.state.take()
    assert bench.state.take() == LogReset(lost="c1", cursor=None, since=100_000 - 86_700)


def test_a_relay_that_loses_every_place_is_left():
    bench = Bench(query=Query(cursor="c0"))
    for turn in range(10):
        if bench.state.phase is Phase.ENDED:
            break
        lost_place(bench, f"c{turn}")
    assert isinstance(bench.state.error, RequestRefused) and bench.state.error.code == "invalid_cursor"
    assert bench.core.statistics.log_resets == 3


@pytest.mark.req("R-197", "R-201")
@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("unauthenticated", {}),
        ("zzz", {}),
        ("rate_limited", {"detail": "too_many_subscriptions"}),
        ("rate_limited", {"detail": "too_many_filter_bytes"}),
    ],
)
def test_a_final_refusal_ends_it(code, extra):
    bench = Bench()
    bench.receive(wire.Error(code=code, reason="-", subscription_id=bench.state.wire_id, **extra))
    assert bench.state.phase is Phase.ENDED
    assert isinstance(bench.state.error, RequestRefused) and bench.state.error.code == code


def test_a_cursor_of_the_callers_without_a_time_beside_it_is_not_guessed_around():
    bench = Bench(query=Query(cursor="mine"))
    bench.receive(wire.Error(code="invalid_cursor", reason="-", subscription_id=bench.state.wire_id))
    assert isinstance(bench.state.error, RequestRefused)


@pytest.mark.req("R-339")
@pytest.mark.parametrize(("since", "expected"), [(None, 50), (10, 50), (70, 70)])
def test_an_invalid_cursor_falls_back_to_the_later_of_the_times_known(since, expected):
    bench = Bench(query=Query(cursor="mine", cursor_fallback_since=50, since=since))
    bench.sent()
    bench.receive(wire.Error(code="invalid_cursor", reason="-", subscription_id=bench.state.wire_id))
    (again,) = bench.sent()
    assert again.filters.cursor is None and again.filters.since == expected


@pytest.mark.req("R-339")
def test_after_events_the_fallback_reaches_back_a_day_and_five_minutes():
    bench = Bench()
    bench.event("c1")
    bench.core.connection_lost()
    bench.core.connection_made(MARKED, 1)
    bench.sent()
    bench.receive(wire.Error(code="invalid_cursor", reason="-", subscription_id=bench.state.wire_id), 1)
    (again,) = bench.sent()
    assert again.filters.since == NOW - 86_400 - 300 and again.filters.cursor is None
    bench.event("d1")
    assert [event.turn for event in bench.state.waiting()] == [0, 1]


@pytest.mark.req("R-339")
def test_a_relay_whose_clock_was_ahead_is_read_from_when_its_packets_came():
    bench = Bench()
    bench.event("c1", now=7, received_at=NOW + 10 * 86_400)
    bench.sent()
    bench.core.connection_lost()
    bench.core.connection_made(MARKED, 20, unix_now=NOW + 20)
    bench.sent()
    bench.receive(wire.Error(code="invalid_cursor", reason="-", subscription_id=bench.state.wire_id), 20)
    (again,) = bench.sent()
    assert again.filters.since == NOW + 7 - 86_400 - 300


@pytest.mark.req("R-165")
def test_a_promised_end_that_does_not_come_is_a_timeout():
    bench = Bench(query=Query(live=False))
    bench.event("c1", now=10)
    bench.core.handle_timer(30)
    assert bench.state.phase is Phase.HISTORY, "silence counts from the last event"
    bench.core.handle_timer(40)
    assert isinstance(bench.state.error, RequestTimeout)
    assert bench.queued() == ["c1"], "what had arrived can still be taken"


def test_a_relay_that_says_more_without_moving_is_not_asked_for_ever():
    bench = Bench(query=Query(live=False, cursor="c1"))
    bench.end("c1")
    assert bench.state.phase is Phase.ENDED


@pytest.mark.parametrize("places", ["ab", "xyzabc"])
def test_a_relay_whose_pages_lead_back_is_not_asked_for_ever(places: str):
    bench = Bench(query=Query(live=False))
    for place in itertools.islice(itertools.cycle(places), 30):
        if bench.state.phase is Phase.ENDED:
            break
        bench.end(place)
    assert bench.state.phase is Phase.ENDED


def test_more_than_a_page_belongs_to_the_next_page():
    """A live event in the middle of marked history: its cursor would skip what lies between (A-044)."""
    bench = Bench()
    for n in range(4):
        bench.event(f"{n}")
    bench.event("99")
    assert bench.queued() == ["0", "1", "2", "3"]
    assert bench.sent()[-1].filters.cursor == "3"


def test_the_next_page_waits_for_room():
    bench = Bench(query=Query(live=False))
    for page in range(2):
        asked_as = bench.state.wire_id  # the second page fills the queue, so its end comes too late
        for n in range(4):
            bench.event(f"{page}.{n}")
        bench.end(f"{page}.3", asked_as)
    sent = bench.sent()
    assert [type(message).__name__ for message in sent] == [
        "Subscribe", "Unsubscribe", "Subscribe", "Unsubscribe",
    ]  # fmt: skip
    assert bench.state.phase is Phase.WAITING
    for _ in range(4):
        assert bench.sent() == []
        bench.state.take()
        bench.core.taken(bench.state, delivered=True, now=0)
    (third,) = bench.sent()
    assert third.filters.cursor == "1.3"


def test_bytes_bound_the_queue_as_events_do():
    options = Options(queue_events=1000, page_events=4, queue_bytes=10_000)
    bench = Bench(Announced(frozenset({"gapless"})), options=options)
    for n in range(100):
        bench.event(f"{n}", body=b'"%s"' % (b"x" * 1000)) if bench.state.wire_id else None
    assert bench.state.phase is Phase.WAITING
    assert len(bench.queued()) == 8


@pytest.mark.req("R-143")
def test_queries_that_no_relay_could_serve_are_refused():
    for bad in (
        {"limit": 0, "live": False},
        {"limit": 5},
        {"order": "desc"},
        {"until": 5},
        {"packet_ids": ("0x12",)},
    ):
        with pytest.raises(ValueError, match=r"limit|packet id"):
            Query(**bad)
    assert Query().filters(Announced(), cursor=None, since=None, limit=None) == wire.Filters()


@pytest.mark.req("R-168", "R-139")
def test_bounds_on_receipt_are_the_relays_to_apply_where_it_can():
    """It filters by its own time of receipt, however old the packet; the event does not show that time."""
    bench = Bench(Announced(frozenset({"received_range", "history_marker"})), Query(received_since=NOW))
    (asked,) = bench.sent()
    assert (asked.filters.received_since, asked.filters.since) == (NOW, None)
    bench.event("c1", received_at=NOW - 5000)
    assert isinstance(event := bench.state.take(), QueuedEvent) and event.by_receipt
    bench.core.connection_lost()
    bench.core.connection_made(MARKED, 1)
    (asked,) = bench.sent()
    assert (asked.filters.received_since, asked.filters.since) == (None, NOW - RESUME_MARGIN_SECONDS)
    bench.event("c2")
    assert isinstance(event := bench.state.take(), QueuedEvent) and not event.by_receipt


def test_a_plain_relay_is_never_asked_for_more_than_was_asked():
    (asked,) = Bench(query=Query(received_since=NOW, since=NOW - 5)).sent()
    assert asked.filters.since == NOW - 5
    (asked,) = Bench(query=Query(received_since=5)).sent()
    assert asked.filters.since == 0
