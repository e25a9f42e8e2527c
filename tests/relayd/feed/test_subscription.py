"""The seams between history, catching up and live, against a naive model of what each reader must see.

Everything runs without I/O: one list is the log, another is what a reader got. Hypothesis drives random
interleavings of commits, subscriptions, single page reads, full queues and replacements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from strata.protocol.wire import EndOfHistory, Event, Filters, decode_relay_message

from relayd.cursor import CursorCodec
from relayd.feed.fanout import Fanout
from relayd.feed.filters import CompiledFilter, compile_filter
from relayd.feed.subscription import FeedPhase, FeedSubscription, SubscriptionRequest
from relayd.store.types import LogEntry, NewPacket, StoredPacket

CODEC = CursorCodec(bytes(32))
NOW = 1000
TYPES = ["A", "B"]


def entry(sequence: int, kind: str, expired: bool) -> LogEntry:
    body = b'{"n":%d}' % sequence
    # Expired a second ago, or in the last second; every other packet never expires.
    expires_at = NOW - 1 if expired else NOW if sequence % 2 else None
    packet = NewPacket(sequence.to_bytes(32, "big"), "did:strata:x", kind, 900, expires_at, body)
    return LogEntry(sequence, 900, packet)


def is_over(packet: NewPacket) -> bool:
    return packet.expires_at is not None and packet.expires_at < NOW


def frames_of(data: bytes) -> list[bytes]:
    """Split unmasked text frames."""
    payloads = []
    while data:
        length, start = data[1], 2
        if length == 126:
            length, start = int.from_bytes(data[2:4], "big"), 4
        payloads.append(data[start : start + length])
        data = data[start + length :]
    return payloads


@dataclass
class Reader:
    """One subscription and its sink, which can be full."""

    subscription: FeedSubscription
    request: SubscriptionRequest
    opened_at: int = 0
    full: bool = False
    closed: bool = False
    events: list[tuple[int, str | None]] = field(default_factory=list)
    marker: EndOfHistory | None = None
    history: int = 0

    def take(self, data: bytes) -> None:
        for payload in frames_of(data):
            message = decode_relay_message(payload)
            if isinstance(message, EndOfHistory):
                assert self.marker is None, "one marker at most"
                self.marker = message
                self.history = len(self.events)
                continue
            assert isinstance(message, Event)
            assert message.subscription_id == self.request.subscription_id
            self.events.append((int(re.findall(rb"\d+", bytes(message.packet))[0]), message.cursor))

    def deliver(self, frames: bytes, events: int) -> bool:
        if self.full:
            return False
        assert not self.closed, "nothing after the end"
        self.take(frames)
        return True

    def fell_behind(self, subscription: FeedSubscription) -> None:
        assert subscription is self.subscription


class Seams(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[LogEntry] = []
        self.fanout = Fanout(CODEC, 0)
        self.readers: list[Reader] = []

    def matching(self, filter: CompiledFilter) -> list[int]:
        return [e.sequence for e in self.log if not is_over(e.packet) and filter.matches(e)]

    @rule(kinds=st.lists(st.tuples(st.sampled_from(TYPES), st.booleans()), min_size=1, max_size=4))
    def commit(self, kinds):
        base = len(self.log)
        batch = [entry(base + i + 1, kind, expired) for i, (kind, expired) in enumerate(kinds)]
        self.log += batch
        self.fanout.dispatch(batch, NOW)

    @rule(
        kinds=st.lists(st.sampled_from(TYPES), max_size=2),
        limit=st.one_of(st.none(), st.integers(0, 3)),
        ascending=st.booleans(),
        cursor=st.one_of(st.none(), st.integers(0, 12)),
    )
    def subscribe(self, kinds, limit, ascending, cursor):
        if limit is None:
            ascending = True  # gapless
        request = SubscriptionRequest(
            subscription_id=f"s{len(self.readers)}",
            filter=compile_filter(Filters(types=kinds), max_values=9),
            limit=limit,
            ascending=ascending,
            cursor=None if cursor is None else min(cursor, len(self.log)),
            history_marker=True,
        )
        reader = Reader(FeedSubscription(request, CODEC), request)
        reader.subscription.start(self.fanout.position)
        reader.opened_at = self.fanout.position
        self.readers.append(reader)

    @rule(which=st.integers(0, 20), rows=st.integers(1, 4), looks=st.integers(1, 12))
    def step(self, which, rows, looks):
        waiting = [r for r in self.readers if r.subscription.phase is not FeedPhase.LIVE and not r.closed]
        if waiting and not waiting[which % len(waiting)].full:
            self.read_once(waiting[which % len(waiting)], rows, looks)

    def read_once(self, reader: Reader, rows: int, looks: int = 1000) -> None:
        """`looks`: the number of packets that the store examines before it answers with what it has."""
        subscription = reader.subscription
        if subscription.phase is FeedPhase.CATCHING_UP and rows == 1:
            entries = self.fanout.recent_after(subscription.position)
            if entries is not None:
                reader.take(subscription.entries_read(entries, NOW, self.fanout.position, "rewrite")[0])
        read = subscription.next_read(self.fanout.position, rows)
        if read is None:
            self.fanout.join(subscription, reader)
            return
        query = read.query
        span = [
            e
            for e in self.log
            if query.after < e.sequence <= (query.up_to if query.up_to is not None else 1 << 60)
        ]
        if not query.ascending:
            span.reverse()
        found = [
            StoredPacket(e.sequence, e.received_at, e.packet.body)
            for e in span[:looks]
            if not is_over(e.packet) and subscription.filter.matches(e)
        ]
        page = found[: read.limit]
        cut = len(page) < len(found) or len(page) == read.limit
        reached = span[looks - 1].sequence if len(span) > looks and not cut else None
        exhausted = reached is None and len(page) == len(found) and len(span) <= looks
        reader.take(subscription.rows_read(read, page, exhausted, "rewrite", reached)[0])

    @rule(which=st.integers(0, 20), rows=st.integers(1, 4))
    def catch_up(self, which, rows):
        """Otherwise hardly any becomes live, and the feed finds none full."""
        waiting = [r for r in self.readers if not r.closed and not r.full]
        if waiting:
            self.read_to_live(waiting[which % len(waiting)], rows)

    def read_to_live(self, reader: Reader, rows: int) -> None:
        for _ in range(2 * len(self.log) + 4):  # each page has a row or leads into the next phase
            if reader.subscription.phase is FeedPhase.LIVE:
                break
            self.read_once(reader, rows)

    @rule(which=st.integers(0, 20), full=st.booleans())
    def fill_or_drain(self, which, full):
        if self.readers:
            self.readers[which % len(self.readers)].full = full

    @rule(which=st.integers(0, 20))
    def unsubscribe(self, which):
        open_now = [r for r in self.readers if not r.closed]
        if open_now:
            reader = open_now[which % len(open_now)]
            self.fanout.leave(reader.subscription)
            reader.subscription.close()
            reader.closed = True

    @invariant()
    def never_twice_and_always_true(self):
        for reader in self.readers:
            history, live = self.expected(reader)
            got = [n for n, _ in reader.events]
            assert got == (history + live)[: len(got)]

    def expected(self, reader: Reader) -> tuple[list[int], list[int]]:
        request = reader.request
        matching = self.matching(request.filter)
        stored = [n for n in matching if n <= reader.opened_at]
        if not request.ascending:
            stored.reverse()
        if request.cursor is not None:
            stored = [n for n in stored if (n > request.cursor if request.ascending else n < request.cursor)]
        history = stored if request.limit is None else stored[: request.limit]
        return history, [n for n in matching if n > reader.opened_at]

    def teardown(self):
        for reader in self.readers:
            reader.full = False
        for reader in self.readers:
            if reader.closed:
                continue
            self.read_to_live(reader, 2)
            assert reader.subscription.phase is FeedPhase.LIVE, "reading comes to its end"
            history, live = self.expected(reader)
            assert [n for n, _ in reader.events] == history + live
            self.check_cursors(reader, history, live)

    def check_cursors(self, reader: Reader, history: list[int], live: list[int]) -> None:
        request = reader.request
        assert reader.marker is not None and reader.history == len(history)
        matching = self.matching(request.filter)
        outstanding = request.limit is not None and len(history) < len(
            [
                n
                for n in matching
                if n <= reader.opened_at
                and (
                    request.cursor is None
                    or (n > request.cursor if request.ascending else n < request.cursor)
                )
            ]
        )
        assert reader.marker.complete is not outstanding
        place = history[-1] if history else request.cursor
        if place is None and request.ascending and not outstanding:
            place = reader.opened_at  # if nothing matched, the reader still knows where it stands
        cursor = None if place is None else CODEC.encode(place, ascending=request.ascending)
        assert reader.marker.cursor == cursor
        for position, (n, cursor) in enumerate(reader.events):
            if position < reader.history:
                assert cursor == CODEC.encode(n, ascending=request.ascending)
            else:
                # A walk that continues backwards knows nothing of the other side of its cursor.
                is_blind = not request.ascending and request.cursor is not None
                assert cursor == (None if outstanding or is_blind else CODEC.encode(n))


TestSeams = pytest.mark.req(
    "R-100",
    "R-103",
    "R-153",
    "R-154",
    "R-158",
    "R-159",
    "R-160",
    "R-165",
    "R-167",
    "R-170",
    "R-175",
    "R-177",
    "R-178",
)(pytest.mark.slow(Seams.TestCase))
TestSeams.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def open_subscription(fanout: Fanout, **request) -> Reader:
    made = SubscriptionRequest(subscription_id="s", filter=CompiledFilter(), **request)
    return Reader(FeedSubscription(made, CODEC), made)


@pytest.mark.req("R-154", "R-162")
def test_a_descending_walk_that_replaces_itself_hands_the_live_part_on():
    fanout = Fanout(CODEC, 5)
    first = open_subscription(fanout, limit=2, ascending=False)
    first.subscription.start(5)
    second = open_subscription(fanout, limit=2, ascending=False, cursor=4)
    second.subscription.take_over(first.subscription)
    # 6 was committed after the first page and never delivered by the replaced subscription.
    second.subscription.start(6)
    assert second.subscription.position == 5


@pytest.mark.req("R-159", "R-162")
def test_what_the_history_of_a_descending_walk_holds_is_not_sent_live_too():
    fanout = Fanout(CODEC, 5)
    first = open_subscription(fanout, limit=2, ascending=False)
    first.subscription.start(5)
    second = open_subscription(fanout, limit=2, ascending=False, cursor=8)  # from another connection
    second.subscription.take_over(first.subscription)
    second.subscription.start(9)
    assert second.subscription.position == 8


def walked_to_its_end(reader: Reader) -> FeedSubscription:
    subscription = reader.subscription
    if not subscription.started:
        subscription.start(5)
    read = subscription.next_read(5, 9)
    assert read is not None
    subscription.rows_read(read, [], True, "rewrite")
    return subscription


@pytest.mark.req("R-136")
def test_what_ends_a_stream_that_stands_is_the_answer_to_nothing():
    reader = open_subscription(Fanout(CODEC, 5), limit=2, client_msg_id="m")
    assert reader.subscription.client_msg_id == "m"
    assert walked_to_its_end(reader).client_msg_id is None


@pytest.mark.req("R-160")
def test_a_walk_back_gives_live_cursors_only_if_nothing_newer_can_be_missing():
    fanout = Fanout(CODEC, 5)
    assert walked_to_its_end(open_subscription(fanout, limit=2, ascending=False)).live_cursors
    # Started from a cursor, perhaps on another connection: packets stored meanwhile come neither as history
    # nor live, and no cursor may lead past them.
    resumed = open_subscription(fanout, limit=2, ascending=False, cursor=3)
    assert not walked_to_its_end(resumed).live_cursors

    def after(*requests) -> bool:
        """Whether the last of these, each of which replaces the previous one, gives live cursors."""
        before: FeedSubscription | None = None
        for request in requests:
            reader = open_subscription(fanout, limit=2, **request)
            if before is not None:
                reader.subscription.take_over(before)
            before = walked_to_its_end(reader)
        assert before is not None
        return before.live_cursors

    page, further = {"ascending": False}, {"ascending": False, "cursor": 3}
    assert after(page, further, further)
    assert not after(further, further)
    assert not after({"ascending": True}, further)
    assert after(further, page)
    assert after(further, {"ascending": True, "cursor": 3})


@pytest.mark.req("R-156", "R-160")
@pytest.mark.parametrize(
    ("kinds", "until", "cursor", "cursors"),
    [
        ([], None, 4, True),
        ([], None, 5, True),
        ([], None, 3, False),  # what the first page was cut before, between 3 and 4
        (["B"], None, 5, False),  # what is newer was looked through for other packets
        ([], 950, 5, False),
    ],
)
def test_a_walk_back_goes_on_from_the_one_it_replaces_only_if_it_asks_for_the_same(
    kinds, until, cursor, cursors
):
    first = open_subscription(Fanout(CODEC, 5), limit=1, ascending=False).subscription
    first.start(5)
    read = first.next_read(5, 9)
    assert read is not None
    first.rows_read(read, [StoredPacket(n, NOW, b'{"n":%d}' % n) for n in (4, 2)], True, "rewrite")
    wanted = compile_filter(Filters(types=kinds), max_values=9)
    request = SubscriptionRequest("s", wanted, until, 9, ascending=False, cursor=cursor)
    second = Reader(FeedSubscription(request, CODEC), request)
    second.subscription.take_over(first)
    assert walked_to_its_end(second).live_cursors is cursors


def test_joining_the_feed_anywhere_but_at_its_position_is_our_bug():
    fanout = Fanout(CODEC, 5)
    reader = open_subscription(fanout, limit=1)
    reader.subscription.start(5)
    with pytest.raises(RuntimeError):
        fanout.join(reader.subscription, reader)  # its history is still to come
    reader.subscription.leave_live(4)
    reader.subscription.next_read(4, 1)
    assert reader.subscription.phase is FeedPhase.LIVE
    with pytest.raises(RuntimeError):
        fanout.join(reader.subscription, reader)


@pytest.mark.req("R-165")
@pytest.mark.parametrize(("ascending", "seen"), [(True, 2), (False, 9)])
def test_a_marker_names_the_last_packet_given_however_far_the_store_has_looked(ascending, seen):
    reader = open_subscription(Fanout(CODEC, 9), ascending=ascending, history_marker=True)
    subscription = reader.subscription
    subscription.start(9)
    read = subscription.next_read(9, 4)
    assert read is not None
    packet = entry(seen, "POST", expired=False)
    rows = [StoredPacket(seen, packet.received_at, packet.packet.body)]
    # One packet matches, then none of those that the store had time to examine.
    reader.take(subscription.rows_read(read, rows, False, "rewrite")[0])
    read = subscription.next_read(9, 4)
    assert read is not None
    reader.take(subscription.rows_read(read, [], False, "rewrite", 5)[0])
    read = subscription.next_read(9, 4)
    assert read is not None
    assert (read.query.after, read.query.up_to) == ((5, 9) if ascending else (0, 4))
    reader.take(subscription.rows_read(read, [], True, "rewrite")[0])
    assert reader.marker is not None
    assert reader.marker.cursor == CODEC.encode(seen, ascending=ascending)


@given(
    found=st.integers(0, 7),
    limit=st.one_of(st.none(), st.integers(0, 6)),
    more=st.booleans(),
    reached=st.booleans(),
    ascending=st.booleans(),
    cuts=st.sets(st.integers(1, 6)),
)
def test_a_page_in_pieces_says_what_it_says_in_one(found, limit, more, reached, ascending, cuts):
    """Only for the last piece does the store say that it was the end, or how far it has looked."""
    ascending = ascending or limit is None
    said = []
    for ends in ([found], [*sorted(cut for cut in cuts if cut < found), found]):
        request = {"limit": limit, "ascending": ascending, "history_marker": True}
        reader = open_subscription(Fanout(CODEC, 50), **request)
        subscription = reader.subscription
        subscription.start(50)
        read = subscription.next_read(50, 7)
        assert read is not None
        count = min(found, read.limit)
        sequences = range(1, count + 1) if ascending else range(50, 50 - count, -1)
        rows = [StoredPacket(n, NOW, b'{"n":%d}' % n) for n in sequences]
        exhausted = not more and count < read.limit
        place = (20 if ascending else 30) if reached and not exhausted and count < read.limit else None
        first, frames, events = 0, b"", 0
        for end in (min(end, count) for end in ends):
            is_last = end == count
            more_frames, more_events = subscription.rows_read(
                read, rows[first:end], is_last and exhausted, "rewrite", place if is_last else None
            )
            frames, events, first = frames + more_frames, events + more_events, end
            if is_last:
                break
        said.append((frames, events, subscription.phase, subscription.next_read(50, 7)))
    assert said[0] == said[1]
