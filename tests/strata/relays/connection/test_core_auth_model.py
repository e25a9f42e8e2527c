"""The core against a naive relay that demands AUTH, with authors who change keys, over pipes that are cut.

`test_core_model` verifies that every packet comes once and in order. Here the same must hold while sessions
must first be authenticated and packets wait for their authors' keys.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strata.protocol import packets, wire
from strata.protocol.ids import Identity
from strata.protocol.keys import IDENTITY_TYPES, rotate_content
from strata.protocol.packets import Packet
from strata.relays.connection.authenticating import AuthState
from strata.relays.connection.core import Core
from strata.relays.connection.inspection import KEYS_WANTED, Candidate, Collector, Inspector
from strata.relays.connection.keyring import Anchors, KeyRing
from strata.relays.connection.options import Options
from strata.relays.connection.publishing import PublishSettled
from strata.relays.connection.queue import QueuedEvent
from strata.relays.connection.stream import Phase, Stream
from strata.relays.connection.values import Announced, Published, Query, Statistics

from tests.support.relays import Session

START = 1_760_000_000
RELAY = "did:strata:relay_1"
OPTIONS = Options(
    queue_events=8,
    page_events=4,
    dedup_packets=64,
    idle_timeout=1,
    history_timeout=50,
    ack_timeout=5,
    auth_timeout=2,
    publish_timeout=1e6,
    backoff_base=0.1,
)
EXTENDED = ("packet_ids", "received_range", "history_marker", "gapless")
ME = Identity.from_seed(b"\x21" * 32)
WRITERS = [Identity.from_seed(bytes([0x30 + n]) * 32) for n in range(3)]
NEW_KEYS = [Identity.from_seed(bytes([0x40 + n]) * 32) for n in range(3)]


def make_world_packet(n):
    """Packet `n` of the world: three writers in turn, each of whom rotates its key with its third packet."""
    writer, turn = WRITERS[n % 3], n // 3
    if turn == 2:
        content = rotate_content(
            f"{writer.did}#keys-2",
            NEW_KEYS[n % 3].public_key,
            replaces=f"{writer.did}#keys-1",
            valid_from=START,
        )
        return packets.build(writer, content, timestamp=START + n)
    signer = writer if turn < 2 else NEW_KEYS[n % 3].speaking_for(writer.did)
    return packets.build(signer, {"type": "POST", "text": f"packet {n}"}, timestamp=START + n)


@dataclass
class Question:
    """The subscription that reads an author's keys, and what has come of it so far."""

    state: Stream
    reader: Collector
    author: str
    asked_at: float
    found: list[tuple[Packet, int]] = field(default_factory=list)


class World:
    """A client core with a key ring, a model relay that demands AUTH, and the two pipes between them."""

    def __init__(self, relay, options, query, seed):
        self.relay = relay
        self.now = 0.0
        self.core = Core(options, random=random.Random(seed).random, signer=ME)
        self.session: Session | None = None
        self.up: list[bytes] = []
        self.made = 0
        self.published = 0
        self.settled: list[PublishSettled] = []
        self.got: list[str] = []
        self.query = query
        self.ring = KeyRing(Anchors(), max_authors=1024, refresh_interval=1e9)
        self.state = self.core.subscribe(query, self.now)
        self.inspector = Inspector(query, options, self.core.statistics, self.ring)
        self.candidate: Candidate | None = None
        self.question: Question | None = None
        self.options = options

    # The network.

    def connect(self):
        if self.session is None:
            self.session = self.relay.connect()
            self.core.connection_made(Announced(self.relay.extensions), self.now, unix_now=START + self.now)
            self.after()

    def cut(self):
        if self.session is not None:
            self.relay.disconnect(self.session)
            self.session = None
            self.up.clear()
            self.core.connection_lost()
            self.after()

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

    def after(self):
        frames = self.core.data_to_send()
        for frame in frames:
            self.check_sent(wire.decode_client_message(frame))
        self.up += frames
        self.settled += [change for change in self.core.changes() if isinstance(change, PublishSettled)]
        # the client is authenticated only if the relay has said so on this connection.
        if self.core.authentication_state is AuthState.AUTHENTICATED:
            assert self.session is not None and self.session.identity == ME.did
            assert self.core.session is not None

    def check_sent(self, message):
        """R-339: with `always`, only AUTH is sent on a session that is not authenticated."""
        if self.options.authenticate == "always" and not isinstance(message, wire.Auth):
            assert self.core.authentication_state is AuthState.AUTHENTICATED, message

    # The program.

    def consume(self, count):
        for _ in range(count):
            if self.candidate is None and (event := self.state.take()) is not None:
                assert isinstance(event, QueuedEvent)
                self.candidate = self.inspector.read(event)
                if self.candidate is None:
                    self.dealt_with(None)
                    continue
            if self.candidate is None:
                return
            delivery = self.inspector.judge(self.candidate)
            if delivery is KEYS_WANTED:
                self.ask()
                return
            self.candidate = None
            self.dealt_with(delivery)

    def dealt_with(self, delivery):
        if delivery is not None:
            self.got.append(delivery.packet.packet_id)
        self.core.taken(self.state, delivered=delivery is not None, now=self.now)
        self.after()

    def ask(self):
        """Do what the key fetcher does, one step at a time."""
        if self.question is None:
            assert self.candidate is not None
            author = self.candidate.packet.author_id
            query = Query(authors=(author,), types=tuple(sorted(IDENTITY_TYPES)), live=False)
            reader = Collector(query, self.options, Statistics())
            self.question = Question(self.core.subscribe(query, self.now), reader, author, self.now)
            self.core.await_keys(self.state, True)
            self.after()
        question, state = self.question, self.question.state
        while (event := state.take()) is not None:
            assert isinstance(event, QueuedEvent)
            candidate = question.reader.read(event)
            if candidate is not None and question.reader.judge(candidate) is not None:
                question.found.append((candidate.packet, event.received_at))
            self.core.taken(state, delivered=candidate is not None, now=self.now)
            self.after()
        if state.phase is Phase.ENDED:
            assert state.error is None
            author = question.author
            self.ring.learn(author, self.ring.build(author, question.found), question.asked_at)
            self.question = None
            self.core.await_keys(self.state, False)
            self.after()

    def foreign(self, count):
        for _ in range(count):
            self.relay.append(make_world_packet(self.made))
            self.made += 1

    def publish(self):
        content = {"type": "POST", "text": f"mine {self.published}"}
        packet = packets.build(ME, content, timestamp=START)
        self.published += 1
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
        for _ in range(3000):
            before = (len(self.got), len(self.settled), self.question is None)
            self.to_relay(100)
            self.to_client(100)
            self.consume(100)
            quiet = not self.up and not self.session.outbox
            if quiet and before == (len(self.got), len(self.settled), self.question is None):
                timer = self.core.get_timer()
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
    max_size=60,
)
KINDS = st.sampled_from(
    [
        (EXTENDED, False, 500),
        (("history_marker",), False, 3),
        ((), False, 500),
        (("history_marker",), True, 500),
    ]
)
DEMANDS = st.sampled_from([frozenset(), frozenset({"publish"}), frozenset({"publish", "subscribe"})])


@pytest.mark.req("R-075", "R-293", "R-297", "R-339")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=KINDS,
    demands=DEMANDS,
    authenticate=st.sampled_from(["when_needed", "always"]),
    steps=STEPS,
    stored=st.integers(0, 20),
    seed=st.integers(0, 9),
)
def test_once_and_in_order_whatever_is_cut_authenticated_or_rotated(
    naive_relay, kind, demands, authenticate, steps, stored, seed
):
    extensions, live_cursors, max_limit = kind
    relay = naive_relay(extensions, max_limit=max_limit, live_cursors=live_cursors)
    relay.server_id, relay.needs_auth = RELAY, demands
    world = World(relay, replace(OPTIONS, authenticate=authenticate), Query(types=("POST",)), seed)
    world.foreign(stored)
    world.connect()
    for name, *arguments in steps:
        if name == "to_relay" and world.session is None:
            continue
        getattr(world, name)(*arguments)
    # Continue on a fresh connection: the last one may have exhausted its patience or its attempts.
    world.cut()
    if world.state.error is None and all(isinstance(c.outcome, Published) for c in world.settled):
        world.settle()
        wanted = [packet.packet_id for packet, _ in relay.log if packet.content_type == "POST"]
        assert world.got == wanted
        assert len(world.settled) == world.published
        assert len(relay.log) == world.made + world.published
    else:
        # The wait for a challenge in flight took too long: the requests have failed with an error.
        assert authenticate == "always" or demands
    assert len(set(world.got)) == len(world.got)
