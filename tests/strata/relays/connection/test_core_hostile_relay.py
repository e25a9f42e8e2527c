"""A relay that sends anything at all: nothing raises or grows without bound, nothing false gets through."""

from __future__ import annotations

import base64
import random
from dataclasses import replace
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from strata.protocol import wire
from strata.relays.connection.core import Core
from strata.relays.connection.inspection import Inspector
from strata.relays.connection.options import Options
from strata.relays.connection.queue import QueuedEvent
from strata.relays.connection.values import Announced, Query, Statistics

OPTIONS = Options(queue_events=8, page_events=4, idle_timeout=1, history_timeout=5, dedup_packets=8)
IDS = st.sampled_from(["s1.1", "s1.2", "s1.3", "s1.4", "s2.1", "s2.2", "p1", "p2", "a1", "a2", "", "x", None])
CURSORS = st.sampled_from([None, "a", "b", "c", ""])
CHALLENGE = base64.b64encode(bytes(32)).decode()
NAMES = ("packet_ids", "received_range", "history_marker", "gapless")


@cache
def steps(bodies, did):
    """What happens to a connection. Cached: building the strategy takes longer than handling a message."""
    return st.lists(messages(bodies, did) | st.sampled_from(["tick", "take", "cut"]), max_size=60)


def messages(bodies, did):
    event = st.builds(
        wire.Event,
        packet=st.sampled_from([Raw(body) for body in bodies]),
        received_at=st.integers(-10, 2**62) | st.just(10**400),
        subscription_id=IDS,
        cursor=CURSORS,
    )
    ok = st.builds(
        wire.Ok,
        packet_id=st.sampled_from(["id", "other"]),
        status=st.sampled_from(["ACCEPTED", "QUEUED", "?"]),
        client_msg_id=IDS,
    )
    error = st.builds(
        wire.Error,
        code=st.sampled_from(
            [
                "invalid_cursor",
                "rate_limited",
                "internal_error",
                "unauthenticated",
                "invalid_signature",
                "zzz",
            ]
        ),
        reason=st.just("-"),
        client_msg_id=IDS,
        subscription_id=IDS,
        retry_after=st.sampled_from([None, -5, 0, 1, 2**62, 10**400]),
    )
    end = st.builds(
        wire.EndOfHistory,
        subscription_id=IDS.filter(lambda i: i is not None),
        complete=st.booleans(),
        cursor=CURSORS,
    )
    challenge = st.builds(
        wire.AuthChallenge,
        challenge=st.sampled_from(["c", CHALLENGE]),
        server_id=st.sampled_from(["d", "did:strata:a", "did:strata:b"]),
        expires_at=st.sampled_from([1, -(10**400), 10**400]),
        extensions=st.lists(st.sampled_from(NAMES)),
    )
    auth_ok = st.builds(
        wire.AuthOk,
        author_id=st.sampled_from([did, "did:strata:a"]),
        capabilities=st.none() | st.lists(st.sampled_from(["publish", "subscribe", "fly"])),
        client_msg_id=IDS,
    )
    said = st.one_of(event, event, event, ok, error, end, challenge, auth_ok).map(spelled)
    return said | st.binary(max_size=20)


def spelled(message):
    """The message as JSON text, including integers beyond 64 bits, which our encoder refuses to write."""
    members = {name: getattr(message, name) for name in message.__struct_fields__}
    huge = {name: value for name, value in members.items() if type(value) is int and abs(value) > 2**63}
    text = wire.encode(msgspec.structs.replace(message, **dict.fromkeys(huge, 0)))
    for name, value in huge.items():
        assert f'"{name}":0'.encode() in text
        text = text.replace(f'"{name}":0'.encode(), f'"{name}":{value}'.encode())
    return text


@pytest.mark.req("R-336")
@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    extensions=st.sets(st.sampled_from(NAMES)),
    authenticate=st.sampled_from(["when_needed", "always"]),
)
def test_nothing_a_relay_says_does_harm(make, identities, data, extensions, authenticate):
    good = make(1).canonical
    bodies = (good, good.replace(b"packet", b"forged"), b"{}", b"1", b'{"packet_id":"0x00"}')
    options, me = replace(OPTIONS, authenticate=authenticate), identities[1]
    core = Core(options, random=random.Random(0).random, signer=me)
    states = [core.subscribe(Query(), 0), core.subscribe(Query(live=False, limit=3), 0)]
    inspectors = [Inspector(state.query, OPTIONS, core.statistics) for state in states]
    core.connection_made(Announced(frozenset(extensions)), 0)
    for _ in range(2):
        core.publish("id", good, timeout=60, now=0)
    now = 0.0
    for step in data.draw(steps(bodies, me.did)):
        if step == "tick":
            now = min(max(core.get_timer(), now), now + 10)
            core.handle_timer(now)
        elif step == "cut":
            core.connection_lost()
            core.connection_made(Announced(frozenset(extensions)), now)
        elif step == "take":
            for state, inspector in zip(states, inspectors, strict=True):
                if (event := state.take()) is not None:
                    assert isinstance(event, QueuedEvent)
                    delivery = inspector.inspect(event)
                    assert delivery is None or delivery.packet.canonical == good
                    core.taken(state, delivered=delivery is not None, now=now)
        else:
            core.receive_message(step, now)
        # A message causes only a few of ours, so a relay cannot use us to flood it.
        assert len(core.data_to_send()) <= 8
        assert all(len(state._queue) <= OPTIONS.queue_events or core.must_pause for state in states)
        core.changes()


def test_what_a_relay_says_beside_a_packet_has_its_place_in_the_queue_too(make):
    """A subscription with a slow consumer holds `queue_bytes`, whatever the bytes are used for."""
    options = replace(OPTIONS, queue_events=1000, queue_bytes=100_000)
    core = Core(options, random=random.Random(0).random)
    state = core.subscribe(Query(), 0)
    core.connection_made(Announced(frozenset({"gapless"})), 0)
    for n, (cursor, beside) in enumerate([("a", "x" * 90_000), ("b" * 90_000, "x"), ("c", "x" * 90_000)]):
        event = wire.Event(
            packet=Raw(make(n).canonical),
            received_at=1,
            subscription_id="s1.1",
            cursor=cursor,
            relay_annotations={"x": beside},
        )
        core.receive_message(wire.encode(event), 0)
    assert len(state._queue) == 2 and core.statistics.subscriptions_deferred == 1
    while state.take() is not None:
        core.taken(state, delivered=True, now=0)
    assert state._queue.size_bytes == 0


def test_codes_and_extensions_without_end_are_not_kept():
    core = Core(OPTIONS, random=random.Random(0).random)
    core.connection_made(Announced(), 0)
    for n in range(2000):
        core.receive_message(wire.encode(wire.Error(code=f"code_{n}", reason="-")), 0)
        core.receive_message(wire.encode(wire.Error(code="x" * 1000 + f"{n}", reason="-")), 0)
    challenge = wire.AuthChallenge(
        challenge=CHALLENGE, server_id="did:strata:r", expires_at=0, extensions=["gapless", "y" * 100_000]
    )
    core.receive_message(wire.encode(challenge), 0)
    refusals = core.statistics.refusals
    assert len(refusals) <= 257 and sum(refusals.values()) == 4000 and refusals["code_0"] == 1
    assert core.announced is not None and core.announced.extensions == {"gapless"}


@pytest.mark.parametrize("received_at", [2**70, 2**64, 2**53, -(2**53), -(2**63) - 1])
def test_a_time_beyond_all_measure_has_a_place_in_64_bits(make, received_at):
    core = Core(OPTIONS, random=random.Random(0).random)
    state = core.subscribe(Query(), 0)
    core.connection_made(Announced(), 0)
    core.receive_message(
        spelled(wire.Event(packet=Raw(make(1).canonical), received_at=received_at, subscription_id="s1.1")), 0
    )
    event = state.take()
    assert isinstance(event, QueuedEvent) and abs(event.received_at) == 2**53 - 1
    delivery = Inspector(Query(), OPTIONS, Statistics()).inspect(event)
    assert delivery is not None and msgspec.msgpack.encode(delivery.received_at)


@pytest.mark.req("R-339")
def test_a_time_beyond_all_measure_is_no_place_to_start_again_from(make):
    core = Core(OPTIONS, random=random.Random(0).random)
    state = core.subscribe(Query(), 0)
    core.connection_made(Announced(), 0)
    event = wire.Event(packet=Raw(make(1).canonical), received_at=10**400, subscription_id="s1.1", cursor="a")
    core.receive_message(spelled(event), 0)
    core.connection_lost()
    core.connection_made(Announced(), 1)
    core.data_to_send()
    core.receive_message(wire.encode(wire.Error(code="invalid_cursor", reason="-", client_msg_id="s1.2")), 1)
    (again,) = map(wire.decode_client_message, core.data_to_send())
    assert isinstance(again, wire.Subscribe) and again.filters is not None
    assert again.filters.cursor is None
    assert again.filters.since is not None and again.filters.since <= 2**53
    assert state.error is None
