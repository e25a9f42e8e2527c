"""Participants on a network that loses, repeats, delays and reorders, in virtual time from one seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from strata.channels.sds import (
    Acknowledged,
    Delivered,
    DeliveryFailed,
    Participant,
    Retransmit,
    SdsConfig,
    SdsState,
    SendRepair,
    SendSync,
)

START_MS = 1_760_000_000_000
SMALL = SdsConfig(bloom_filter_size=200, bloom_filter_error_rate=0.0001, lost_message_timeout_ms=0)


@dataclass
class Peer:
    """A participant, its clock, and everything it has reported."""

    participant: Participant
    skew_ms: int = 0
    state: SdsState = field(default_factory=SdsState)
    sent: list[str] = field(default_factory=list)
    delivered: list[str] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    retransmissions: int = 0
    syncs: int = 0
    cut_until: int = 0
    """Until then the peer is cut off: it receives nothing, and nobody receives what it sends."""


class Network:
    """`loss` and `repeat` are probabilities, delays are drawn evenly up to `delay_ms`.

    The participants named in `receipts` list what they received; the others send plain filters.
    """

    def __init__(
        self,
        seed: int,
        names: Iterable[str],
        *,
        loss: float = 0.0,
        repeat: float = 0.0,
        delay_ms: int = 100,
        config: SdsConfig = SMALL,
        track_changes: bool = False,
        receipts: Collection[str] = (),
    ) -> None:
        self.receipts = receipts
        self.random = random.Random(seed)
        self.config = config
        self.loss, self.repeat, self.delay_ms = loss, repeat, delay_ms
        self.track_changes = track_changes
        self.now = 0
        self._queue: list[tuple[int, int, str, str, bytes]] = []
        self._count = 0
        self.peers = {
            name: Peer(
                Participant(
                    "room",
                    name,
                    config,
                    now_ms=START_MS,
                    random=self.random.random,
                    track_changes=track_changes,
                    receipts=name in receipts,
                )
            )
            for name in names
        }

    def wall(self, name: str) -> int:
        return START_MS + self.now + self.peers[name].skew_ms

    def at(self, when: int, action: str, name: str, data: bytes = b"") -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, action, name, data))

    def send(self, name: str, content: bytes) -> str:
        peer = self.peers[name]
        self._count += 1
        message = peer.participant.wrap(content, self.wall(name), self._count)
        peer.sent.append(message.message_id)
        peer.participant.dispatched(message.message_id, self.wall(name), message.message_id[:32].encode())
        self._broadcast(name, message.encode())
        self._settle(name)
        return message.message_id

    def run(self, duration_ms: int) -> None:
        end = self.now + duration_ms
        timers = {name: self._timer(name) for name in self.peers}  # nothing changes for the others
        while True:
            timer_at, timer_name = min(zip(timers.values(), timers, strict=True))
            queued_at = self._queue[0][0] if self._queue else float("inf")
            if min(timer_at, queued_at) > end:
                break
            if queued_at <= timer_at:
                when, _, action, name, data = heapq.heappop(self._queue)
                self.now = max(self.now, when)
                self._act(action, name, data)
                timers[name] = self._timer(name)
            else:
                self.now = max(self.now, int(-(-timer_at // 1)))
                self.peers[timer_name].participant.handle_timer(self.wall(timer_name))
                self._settle(timer_name)
                timers[timer_name] = self._timer(timer_name)
        self.now = end

    def _timer(self, name: str) -> float:
        """The time at which a participant wants to be called."""
        peer = self.peers[name]
        return peer.participant.get_timer() - START_MS - peer.skew_ms

    def restart(self, name: str) -> None:
        """End the process, and start it again from its stored state."""
        peer = self.peers[name]
        peer.participant = Participant(
            "room",
            name,
            self.config,
            now_ms=self.wall(name),
            random=self.random.random,
            state=peer.state,
            receipts=name in self.receipts,
        )

    def _act(self, action: str, name: str, data: bytes) -> None:
        peer = self.peers[name]
        match action:
            case "arrive":
                if self.now >= peer.cut_until:
                    peer.participant.receive(data, self.wall(name))
                    self._settle(name)
            case "send":
                self.send(name, data)
            case "skew":
                peer.skew_ms = int(data)
            case "cut":
                peer.cut_until = self.now + int(data)
            case "restart":
                self.restart(name)

    def _broadcast(self, sender: str, data: bytes) -> None:
        if self.now < self.peers[sender].cut_until:
            return
        for name in self.peers:
            if name == sender or self.random.random() < self.loss:
                continue
            for _ in range(1 + (self.random.random() < self.repeat)):
                self.at(self.now + 1 + int(self.random.random() * self.delay_ms), "arrive", name, data)

    def _settle(self, name: str) -> None:
        peer = self.peers[name]
        if self.track_changes:
            peer.state.apply(peer.participant.changes())
        for event in peer.participant.events():
            match event:
                case Delivered():
                    peer.delivered.append(event.message_id)
                case Acknowledged():
                    peer.acknowledged.append(event.message_id)
                case DeliveryFailed():
                    peer.failed.append(event.message_id)
                case Retransmit():
                    peer.retransmissions += 1
                    self._broadcast(name, event.data)
                    peer.participant.dispatched(event.message_id, self.wall(name))
                case SendSync():
                    peer.syncs += 1
                    self._broadcast(name, event.data)
                case SendRepair():
                    self._broadcast(name, event.data)
        if self.track_changes:
            peer.state.apply(peer.participant.changes())

    def logs(self) -> dict[str, list[str]]:
        return {
            name: [entry.message_id for entry in peer.participant.log()] for name, peer in self.peers.items()
        }


def delivered(participant: Participant) -> list[str]:
    """What the participant has delivered since it was last asked."""
    return [event.message_id for event in participant.events() if isinstance(event, Delivered)]
