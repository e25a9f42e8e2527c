"""A relay that says anything at all: nothing raises, nothing grows without bound, nothing false comes out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from strata import wire
from strata.relay.connection import Connection
from strata.relay.inspection import Inspector
from strata.relay.options import Options
from strata.relay.values import Announced, Query

OPTIONS = Options(queue_events=8, page_events=4, idle_timeout=1, history_timeout=5, dedup_packets=8)
IDS = st.sampled_from(["s1.1", "s1.2", "s1.3", "s1.4", "s2.1", "s2.2", "p1", "p2", "", "x", None])
CURSORS = st.sampled_from([None, "a", "b", "c", ""])
NAMES = ("packet_ids", "received_range", "history_marker", "gapless")


def messages(bodies):
    event = st.builds(
        wire.Event,
        packet=st.sampled_from([Raw(body) for body in bodies]),
        received_at=st.integers(-10, 2**62),
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
        code=st.sampled_from(["invalid_cursor", "rate_limited", "internal_error", "zzz"]),
        reason=st.just("-"),
        client_msg_id=IDS,
        subscription_id=IDS,
        retry_after=st.sampled_from([None, -5, 0, 1, 2**62]),
    )
    end = st.builds(
        wire.EndOfHistory,
        subscription_id=IDS.filter(lambda i: i is not None),
        complete=st.booleans(),
        cursor=CURSORS,
    )
    challenge = st.builds(
        wire.AuthChallenge,
        challenge=st.just("c"),
        server_id=st.just("d"),
        expires_at=st.just(1),
        extensions=st.lists(st.sampled_from(NAMES)),
    )
    return st.one_of(event, event, event, ok, error, end, challenge).map(wire.encode) | st.binary(max_size=20)


@pytest.mark.req("R-336")
@settings(max_examples=400, deadline=None)
@given(data=st.data(), extensions=st.sets(st.sampled_from(NAMES)))
def test_nothing_a_relay_says_does_harm(make, data, extensions):
    good = make(1).canonical
    bodies = [good, good.replace(b"packet", b"forged"), b"{}", b"1", b'{"packet_id":"0x00"}']
    core = Connection(OPTIONS, random=random.Random(0).random)
    states = [core.subscribe(Query(), 0), core.subscribe(Query(live=False, limit=3), 0)]
    inspectors = [Inspector(state.query, OPTIONS, core.statistics) for state in states]
    core.connection_made(Announced(frozenset(extensions)), 0)
    for _ in range(2):
        core.publish("id", good, timeout=60, now=0)
    now = 0.0
    for step in data.draw(st.lists(messages(bodies) | st.sampled_from(["tick", "take", "cut"]), max_size=60)):
        if step == "tick":
            now = min(max(core.get_timer(), now), now + 10)
            core.handle_timer(now)
        elif step == "cut":
            core.connection_lost()
            core.connection_made(Announced(frozenset(extensions)), now)
        elif step == "take":
            for state, inspector in zip(states, inspectors, strict=True):
                if (event := state.take()) is not None:
                    delivery = inspector.inspect(event)
                    assert delivery is None or delivery.packet.canonical == good
                    core.taken(state, delivered=delivery is not None, now=now)
        else:
            core.receive_message(step, now)
        # A message causes at most a handful of ours, so a relay cannot make us flood it.
        assert len(core.data_to_send()) <= 8
        assert all(len(state._queue) <= OPTIONS.queue_events or core.must_pause for state in states)
        core.changes()
