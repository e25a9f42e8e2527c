"""A messaging node over the simulated network, for the channel of a simulated participant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence

from strata.channels.messaging.emitter import EventEmitter, NamedEvent
from strata.channels.messaging.node import NodeError, check_content_topic
from strata.channels.messaging.reading import HistoryPage, Place, read_position, write_position
from strata.channels.messaging.values import (
    HEALTH_EVENTS,
    MESSAGE_EVENTS,
    ConnectionStatus,
    ConnectionStatusChange,
    MessageEnvelope,
    NodeMessageError,
    NodeMessagePropagated,
    NodeMessageReceived,
    NodeMessageSent,
    ReceivedEnvelope,
)
from strata.protocol.errors import ConnectionFailed

from strata_testkit.sim.loop import Process
from strata_testkit.sim.network import EPOCH, SimNetwork, SimRelay

__all__ = ["SimNode"]

_ANSWER_TIMEOUT = 3.0
_QUEUED_MESSAGES = 1_000


class SimNode:
    """One participant's access to the network, for the life of one process."""

    def __init__(
        self,
        name: str,
        network: SimNetwork,
        *,
        clock_offset: float = 0.0,
        largest: int | None = None,
        defaults: object = None,
        identity: str | None = None,
        receipts: bool = True,
    ) -> None:
        """`identity` is the author of its messages, if that is not its name."""
        self.name = name
        self.message_events = EventEmitter(MESSAGE_EVENTS)
        self.health_events = EventEmitter(HEALTH_EVENTS)
        self.clock_offset = clock_offset
        self.defaults = defaults
        self.hub: object = None
        self.receipts = receipts
        self.unplugged = False
        self._identity = identity or name
        self._network = network
        self._process = Process.current()
        self._largest = largest
        self._topics: set[str] = set()
        self._requests = 0
        self._arrived: asyncio.Queue[NodeMessageReceived] = asyncio.Queue(_QUEUED_MESSAGES)
        self._status = self.connection_status
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader = asyncio.get_running_loop().create_task(self._read(), name=f"sim-node {name}")
        network.attach(self)

    def unplug(self) -> None:
        """End the node with its process: nothing comes in and nothing goes out any more."""
        self.unplugged = True
        self._network.detach(self)
        self._reader.cancel()
        for task in list(self._tasks):
            task.cancel()

    # For the channel.

    @property
    def transport_identity(self) -> str:
        """The participant's identity: its name, unless several devices share an identity."""
        return self._identity

    @property
    def connection_status(self) -> ConnectionStatus:
        """How many of the relays are reachable."""
        reached = len(self._network.reachable(self.name))
        if not reached:
            return ConnectionStatus.DISCONNECTED
        if reached < len(self._network.relays):
            return ConnectionStatus.PARTIALLY_CONNECTED
        return ConnectionStatus.CONNECTED

    def wall(self) -> float:
        """The participant's wall time: virtual time since a fixed moment, plus the error of its clock."""
        return EPOCH + self._network.time() + self.clock_offset

    def store_time(self) -> float | None:
        """The latest time by the relays' clocks, a minute ahead, as a challenge gives it; None if offline."""
        return EPOCH + self._network.time() + 60 if self._network.reachable(self.name) else None

    def largest_payload(self, content_topic: str, *, repairable: bool = False) -> int | None:
        """The limit given at the start."""
        return self._largest

    def declared_limit(self) -> tuple[int, int] | None:
        """None: these relays have no rate limit."""
        return None

    async def send(self, envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
        """Send to every reachable relay; the first OK counts. Raises `NodeError` for an impossible topic."""
        topic = check_content_topic(envelope.content_topic)
        self._requests += 1
        request_id = request_id or f"{self.name}:{self._requests}"
        if self.unplugged:
            return request_id
        message = ReceivedEnvelope(
            content_topic=topic,
            payload=envelope.payload,
            ephemeral=envelope.ephemeral,
            author=None if envelope.again else self._identity,
            timestamp=None if envelope.again else int(self.wall()),
        )
        self._publish(NodeMessageReceived(self._network.hash_of(envelope.payload), message), request_id)
        return request_id

    async def send_again(
        self, message_hash: bytes, *, topic: str, request_id: str, retention_seconds: int | None = None
    ) -> None:
        """Send again a message that some relay stored, under its original author."""
        for relay in self._network.reachable(self.name):
            if relay.serves(message_hash, self._network.time()):
                event = relay.stored[message_hash]
                again = NodeMessageReceived(self._network.hash_of(event.message.payload), event.message)
                self._publish(again, request_id)
                return
        self._tell(NodeMessageError(request_id, None, "the original cannot be had", "not_found", False))

    def _publish(self, event: NodeMessageReceived, request_id: str) -> None:
        answered: list[bool] = []

        def answer() -> None:
            if not answered and not self.unplugged:
                answered.append(True)
                timer.cancel()
                self._tell(NodeMessagePropagated(request_id, event.message_hash))
                self._tell(NodeMessageSent(request_id, event.message_hash))

        def give_up() -> None:
            if not answered and not self.unplugged:
                answered.append(True)
                self._tell(NodeMessageError(request_id, event.message_hash, "no answer", "timeout"))

        timer = asyncio.get_running_loop().call_later(_ANSWER_TIMEOUT, give_up)
        for relay in self._network.reachable(self.name):
            self._network.publish(self.name, relay, event, answer)

    async def subscribe(self, topics: Sequence[str], *, authors: Iterable[str] = ()) -> None:
        """Start to receive these topics."""
        self._topics |= {check_content_topic(topic) for topic in topics}

    async def unsubscribe(self, topics: Sequence[str]) -> None:
        """Stop receiving these topics. Raises `NodeError` for one that is not subscribed."""
        for topic in topics:
            if topic not in self._topics:
                raise NodeError(f"{topic} is not subscribed")
        self._topics -= set(topics)

    async def history(
        self, topic: str, *, since_ms: int
    ) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
        """What the reachable relays have, newest first. Raises `ConnectionFailed` if none is reachable."""
        stored: dict[bytes, NodeMessageReceived] = {}
        for relay in self._reached():
            for event in self._network.stored(relay, topic, since_ms / 1000):
                stored[event.message_hash] = event
        found = list(stored.values())
        size = self._network.page_messages
        for start in range(0, len(found), size):
            await asyncio.sleep(2 * self._network.pass_time())
            self._reached()
            page = found[start : start + size]
            self._network.messages_read += len(page)
            yield page

    async def fetch(self, topic: str, hashes: Sequence[bytes]) -> AsyncGenerator[NodeMessageReceived, None]:
        """Those messages that the reachable relays have. Raises `ConnectionFailed` if none is reachable."""
        self._reached()
        await asyncio.sleep(2 * self._network.pass_time())
        for message_hash in hashes:
            for relay in self._network.reachable(self.name):
                if relay.serves(message_hash, self._network.time()):
                    self._network.messages_read += 1
                    yield relay.stored[message_hash]
                    break

    async def read(
        self,
        topic: str,
        *,
        order: str,
        since_ms: int,
        until_ms: int | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[HistoryPage, None]:
        """What the reachable relays have, in the order in which they got it, after a position.

        Raises `ConnectionFailed` if none is reachable.
        """
        last = {url: place.cursor for url, place in read_position(after).items()}
        found: list[tuple[float, str, NodeMessageReceived]] = []
        for relay in self._reached():
            listed = self._network.stored(relay, topic, since_ms / 1000 if order == "desc" else 0)
            if order == "asc":
                listed.reverse()
            hashes = [event.message_hash.hex() for event in listed]
            place = last.get(relay.name) or ""
            begin = hashes.index(place) + 1 if place in hashes else 0
            found += [(relay.stored_at[each.message_hash], relay.name, each) for each in listed[begin:]]
        if order == "asc" and after is None:
            offset = self.wall() - self._network.time() - self.clock_offset
            found = [each for each in found if (offset + each[0] + 1) * 1000 >= since_ms]
        if until_ms is not None:
            found = [each for each in found if (each[2].message.timestamp or 0) * 1000 <= until_ms]
        found.sort(key=lambda each: each[0], reverse=order == "desc")
        places = read_position(after)
        size = self._network.page_messages
        for start in range(0, len(found), size):
            await asyncio.sleep(2 * self._network.pass_time())
            self._reached()
            part = found[start : start + size]
            self._network.messages_read += len(part)
            places |= {relay: Place(event.message_hash.hex(), int(at)) for at, relay, event in part}
            once = {event.message_hash: event for _, _, event in part}
            yield HistoryPage(list(once.values()), write_position(places))

    def _reached(self) -> list[SimRelay]:
        reachable = self._network.reachable(self.name)
        if not reachable:
            raise ConnectionFailed("no relay can be reached")
        return reachable

    # For the network.

    def hears(self, topic: str) -> bool:
        """Whether a topic is subscribed."""
        return topic in self._topics

    def arrives(self, event: NodeMessageReceived) -> None:
        """Take a message. If too many are waiting, it is lost, as on a connection that is cut."""
        if self._arrived.full():
            self._network.counts["lost_messages"] += 1
        else:
            self._arrived.put_nowait(event)

    def reach_changed(self) -> None:
        """Note that the set of reachable relays may have changed."""
        status = self.connection_status
        if status is not self._status:
            self._status = status
            self._spawn(self.health_events.emit(ConnectionStatusChange(status)))

    async def _read(self) -> None:
        while True:
            await self.message_events.emit(await self._arrived.get())

    def _tell(self, event: NamedEvent) -> None:
        self._spawn(self.message_events.emit(event))

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        # The tasks of a node belong to the node's process, whichever process calls it.
        start = asyncio.get_running_loop().create_task if self._process is None else self._process.start
        task = start(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
