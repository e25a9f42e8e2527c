"""The claims that a run proves, and the evidence for them.

The judge is a naive model: it knows what every program gave to its channel, what every channel gave to its
program, and what the relays stored, and it compares them. It does not know how a channel works.

A check without evidence proves nothing, so everything checked is counted, and an empty run fails.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.values import MessageEnvelope, NodeMessageReceived
from strata.channels.reliable.channel import ReliableChannel
from strata.channels.reliable.events import (
    HistoryGap,
    IrretrievableMessage,
    MessageReceived,
    ReliableMessageDelivered,
    ReliableMessageDeliveryError,
    ReliableMessageSendError,
)
from strata.channels.reliable.values import AtRisk
from strata.channels.sds import SdsMessage
from strata.channels.segmentation.messages import InvalidSegment, decode_segment
from strata.protocol.errors import StrataError

from strata_testkit.sim.loop import virtual_time
from strata_testkit.sim.network import EPOCH

__all__ = ["Evidence", "PromiseChecks", "SimulationFailed", "decoded", "same_order"]

decoded = lru_cache(maxsize=256)(SdsMessage.decode)
"""Decode an SDS message, cached because every participant receives the same few."""
_GAP_EVENT = "history-gap"
_MOST_BEHIND_MS = 30_000
_MOST_OF_A_KIND = 5
"""The most problems reported of one kind: a fault may strike a thousand participants."""


class SimulationFailed(StrataError, AssertionError):
    """A run broke the promise; `seed` runs it again."""

    def __init__(self, seed: int, problems: list[str], world: str = "") -> None:
        super().__init__(seed, problems)
        self.seed = seed
        self.problems = problems
        self.world = world

    def __str__(self) -> str:
        listed = "\n  ".join(self.problems[:20])
        of_world = f" of {self.world}" if self.world else ""
        return f"seed {self.seed}{of_world}: {len(self.problems)} problems\n  {listed}"


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
    """Messages that a participant lacks, and that no relay and no participant has any more."""
    told_missing: int = 0
    """Messages that no relay has any more, and that a participant was told it has missed."""
    told_late: int = 0
    """Messages that came after those that follow them, once a participant was told that they are gone."""
    acknowledgements: int = 0
    """Messages that a participant named in its own messages, and that were looked up on its disk."""
    sync_claims: int = 0
    """Claims of a channel to be synced that were compared with the relays."""
    weighed: int = 0
    """Participants whose state was weighed."""
    idle_minutes: float = 0.0
    """Quiet virtual minutes in which the traffic was counted."""


@dataclass(slots=True)
class Evidence:
    """Everything observed in the network and at the programs, to compare with the events of the channels."""

    problems: list[str] = field(default_factory=list)
    programs_are_busy: bool = True
    """Whether some messages take the programs some time to process."""
    gaps_are_told: bool = False
    """Whether everyone who lacks a message that no relay has any more must be told so."""
    clocks_are_right: bool = False
    """Whether every clock has been right for long enough that channel time must be near it."""
    is_served: Callable[[str, str], bool] = lambda name, message_id: False
    """Whether a relay that this participant reaches has an SDS message."""
    write_seconds: float = 0.0
    """The longest time that a change may take to reach a participant's store."""
    max_log: int = 10_000
    """The number of messages that a log holds; a full log may have lost its beginning."""
    checks: PromiseChecks = field(default_factory=PromiseChecks)
    traffic: Counter[str] = field(default_factory=Counter)
    """The messages that channels gave to their nodes, by kind: `content`, `again`, `sync`, `repair`; and
    their bytes, under the same names with `_bytes` appended."""
    _sent: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    _taken: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """By program: the messages that it took, each with its place in their order."""
    _had_before: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By program: the messages that it had taken, or had on its disk, when it lost that disk."""
    _chunks: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _acknowledged: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    """By sender: those of its chunks that it heard another participant name, and when it first did."""
    _follows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _request_of: dict[str, str] = field(default_factory=dict)
    _id_of_packet: dict[bytes, str | None] = field(default_factory=dict)
    _delivered: set[str] = field(default_factory=set)
    _undelivered: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _excused: set[str] = field(default_factory=set)
    _in_hand: set[tuple[str, str]] = field(default_factory=set)
    _untold: set[str] = field(default_factory=set)
    _told: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _given_up: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _gaps: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    _lamport_of: dict[str, int] = field(default_factory=dict)
    _of_a_kind: Counter[str] = field(default_factory=Counter)

    # What is seen.

    def watch(
        self,
        name: str,
        node: MessagingNode,
        channel: ReliableChannel,
        holds: Callable[[str], bool] = lambda message_id: True,
        written_from: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Observe a participant's node and the events of its channel.

        `holds` says whether a message is on its disk, and `written_from` when the last write that the disk
        finished began.
        """
        send = node.send

        async def seen(envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
            self._saw_sent(name, envelope.payload, holds)
            return await send(envelope, request_id=request_id)

        node.send = seen  # type: ignore[method-assign]
        node.message_events.on(NodeMessageReceived.name, lambda event: self._saw_received(name, event))
        events = channel.message_events
        events.on(ReliableMessageDelivered.name, lambda event: self._told_delivered(name, event))
        events.on(
            ReliableMessageDeliveryError.name,
            lambda event: self._told_undelivered(name, event, written_from()),
        )
        events.on(ReliableMessageSendError.name, lambda event: self._failed.add(event.request_id))
        events.on(IrretrievableMessage.name, lambda event: self._given_up[name].add(event.message_id))
        if _GAP_EVENT in events.names:
            events.on(_GAP_EVENT, lambda event: self._told_gap(name, event))

    def sent(self, name: str, request_id: str, payload: bytes) -> None:
        """Note that a channel has accepted a message."""
        self._sent[request_id] = (name, payload)

    def recorded(
        self,
        sender: str,
        request_id: str,
        payload: bytes,
        *,
        message_id: str,
        lamport: int,
        follows: tuple[str, ...],
    ) -> None:
        """Note that the relays have a message from a sender that is not simulated."""
        self._sent[request_id] = (sender, payload)
        self._chunks[request_id] = {message_id}
        self._request_of[message_id] = request_id
        self._follows[message_id] = follows
        self._lamport_of[message_id] = lamport

    def packet(self, message_hash: bytes, message_id: str) -> None:
        """Note which SDS message a packet contains."""
        self._id_of_packet[message_hash] = message_id

    def took(self, name: str, message: MessageReceived) -> None:
        """Note that a program has taken a message, and check that it may."""
        taken = self._taken[name]
        if message.request_id in taken:
            self.problems.append(f"{name} was given {message.request_id} twice")
        known = self._sent.get(message.request_id)
        if known is not None and (known[0] == name or known[1] != message.payload):
            self.problems.append(f"{name} was given {message.request_id} altered, or its own")
        taken[message.request_id] = len(taken)
        self.checks.deliveries += 1

    def has_taken(self, name: str, request_id: str) -> bool:
        """Whether a program has this message, with its present disk."""
        return request_id in self._taken[name] or (name, request_id) in self._in_hand

    def forget(self, name: str, held: Callable[[str], bool]) -> None:
        """Note that a program starts anew: it has forgotten all that it took and was about to send.

        `held` says whether an SDS message was on the lost disk: it may have been acknowledged from there,
        while the program was still busy with earlier messages.
        """
        self._had_before[name].update(self._taken[name])
        self._had_before[name].update(
            request_id for request_id, chunks in self._chunks.items() if chunks and all(map(held, chunks))
        )
        self._taken[name] = {}
        for request_id, (sender, _) in self._sent.items():
            if sender == name and request_id not in self._delivered:
                self._excused.add(request_id)

    def died(self, name: str, at_risk: AtRisk) -> None:
        """Note that a program died: events between its store and the program may never arrive."""
        heard, written = self._acknowledged[name], virtual_time() - self.write_seconds
        for message_id in [each for each, at in heard.items() if at > written]:
            del heard[message_id]
        if at_risk.message is not None:
            self._in_hand.add((name, at_risk.message.request_id))
        for event in at_risk.events:
            if isinstance(event, ReliableMessageDelivered | ReliableMessageDeliveryError):
                self._untold.add(event.request_id)

    def packet_id(self, event: NodeMessageReceived) -> str | None:
        """The id of the SDS message in a packet; None if it has none."""
        if event.message_hash not in self._id_of_packet:
            message = decoded(event.message.payload)
            self._id_of_packet[event.message_hash] = None if message is None else message.message_id
        return self._id_of_packet[event.message_hash]

    def request_of(self, message_id: str | None) -> str | None:
        """The request of which this is the only chunk; None for syncs, and for one chunk of several."""
        request_id = self._request_of.get(message_id or "")
        return request_id if request_id is not None and len(self._chunks[request_id]) == 1 else None

    def sender_of(self, request_id: str) -> str | None:
        """The sender of a request, or None if it has not been accepted."""
        return self._sent.get(request_id, (None, b""))[0]

    def _saw_sent(self, name: str, payload: bytes, holds: Callable[[str], bool]) -> None:
        message = decoded(payload)
        if message is None or message.lamport_timestamp is None:
            return
        if message.message_id not in self._follows:
            # Its causal history acknowledges messages, and a crash must not make that untrue.
            self.checks.acknowledgements += len(message.causal_history)
            for message_id in message.history_ids:
                if not holds(message_id):
                    self._blame("stored", f"{name} acknowledged {message_id} before it was written")
        if not message.content:
            self._count("sync", payload)
        elif message.message_id in self._follows:
            self._count("again" if message.sender_id == name else "repair", payload)
        else:
            self._count("content", payload)
            self._first_sent(message)
            self._check_clock(name, message.lamport_timestamp)

    def _check_clock(self, name: str, lamport: int) -> None:
        if self.clocks_are_right:
            behind = (EPOCH + virtual_time()) * 1000 - lamport
            if behind > _MOST_BEHIND_MS:
                self._blame("clock", f"the channel time of {name} is {behind / 1000:.0f} s behind its clock")

    def _count(self, kind: str, payload: bytes) -> None:
        self.traffic[kind] += 1
        self.traffic[kind + "_bytes"] += len(payload)

    def _first_sent(self, message: SdsMessage) -> None:
        try:
            segment = decode_segment(message.content or b"")
        except InvalidSegment:
            return
        if segment.request_id is not None:
            self._chunks[segment.request_id].add(message.message_id)
            self._request_of[message.message_id] = segment.request_id
            self._follows[message.message_id] = tuple(message.history_ids)
            self._lamport_of[message.message_id] = message.lamport_timestamp or 0

    def _saw_received(self, name: str, event: NodeMessageReceived) -> None:
        message = decoded(event.message.payload)
        if message is None or message.sender_id == name:
            return
        for named in message.history_ids:
            known = self._sent.get(self._request_of.get(named, ""))
            # A message may be sent and named before it is accepted; then nobody is known to have sent it.
            if known is None or known[0] == name:
                self._acknowledged[name].setdefault(named, virtual_time())

    def _told_gap(self, name: str, gap: HistoryGap) -> None:
        """Note a gap in the history: messages known by name, and all whose times are between its ends."""
        for message_id in gap.message_ids:
            if self.is_served(name, message_id):
                self._blame("gone", f"{name} was told that {message_id} is gone, which a relay gives it")
        self._given_up[name].update(gap.message_ids)
        self._gaps[name].append((gap.from_time or 0, gap.to_time))

    def _told_delivered(self, name: str, event: ReliableMessageDelivered) -> None:
        self.checks.delivered_events += 1
        self._told[name, event.name, event.request_id] += 1
        self._delivered.add(event.request_id)

    def _told_undelivered(self, name: str, event: ReliableMessageDeliveryError, written_from: float) -> None:
        self.checks.delivery_errors += 1
        chunks = self._chunks[event.request_id]
        # The event was decided when the store began to write it, however often the write failed.
        heard, decided = self._acknowledged[name], min(virtual_time() - self.write_seconds, written_from)
        if chunks and all(heard.get(chunk, decided) < decided for chunk in chunks):
            self.problems.append(f"{name} said {event.request_id} is undelivered, and had heard otherwise")
        self._undelivered.add(event.request_id)

    # What is proved.

    def conclude(
        self,
        logs: Mapping[str, list[str] | None],
        obtainable: Collection[str],
        stored: Collection[str] | None = None,
    ) -> None:
        """Compare all the evidence, once all have converged.

        `logs` has the log of each participant by name, or None while its channel is closed. `obtainable` are
        the SDS messages that any relay or any participant still has: nobody can be given messages that lost
        disks and forgetful relays took from all of them. `stored` are those that the relays have.
        """
        self._compare_logs(logs)
        ended = self._delivered | self._undelivered | self._failed | self._untold
        for request_id, (sender, _) in self._sent.items():
            if request_id in self._excused:
                continue
            self.checks.messages += 1
            for name in logs:
                if name != sender and not self.has_taken(name, request_id):
                    self._not_given(name, sender, request_id, obtainable, stored)
            if sender in logs and request_id not in ended:
                self.problems.append(f"{sender} never learned what became of {request_id}")
            if request_id in self._delivered:
                self._check_delivered(sender, request_id)
        for (name, event, request_id), count in self._told.items():
            if count > 1:
                self.problems.append(f"{name} was told {event} of {request_id} {count} times")
        for name in logs:
            self._check_order(name)
        if not self.checks.messages or not self.checks.deliveries:
            self.problems.append("nothing was sent, or nothing received: the run proves nothing")

    def _not_given(
        self,
        name: str,
        sender: str,
        request_id: str,
        obtainable: Collection[str],
        stored: Collection[str] | None,
    ) -> None:
        """Judge a message that a program lacks: either nobody can supply it, or the promise is broken."""
        chunks = self._chunks[request_id]
        if not self.gaps_are_told:
            if all(chunk in obtainable for chunk in chunks):
                self._blame("given", f"{name} was never given {request_id} of {sender}")
            else:
                self.checks.unobtainable += 1
        elif all(chunk in (stored or ()) for chunk in chunks):
            self._blame("given", f"{name} was never given {request_id} of {sender}, which a relay has")
        elif self._was_told(name, chunks):
            self.checks.told_missing += 1
        else:
            self._blame("told", f"{name} was never told that it has missed {request_id} of {sender}")

    def _was_told(self, name: str, chunks: Iterable[str]) -> bool:
        """Whether a program was told that these chunks are gone."""
        return all(chunk in self._given_up[name] or self._is_in_gap(name, chunk) for chunk in chunks)

    def _is_in_gap(self, name: str, message_id: str) -> bool:
        lamport = self._lamport_of.get(message_id)
        return lamport is not None and any(first <= lamport <= last for first, last in self._gaps[name])

    def _check_delivered(self, sender: str, request_id: str) -> None:
        """Check that another program has, or had, a message that was reported as delivered."""
        if not any(name != sender and self._has_had(name, request_id) for name in list(self._taken)):
            self.problems.append(f"{sender} was told {request_id} is delivered, and nobody has it")

    def _has_had(self, name: str, request_id: str) -> bool:
        return self.has_taken(name, request_id) or request_id in self._had_before.get(name, ())

    def _blame(self, kind: str, problem: str) -> None:
        """Report a problem; of many problems of one kind, the first few and the number of the others."""
        self._of_a_kind[kind] += 1
        if self._of_a_kind[kind] <= _MOST_OF_A_KIND:
            self.problems.append(problem)
        else:
            more = f"… {kind}: {self._of_a_kind[kind] - _MOST_OF_A_KIND} more"
            if self.problems and self.problems[-1].startswith(f"… {kind}: "):
                self.problems[-1] = more
            else:
                self.problems.append(more)

    def _compare_logs(self, logs: Mapping[str, list[str] | None]) -> None:
        known = {name: log for name, log in logs.items() if log is not None}
        first, reference = next(iter(known.items()), ("", []))
        for name, log in known.items():
            self.checks.logs += 1
            if not self.agree(name, log, first, reference):
                odd = set(log) ^ set(reference)
                self._blame(
                    "logs", f"the log of {name} differs: {len(log)} and {len(reference)}, {len(odd)} odd"
                )

    def agree(self, name: str, log: list[str], other: str, others: list[str]) -> bool:
        """Whether two logs agree. A message that relays lack may be in only one, if the other was told."""
        if same_order(log, others, self.max_log):
            return True
        if not self.gaps_are_told:
            return False
        common = set(log) & set(others)
        lacking = ((name, set(others) - common), (other, set(log) - common))
        return [each for each in log if each in common] == [
            each for each in others if each in common
        ] and all(self._was_told(who, [message_id]) for who, ids in lacking for message_id in ids)

    def _check_order(self, name: str) -> None:
        """Check that no message came before one that it follows (C-298)."""
        taken = self._taken[name]
        for message_id, before in self._follows.items():
            mine = taken.get(self._request_of[message_id])
            if mine is None:
                continue
            for named, theirs in self._places(taken, before):
                if self._request_of[named] == self._request_of[message_id]:
                    continue
                self.checks.order_pairs += 1
                if theirs > mine and len(self._chunks[self._request_of[named]]) == 1:
                    if named in self._given_up[name]:
                        self.checks.told_late += 1  # it was reported as gone, and came late
                        continue
                    self._blame("order", f"{name} was given {message_id} before {named}, which it follows")

    def _places(self, taken: Mapping[str, int], message_ids: Iterable[str]) -> Iterator[tuple[str, int]]:
        for message_id in message_ids:
            place = taken.get(self._request_of.get(message_id, ""))
            if place is not None:
                yield message_id, place


def same_order(log: list[str], other: list[str], max_log: int) -> bool:
    """Whether two logs are equal or, if one is full, have their common messages in the same order."""
    if log == other:
        return True
    if max(len(log), len(other)) < max_log:
        return False
    common = set(log) & set(other)
    return [each for each in log if each in common] == [each for each in other if each in common]
