"""A few real channels on a simulated network in virtual time, whose nodes a test can watch and answer."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from strata.channels.messaging.node import NodeError
from strata.channels.messaging.values import (
    MessageEnvelope,
    NodeMessageError,
    NodeMessageReceived,
    NodeMessageSent,
    ReceivedEnvelope,
)
from strata.channels.reliable import ChannelEvent, MessageReceived, ReliableChannel, ReliableMessageReceived
from strata.channels.reliable.client import make_channel
from strata.channels.sds import BloomFilter, BloomParameters, HistoryEntry, Kind, SdsMessage
from strata.channels.segmentation.messages import Segment, decode_segment, encode_segment, message_hash
from strata.protocol.errors import StrataError
from strata_testkit.sim import NO_FAULTS, Faults, SimNetwork, SimNode, run_virtually

__all__ = [
    "RECEIVED",
    "SWALLOW",
    "TOPIC",
    "Node",
    "Recorder",
    "Refusal",
    "Sending",
    "World",
    "content_message",
    "filter_with",
    "own_tasks",
    "segment_of",
    "sync_message",
    "take",
    "unreachable_topic",
    "until",
    "virtually",
]

TOPIC = "/test/1/room/proto"
RECEIVED = (MessageReceived.name, ReliableMessageReceived.name)

E = TypeVar("E")


def virtually(work: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test on a virtual clock: it may sleep for hours."""

    @functools.wraps(work)
    def run(*args: Any, **keywords: Any) -> None:
        run_virtually(lambda: work(*args, **keywords))

    return run


async def until(condition: Callable[[], object], *, within: float = 600.0) -> None:
    """Wait for a condition to become true, for at most `within` virtual seconds."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + within
    while not condition():
        assert clock() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def take(channel: ReliableChannel, count: int = 1, *, within: float = 3600.0) -> list[bytes]:
    """Iterate a channel until `count` messages have come, for at most `within` virtual seconds."""
    taken: list[bytes] = []
    async with asyncio.timeout(within):
        while len(taken) < count:
            taken.append((await anext(channel)).payload)
    return taken


def own_tasks() -> set[str]:
    """The names of all running tasks, except the test itself and the nodes' own readers."""
    names = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    return {name for name in names if not name.startswith("sim-node")}


SWALLOW = "swallow"
"""An answer: the node reports the message as sent, and nobody gets it."""


@dataclass(frozen=True)
class Refusal:
    """An answer: the node reports that it could not send the message."""

    code: str = "refused"
    recoverable: bool = False


@dataclass(frozen=True)
class Sending:
    """A message that a channel gave to its node."""

    envelope: MessageEnvelope
    request_id: str

    @property
    def message(self) -> SdsMessage | None:
        """The SDS message, if it is readable."""
        return SdsMessage.decode(self.envelope.payload)

    @property
    def kind(self) -> Kind | None:
        """The kind of the SDS message."""
        return None if self.message is None else self.message.kind

    @property
    def segment(self) -> Segment:
        """The segment in a content or ephemeral message."""
        assert self.message is not None and self.message.content is not None
        return decode_segment(self.message.content)


Answer = str | Refusal | StrataError | None


class Node(SimNode):
    """A simulated node that records what is sent and subscribed, and answers as `answer` decides.

    `answer` is called with each sending: None sends it, a `Refusal` refuses it, `SWALLOW` loses it, an
    exception is raised.
    """

    def __init__(self, name: str, network: SimNetwork, **options: Any) -> None:
        super().__init__(name, network, **options)
        self.network = network
        self.sendings: list[Sending] = []
        self.subscribed: list[str] = []
        self.unsubscribed: list[str] = []
        self.answer: Callable[[Sending], Answer] = lambda _: None
        self.subscribe_error: StrataError | None = None
        self.subscribe_gate = asyncio.Event()
        self.subscribe_gate.set()
        self.subscribe_delay = 0.0

    @property
    def contents(self) -> list[Sending]:
        """The content messages that were sent, including retransmissions."""
        return [each for each in self.sendings if each.kind is Kind.CONTENT]

    async def send(self, envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
        assert request_id is not None
        sending = Sending(envelope, request_id)
        self.sendings.append(sending)
        answer = self.answer(sending)
        match answer:
            case None:
                return await super().send(envelope, request_id=request_id)
            case StrataError():
                raise answer
            case Refusal():
                self._tell(
                    NodeMessageError(request_id, None, "the test said no", answer.code, answer.recoverable)
                )
            case _:
                self._tell(NodeMessageSent(request_id, self.network.hash_of(envelope.payload)))
        return request_id

    async def subscribe(self, topics: Sequence[str], *, authors: Iterable[str] = ()) -> None:
        await self.subscribe_gate.wait()
        await asyncio.sleep(self.subscribe_delay)
        if self.subscribe_error is not None:
            raise self.subscribe_error
        self.subscribed += topics
        await super().subscribe(topics, authors=authors)

    async def unsubscribe(self, topics: Sequence[str]) -> None:
        self.unsubscribed += topics
        await super().unsubscribe(topics)

    def hear(self, payload: bytes, topic: str = TOPIC) -> None:
        """Deliver a message here, and nowhere else."""
        message = ReceivedEnvelope(content_topic=topic, payload=payload, timestamp=int(self.wall()))
        self.arrives(NodeMessageReceived(self.network.hash_of(payload), message))


class Recorder:
    """Everything that a channel reported, in order."""

    def __init__(self, channel: ReliableChannel, *, received: bool = True) -> None:
        """Without `received` there is no handler for received messages, so that only iterating takes them."""
        self.events: list[ChannelEvent] = []
        self._found: dict[type[Any], tuple[list[ChannelEvent], list[Any]]] = {}
        for name in channel.message_events.names:
            if received or name not in RECEIVED:
                channel.message_events.on(name, self.events.append)

    @property
    def names(self) -> list[str]:
        """The name of each event."""
        return [event.name for event in self.events]

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind. Callers that wait call this repeatedly: only new events are examined."""
        seen, found = self._found.get(kind, ([], []))
        if len(seen) > len(self.events) or (seen and self.events[len(seen) - 1] is not seen[-1]):
            seen, found = [], []  # a test has cleared them
        new = self.events[len(seen) :]
        seen += new
        found += [event for event in new if isinstance(event, kind)]
        self._found[kind] = seen, found
        return found.copy()

    def count(self, kind: type[Any]) -> int:
        """The number of events of one kind."""
        return len(self.of(kind))


class World:
    """A network, and the channels on it."""

    def __init__(self, faults: Faults = NO_FAULTS, *, seed: int = 1) -> None:
        self.network = SimNetwork(1, faults, random.Random(seed))
        self.nodes: dict[str, Node] = {}

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return asyncio.get_running_loop().time()

    def node(self, name: str, **options: Any) -> Node:
        """The node of this name, created if necessary."""
        if name not in self.nodes:
            self.nodes[name] = Node(name, self.network, **options)
        return self.nodes[name]

    def make(
        self, name: str, channel_id: str = "room", topic: str = TOPIC, *, sender: str = "", **options: Any
    ) -> ReliableChannel:
        """A channel that is not open yet. Options that `make_channel` does not take are settings."""
        taken = ("config", "encryption", "encoder", "decoder", "profile")
        own = {key: options.pop(key) for key in taken if key in options}
        return make_channel(
            self.node(name),
            channel_id,
            topic,
            sender or name,
            options=options,
            rng=random.Random(f"{name} {channel_id} {len(self.nodes)}"),
            **own,
        )

    async def open(self, name: str, *args: Any, **options: Any) -> ReliableChannel:
        """A channel that is open."""
        return await self.make(name, *args, **options).open()

    async def pair(self, **options: Any) -> tuple[ReliableChannel, ReliableChannel]:
        """Alice and Bob in one room."""
        return await self.open("alice", **options), await self.open("bob", **options)


# Messages made by a participant that the test plays.


def segment_of(payload: bytes, request_id: str | None = None) -> bytes:
    """A payload in one segment."""
    return encode_segment(
        Segment(
            entire_message_hash=message_hash(payload),
            data_segment_count=1,
            payload=payload,
            request_id=request_id,
        )
    )


def filter_with(*message_ids: str) -> bytes:
    """A filter of default size that holds these messages and no others."""
    held = BloomFilter(BloomParameters(10_000, 0.001))
    for message_id in message_ids:
        held.insert(message_id)
    return held.to_bytes()


def content_message(
    sender_id: str,
    message_id: str,
    payload: bytes,
    lamport: int,
    *,
    follows: Sequence[str] = (),
    request_id: str | None = None,
) -> bytes:
    """A content message of another participant, whole in one segment."""
    return SdsMessage(
        sender_id,
        message_id,
        "room",
        lamport,
        tuple(HistoryEntry(each) for each in follows),
        filter_with(),
        content=segment_of(payload, request_id),
    ).encode()


def sync_message(
    sender_id: str, lamport: int, *, names: Sequence[str] = (), holds: Sequence[str] = ()
) -> bytes:
    """A sync message of another participant: its history names `names`, and its filter holds `holds`."""
    history = tuple(HistoryEntry(each) for each in names)
    return SdsMessage(sender_id, f"sync {lamport}", "room", lamport, history, filter_with(*holds)).encode()


def unreachable_topic() -> NodeError:
    """The error that a node raises for a topic that it can never have."""
    return NodeError("the test has no such topic")
