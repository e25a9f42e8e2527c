"""The claims that a run proves, and the evidence for them.

A check without evidence proves nothing: everything checked is counted, and an empty run fails.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.values import MessageEnvelope, NodeMessageReceived
from strata.channels.reliable.channel import ReliableChannel
from strata.channels.reliable.events import (
    MessageReceived,
    ReliableMessageDelivered,
    ReliableMessageDeliveryError,
    ReliableMessageSendError,
)
from strata.channels.reliable.values import AtRisk
from strata.channels.sds import SdsMessage
from strata.channels.segmentation.messages import InvalidSegment, decode_segment
from strata.protocol.errors import StrataError

__all__ = ["Evidence", "PromiseChecks", "SimulationFailed"]

_decoded = lru_cache(maxsize=256)(SdsMessage.decode)  # every participant receives the same few messages


class SimulationFailed(StrataError, AssertionError):
    """The promise was broken in a run; `seed` runs it again."""

    def __init__(self, seed: int, problems: list[str]) -> None:
        super().__init__(seed, problems)
        self.seed = seed
        self.problems = problems

    def __str__(self) -> str:
        listed = "\n  ".join(self.problems[:20])
        return f"seed {self.seed}: {len(self.problems)} problems\n  {listed}"


@dataclass(slots=True)
class PromiseChecks:
    """The number of checks of each kind."""

    messages: int = 0
    deliveries: int = 0
    delivery_errors: int = 0
    delivered_events: int = 0
    logs: int = 0
    order_pairs: int = 0
    unobtainable: int = 0
    """Messages that somebody lost with its disk, and that nobody has any more."""


@dataclass(slots=True)
class Evidence:
    """Everything seen in the network and at the programs, to compare with the events of the channels."""

    problems: list[str] = field(default_factory=list)
    concluding: bool = False
    """Whether the faults are over."""
    checks: PromiseChecks = field(default_factory=PromiseChecks)
    _sent: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    _taken: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _ever_taken: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _chunks: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _named_to: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _follows: dict[str, set[str]] = field(default_factory=dict)
    _request_of: dict[str, str] = field(default_factory=dict)
    _delivered: set[str] = field(default_factory=set)
    _undelivered: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _excused: set[str] = field(default_factory=set)
    _in_hand: set[tuple[str, str]] = field(default_factory=set)
    _untold: set[str] = field(default_factory=set)
    _told: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    # What is seen.

    def watch(self, name: str, node: MessagingNode, channel: ReliableChannel) -> None:
        """Look on at a participant's node and at what its channel tells."""
        send = node.send

        async def seen(envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
            self._saw_sent(name, envelope.payload)
            return await send(envelope, request_id=request_id)

        node.send = seen  # type: ignore[method-assign]
        node.message_events.on(NodeMessageReceived.name, lambda event: self._saw_received(name, event))
        events = channel.message_events
        events.on(ReliableMessageDelivered.name, lambda event: self._told_delivered(name, event))
        events.on(ReliableMessageDeliveryError.name, lambda event: self._told_undelivered(name, event))
        events.on(ReliableMessageSendError.name, lambda event: self._failed.add(event.request_id))

    def sent(self, name: str, request_id: str, payload: bytes) -> None:
        """A channel has accepted a message."""
        self._sent[request_id] = (name, payload)

    def took(self, name: str, message: MessageReceived) -> None:
        """A program has taken a message."""
        taken = self._taken[name]
        if message.request_id in taken:
            self.problems.append(f"{name} was given {message.request_id} twice")
        known = self._sent.get(message.request_id)
        if known is not None and (known[0] == name or known[1] != message.payload):
            self.problems.append(f"{name} was given {message.request_id} altered, or its own")
        taken.append(message.request_id)
        self._ever_taken[name].add(message.request_id)
        self.checks.deliveries += 1

    def forget(self, name: str) -> None:
        """A program starts anew and has forgotten everything that it took and that it was about to send."""
        self._taken[name] = []
        for request_id, (sender, _) in self._sent.items():
            if sender == name and request_id not in self._delivered:
                self._excused.add(request_id)

    def died(self, name: str, at_risk: AtRisk) -> None:
        """A program died: events between its store and the program may never be told."""
        if at_risk.message is not None:
            self._in_hand.add((name, at_risk.message.request_id))
        for event in at_risk.events:
            if isinstance(event, ReliableMessageDelivered | ReliableMessageDeliveryError):
                self._untold.add(event.request_id)

    def _saw_sent(self, name: str, payload: bytes) -> None:
        message = _decoded(payload)
        if message is None or not message.content or message.lamport_timestamp is None:
            return
        try:
            segment = decode_segment(message.content)
        except InvalidSegment:
            return
        if segment.request_id is not None:
            self._chunks[segment.request_id].add(message.message_id)
            self._request_of[message.message_id] = segment.request_id
            self._follows[message.message_id] = {entry.message_id for entry in message.causal_history}

    def _saw_received(self, name: str, event: NodeMessageReceived) -> None:
        message = _decoded(event.message.payload)
        if message is not None and message.sender_id != name:
            self._named_to[name].update(entry.message_id for entry in message.causal_history)

    def _told_delivered(self, name: str, event: ReliableMessageDelivered) -> None:
        self.checks.delivered_events += 1
        self._told[name, event.name, event.request_id] += 1
        self._delivered.add(event.request_id)

    def _told_undelivered(self, name: str, event: ReliableMessageDeliveryError) -> None:
        self.checks.delivery_errors += 1
        chunks = self._chunks[event.request_id]
        if chunks and chunks <= self._named_to[name]:
            self.problems.append(f"{name} said {event.request_id} is undelivered, and had heard otherwise")
        self._undelivered.add(event.request_id)

    # What is proved.

    def conclude(self, logs: Mapping[str, list[str] | None], obtainable: set[str]) -> None:
        """Hold everything against everything, once all have converged.

        `logs` has the log of each participant by name, or None while its channel is closed. `obtainable` are
        the SDS messages that any relay or any participant still has: what lost disks and forgetful relays
        took from all of them together, nobody can be given again.
        """
        self._compare_logs(logs)
        for request_id, (sender, _) in self._sent.items():
            if request_id in self._excused:
                continue
            self.checks.messages += 1
            others = [name for name in logs if name != sender]
            for name in others:
                if request_id in self._taken[name] or (name, request_id) in self._in_hand:
                    continue
                if not self._chunks[request_id] <= obtainable:
                    self.checks.unobtainable += 1
                else:
                    self.problems.append(f"{name} was never given {request_id} of {sender}")
            if request_id not in self._delivered | self._undelivered | self._failed | self._untold:
                self.problems.append(f"{sender} never learned what became of {request_id}")
            if request_id in self._delivered:
                had = [
                    n for n in others if request_id in self._ever_taken[n] or (n, request_id) in self._in_hand
                ]
                if not had:
                    self.problems.append(f"{sender} was told {request_id} is delivered, and nobody has it")
        for (name, event, request_id), count in self._told.items():
            if count > 1:
                self.problems.append(f"{name} was told {event} of {request_id} {count} times")
        for name in logs:
            self._check_order(name)
        if not self.checks.messages or not self.checks.deliveries:
            self.problems.append("nothing was sent, or nothing received: the run proves nothing")

    def _has_had(self, name: str, request_id: str) -> bool:
        return request_id in self._ever_taken[name] or (name, request_id) in self._in_hand

    def _compare_logs(self, logs: Mapping[str, list[str] | None]) -> None:
        known = {name: log for name, log in logs.items() if log is not None}
        reference: list[str] = next(iter(known.values()), [])
        for name, log in known.items():
            self.checks.logs += 1
            if log != reference:
                odd = set(log) ^ set(reference)
                self.problems.append(
                    f"the log of {name} differs: {len(log)} and {len(reference)}, {len(odd)} odd"
                )

    def _check_order(self, name: str) -> None:
        """A message never comes before one that it follows (C-298)."""
        position = {request_id: index for index, request_id in enumerate(self._taken[name])}
        for message_id, before in self._follows.items():
            mine = position.get(self._request_of[message_id])
            for named in before:
                theirs = position.get(self._request_of.get(named, ""))
                if mine is None or theirs is None or self._request_of[named] == self._request_of[message_id]:
                    continue
                self.checks.order_pairs += 1
                if theirs > mine and len(self._chunks[self._request_of[named]]) == 1:
                    self.problems.append(f"{name} was given {message_id} before {named}, which it follows")
