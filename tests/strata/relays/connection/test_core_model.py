"""The core against a naive relay over pipes that lose everything in flight when they are cut."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strata.relays.connection.core import Core
from strata.relays.connection.inspection import Inspector
from strata.relays.connection.options import Options
from strata.relays.connection.publishing import PublishSettled
from strata.relays.connection.queue import QueuedEvent
from strata.relays.connection.stream import Phase
from strata.relays.connection.values import Announced, Published, Query

from tests.support.relays import Session

OPTIONS = Options(
    queue_events=8,
    page_events=4,
    dedup_packets=64,
    idle_timeout=1,
    history_timeout=50,
    ack_timeout=5,
    publish_timeout=1e6,
    backoff_base=0.1,
)
EXTENDED = ("packet_ids", "received_range", "history_marker", "gapless")


class World:
    """A client core, a model relay, and the two pipes between them."""

    def __init__(self, relay, make, query, seed=0, options=OPTIONS):
        self.relay = relay
        self.make = make
        self.now = 0.0
        self.core = Core(options, random=random.Random(seed).random)
        self.session: Session | None = None
        self.up: list[bytes] = []
        self.made = 0
        self.settled: list[PublishSettled] = []
        self.expected_publishes = 0
        self.query = query
        self.got: list[str] = []
        self.state = self.core.subscribe(query, self.now)
        self.inspector = Inspector(query, options, self.core.statistics)

    def paused(self) -> bool:
        return self.core.must_pause

    def connect(self):
        if self.session is None:
            self.session = self.relay.connect()
            self.core.connection_made(Announced(self.relay.extensions), self.now)
            self.after()

    def cut(self):
        if self.session is not None:
            self.relay.disconnect(self.session)
            self.session = None
            self.up.clear()
            self.core.connection_lost()
            self.after()

    def after(self):
        self.up += self.core.data_to_send()
        self.settled += [change for change in self.core.changes() if isinstance(change, PublishSettled)]

    def to_relay(self, count):
        for _ in range(min(count, len(self.up))):
            self.relay.receive(self.session, self.up.pop(0))

    def to_client(self, count):
        if self.session is None:
            return
        for _ in range(count):
            if not self.session.outbox or self.core.must_pause:
                break
            self.core.receive_message(self.session.outbox.pop(0), self.now)
            self.after()

    def consume(self, count):
        for _ in range(count):
            event = self.state.take()
            if event is None:
                break
            assert isinstance(event, QueuedEvent)
            delivery = self.inspector.inspect(event)
            if delivery is not None:
                self.got.append(delivery.packet.packet_id)
            self.core.taken(self.state, delivered=delivery is not None, now=self.now)
            self.after()

    def foreign(self, count):
        for _ in range(count):
            self.relay.append(self.make(self.made))
            self.made += 1

    def publish(self):
        packet = self.make(self.made)
        self.made += 1
        self.expected_publishes += 1
        self.core.publish(packet.packet_id, packet.canonical, timeout=1e6, now=self.now)
        self.after()

    def advance(self, seconds):
        self.now += seconds
        if self.core.get_timer() <= self.now:
            self.core.handle_timer(self.now)
            self.after()

    def settle(self):
        """Run until nothing more can happen."""
        self.connect()
        assert self.session is not None
        for _ in range(2000):
            before = (len(self.got), len(self.settled), self.now)
            self.to_relay(100)
            self.to_client(100)
            self.consume(100)
            quiet = (
                not self.up and not self.session.outbox and before[:2] == (len(self.got), len(self.settled))
            )
            timer = self.core.get_timer()
            if quiet:
                if timer == math.inf or timer > self.now + 1e5:
                    return
                self.advance(max(timer - self.now, 0))
        raise AssertionError("never at rest")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("foreign"), st.integers(1, 6)),
        st.tuples(st.just("to_relay"), st.integers(1, 6)),
        st.tuples(st.just("to_client"), st.integers(1, 9)),
        st.tuples(st.just("consume"), st.integers(1, 9)),
        st.tuples(st.just("advance"), st.sampled_from([0.3, 1.5, 6.0])),
        st.tuples(st.just("publish")),
        st.tuples(st.just("cut")),
        st.tuples(st.just("connect")),
        st.tuples(st.just("connect")),
    ),
    max_size=70,
)
KINDS = st.sampled_from(
    [
        (EXTENDED, False, 500),
        (("history_marker",), False, 3),
        ((), False, 500),
        (("history_marker",), True, 500),
        ((), True, 500),
        ((), False, 2),  # a plain relay that gives less than requested
    ]
)


@pytest.mark.req("R-116", "R-138", "R-194", "R-339")
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kind=KINDS, steps=STEPS, stored=st.integers(0, 20), seed=st.integers(0, 9))
def test_every_packet_once_and_in_order_whatever_is_cut(naive_relay, make, kind, steps, stored, seed):
    extensions, live_cursors, max_limit = kind
    relay = naive_relay(extensions, max_limit=max_limit, live_cursors=live_cursors)
    world = World(relay, make, Query(), seed)
    world.foreign(stored)
    world.connect()
    for name, *arguments in steps:
        if name in ("to_relay",) and world.session is None:
            continue
        getattr(world, name)(*arguments)
    world.settle()
    assert world.got == [packet.packet_id for packet, _ in relay.log]
    # Every publish ended once, successfully, and was stored once.
    assert len(world.settled) == world.expected_publishes
    for change in world.settled:
        assert isinstance(change.outcome, Published)
        assert change.outcome.packet_id in world.got
    assert len(relay.log) == world.made


@pytest.mark.req("R-154", "R-166")
@settings(max_examples=150, deadline=None)
@given(
    kind=KINDS,
    order=st.sampled_from(["asc", "desc"]),
    limit=st.none() | st.integers(1, 30),
    stored=st.integers(0, 25),
    steps=st.lists(st.tuples(st.sampled_from(["cut", "connect", "to_client", "consume"]), st.integers(1, 5))),
)
def test_a_bounded_query_ends_with_exactly_what_was_asked(
    naive_relay, make, kind, order, limit, stored, steps
):
    extensions, live_cursors, max_limit = kind
    relay = naive_relay(extensions, max_limit=max_limit, live_cursors=live_cursors)
    wanted = [make(n).packet_id for n in range(0, stored, 2)]
    query = Query(packet_ids=tuple(wanted) or (make(99).packet_id,), live=False, order=order, limit=limit)
    world = World(relay, make, query)
    world.foreign(stored)
    world.connect()
    for name, count in steps:
        world.to_relay(count) if world.session else None
        getattr(world, name)(*([count] if name in ("to_client", "consume") else []))
    world.settle()
    expected = wanted[:] if order == "asc" else wanted[::-1]
    assert world.got == expected[:limit]
    assert world.state.phase is Phase.ENDED and world.state.error is None


@pytest.mark.req("R-339")
@pytest.mark.parametrize(
    "extensions", [EXTENDED, ("history_marker",), ()], ids=["gapless", "marked", "plain"]
)
def test_an_invalid_cursor_is_replaced_by_since_without_repeats(naive_relay, make, extensions):
    relay = naive_relay(extensions)
    world = World(relay, make, Query())
    world.foreign(10)
    world.settle()
    world.cut()
    relay.generation += 1
    world.foreign(5)
    world.settle()
    assert world.got == [make(n).packet_id for n in range(15)]
    assert world.core.statistics.refusals == {"invalid_cursor": 1}
    assert world.core.statistics.events_repeated == 10


def test_the_overlap_on_a_plain_relay_never_outgrows_the_window(naive_relay, make):
    """Many windows of live events without cursors, then a cut: the position has kept up."""
    relay = naive_relay()
    world = World(relay, make, Query())
    world.settle()
    for _ in range(60):
        world.foreign(5)
        world.settle()
    world.cut()
    world.foreign(3)
    world.settle()
    assert world.got == [make(n).packet_id for n in range(303)]


def test_a_slow_consumer_leaves_the_feed_and_misses_nothing(naive_relay, make):
    relay = naive_relay(EXTENDED)
    world = World(relay, make, Query())
    world.settle()
    world.foreign(100)
    world.to_client(1000)
    world.to_relay(10)
    assert relay.sessions[0].subscriptions == {}
    assert not world.paused()
    # Nothing else is held up by it.
    world.publish()
    world.to_relay(10)
    world.to_client(1000)
    assert len(world.settled) == 1
    world.settle()
    assert world.got == [make(n).packet_id for n in range(101)]
    assert world.core.statistics.subscriptions_deferred == 1, "and it has caught up by pages"


def test_without_any_cursor_the_connection_pauses_instead(naive_relay, make):
    relay = naive_relay()
    world = World(relay, make, Query())
    world.settle()  # an empty history gives no cursor
    world.foreign(20)
    world.to_client(100)
    assert world.paused()
    world.consume(1)
    assert not world.paused()
    world.settle()
    assert world.got == [make(n).packet_id for n in range(20)]


def test_silence_says_nothing_while_nobody_listens(naive_relay, make):
    """A paused connection receives nothing: this must not count as the end of another query's history."""
    relay = naive_relay()
    world = World(relay, make, Query(types=("POST",)))
    world.settle()  # an empty history gives no cursor
    relay.append(make(99, "NOTE"))
    world.foreign(20)
    quick = world.core.subscribe(Query(types=("NOTE",), live=False), world.now)
    world.after()
    world.to_client(100)
    world.to_relay(100)
    assert world.paused() and relay.sessions[0].outbox
    for _ in range(3):
        world.advance(1.5)
        assert quick.phase is Phase.HISTORY
    while world.paused():
        world.consume(1)
        world.to_client(1)
    world.advance(0.9)
    assert quick.phase is Phase.HISTORY, "and the silence is counted anew"
    world.settle()
    event = quick.take()
    assert isinstance(event, QueuedEvent)
    delivery = Inspector(quick.query, OPTIONS, world.core.statistics).inspect(event)
    assert delivery is not None and delivery.packet == make(99, "NOTE")
    assert world.got == [make(n).packet_id for n in range(20)]
