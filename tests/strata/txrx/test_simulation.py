"""Thousands of worlds with every kind of network and process trouble: no message is lost or doubled.

STRATA_TEST_CHANNEL_RUNS sets another number of worlds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from strata.txrx.errors import DeliveryTimeout
from strata.txrx.receiving import ReceivingLink, ReceivingSession, Sessions
from strata.txrx.sending import SendingSession

from tests.support.txrx_simulation import BrokenRule, run

RUNS = int(os.environ.get("STRATA_TEST_CHANNEL_RUNS", "1500"))
PARTS = 3


@pytest.mark.req("T-008", "T-027", "T-030", "T-032", "T-037", "T-039", "T-044", "T-055", "T-062", "T-066")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_message_is_lost_or_doubled(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, RUNS, PARTS):
        world = run(seed)
        for server in world.servers:
            seen["taken"] += len(server.taken)
            seen["repeated"] += server.counters.duplicates
            seen["waited for room"] += server.counters.queue_full
            seen["rejected"] += server.counters.rejects_sent
            seen["cut within a frame"] += server.counters.broken_connections
        for sender in world.senders:
            seen["sent again"] += sender.session.counters.retransmits
            seen["returned"] += len(sender.returned)
            seen["timed out"] += isinstance(sender.session.closed, DeliveryTimeout)
    if RUNS >= 300:
        troubles = ("taken", "repeated", "waited for room", "rejected", "cut within a frame")
        missing = [name for name in (*troubles, "sent again", "returned", "timed out") if not seen[name]]
        assert not missing, f"worlds in which this never happens show little: {missing}"


def test_a_run_can_be_repeated_from_its_seed() -> None:
    for seed in range(20):
        one, two = run(seed), run(seed)
        assert one.now == two.now
        assert [server.taken for server in one.servers] == [server.taken for server in two.servers]
        assert [sender.returned for sender in one.senders] == [sender.returned for sender in two.senders]


# Faults that the simulation must notice. Each breaks one rule of the core.


def forget_what_is_expected(patch: pytest.MonkeyPatch) -> None:
    def attach(self: Sessions[Any], session_id: int, link: Any) -> ReceivingSession[Any]:
        session: ReceivingSession[Any] = ReceivingSession(session_id)
        self._sessions[session_id] = session
        session.link = link
        return session

    patch.setattr(Sessions, "attach", attach)


def acknowledge_what_is_not_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    take = ReceivingLink.take

    def forgetful(self: Any, room: int, now: float) -> list[Any]:
        return take(self, room, now)[:5]

    patch.setattr(ReceivingLink, "take", forgetful)


def send_nothing_again(patch: pytest.MonkeyPatch) -> None:
    lost = SendingSession.connection_lost

    def forgetful(self: Any, next_session_id: int) -> None:
        self._unacked.clear()
        self._base = self._next - len(self._outbox)
        lost(self, next_session_id)

    patch.setattr(SendingSession, "connection_lost", forgetful)


def repeat_no_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """The fault of the system behind the document: after one lost acknowledgement, everything is returned."""
    acknowledge = ReceivingLink._acknowledge

    told: dict[int, int] = {}

    def once(self: Any, now: float) -> None:
        if self._session is not None:
            self._owes_repeat = False
            self._acked = max(self._acked, told.get(self._session.id, -1))
        acknowledge(self, now)
        if self._session is not None:
            told[self._session.id] = self._acked

    patch.setattr(ReceivingLink, "_acknowledge", once)


def take_any_refusal_for_certainty(patch: pytest.MonkeyPatch) -> None:
    made = SendingSession.connection_made

    def trusting(self: Any, now: float) -> None:
        made(self, now)
        self._reached_before = 0

    patch.setattr(SendingSession, "connection_made", trusting)


def let_the_old_connection_go_on(patch: pytest.MonkeyPatch) -> None:
    """Sessions that end with any of their connections, not only with the newest."""
    patch.setattr(Sessions, "link_of", lambda self, session_id: None)
    patch.setattr(Sessions, "detach", lambda self, session, now: self._sessions.pop(session.id, None))


def never_time_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SendingSession, "get_timer", lambda self: None)


@pytest.mark.req("T-008")
@pytest.mark.parametrize(
    "break_a_rule",
    [
        forget_what_is_expected,
        acknowledge_what_is_not_in_the_queue,
        send_nothing_again,
        repeat_no_acknowledgement,
        take_any_refusal_for_certainty,
        let_the_old_connection_go_on,
        never_time_out,
    ],
    ids=lambda function: function.__name__,
)
def test_a_broken_rule_is_noticed(
    break_a_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_a_rule(monkeypatch)
    with pytest.raises(BrokenRule):
        for seed in range(1500):
            run(seed)
