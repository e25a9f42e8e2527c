"""Messages heard while a store is read wait for their turn, so that each sender's messages stay in order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata.channels.sds import Participant, SdsConfig, SdsMessage, SdsState

from tests.support.sds_network import delivered

T = 1_760_000_000_000
QUIET = SdsConfig(sync_min_interval_ms=0)
SENDERS = ("bob", "carol", "dave")


def join(name: str, state: SdsState | None = None) -> Participant:
    return Participant("room", name, QUIET, now_ms=T, random=lambda: 0.5, state=state)


def conversation(seed: int, count: int) -> list[SdsMessage]:
    """Messages in the order in which a store gets them; their senders hear one another late."""
    chance = random.Random(seed)
    senders = {name: join(name) for name in SENDERS}
    heard = dict.fromkeys(SENDERS, 0)
    said: list[SdsMessage] = []
    for number in range(count):
        name = chance.choice(SENDERS)
        speaker = senders[name]
        until = chance.randint(heard[name], len(said))
        for message in said[heard[name] : until]:
            speaker.receive(message.encode(), T + number)
        heard[name] = until
        message = speaker.wrap(f"{name} {number}".encode(), T + number, number)
        speaker.dispatched(message.message_id, T + number)
        said.append(message)
    return said


def assert_causal(order: list[str], said: list[SdsMessage]) -> None:
    """Check that each is delivered once, in its sender's order, and after the messages that it names."""
    place = {message_id: at for at, message_id in enumerate(order)}
    assert len(place) == len(order) == len(said)
    last: dict[str, int] = {}
    for message in said:
        at = place[message.message_id]
        assert last.get(message.sender_id, -1) < at, "a sender's messages stay in order"
        last[message.sender_id] = at
        assert all(place[each.message_id] < at for each in message.causal_history)


@pytest.mark.slow
@pytest.mark.req("C-298")
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(2, 40),
    joins=st.integers(0, 40),
    restarts=st.booleans(),
)
def test_whoever_hears_while_it_reads_gets_every_senders_messages_in_order(
    seed: int, count: int, joins: int, restarts: bool
) -> None:
    """The reader had read to some place when it ended. In its next life it hears everything from some later
    message on, and reads the rest at the same time, in any interleaving.
    """
    chance = random.Random(seed)
    said = conversation(seed, count)
    read_to = min(joins, count)
    reader = join("reader")
    order: list[str] = []
    for message in said[:read_to]:
        reader.receive(message.encode(), T, stored=True)
    reader.hold_heard(True, T)
    hears_from = chance.randint(read_to, count)
    stored, live = said[read_to:], said[hears_from:]
    while stored or live:
        if restarts and chance.random() < 0.1:
            order += delivered(reader)
            reader = join("reader", SdsState(reader.changes()))
            stored = said[chance.randint(read_to, count - len(stored)) :]
            reader.hold_heard(True, T)
            restarts = False
        if live and (not stored or chance.random() < 0.5):
            reader.receive(live.pop(0).encode(), T)
        else:
            reader.receive(stored.pop(0).encode(), T, stored=True)
    reader.hold_heard(False, T)
    order += delivered(reader)
    assert_causal(order, said)


def test_without_holding_a_message_overtakes_an_earlier_one_of_its_sender() -> None:
    """The reason for holding: a history of two entries can omit all that its sender said before."""
    anna, bert = join("anna"), join("bert")
    one = anna.wrap(b"one", T + 1, 1)
    crossing = [bert.wrap(text, T + 2 + n, 2 + n) for n, text in enumerate((b"two", b"three"))]
    for message in crossing:
        anna.receive(message.encode(), T + 5)
    two = anna.wrap(b"four", T + 6, 6)
    assert one.message_id not in {each.message_id for each in two.causal_history}
    bert.receive(two.encode(), T + 7)
    bert.receive(one.encode(), T + 8, stored=True)
    assert delivered(bert) == [two.message_id, one.message_id]
    # With holding, they arrive in order, whether the store is read to this place or first says that it ends.
    for reads in (True, False):
        bert = join("bert")
        for text, at in ((b"two", 2), (b"three", 3)):
            bert.wrap(text, T + at, at)
        bert.hold_heard(True, T + 4)
        bert.receive(two.encode(), T + 7)
        assert delivered(bert) == [] and bert.is_waiting
        bert.receive(one.encode(), T + 8, stored=True)
        if reads:
            bert.receive(two.encode(), T + 9, stored=True)
        else:
            bert.hold_heard(False, T + 9)
        assert delivered(bert) == [one.message_id, two.message_id] and not bert.is_waiting
