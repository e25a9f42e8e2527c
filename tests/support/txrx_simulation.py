"""Senders and a server over a network that cuts, delays, reorders and loses, on a virtual clock.

`run(seed)` makes one world from its seed, runs it to its end, and raises `BrokenRule` if a channel violated
its rules. The shells do as little as those over sockets: move bytes, call back.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from strata.txrx.codecs import BytesCodec
from strata.txrx.errors import DeliveryStatus, DeliveryTimeout, TxRxClosed, TxRxError
from strata.txrx.receiving import ReceiverCounters, ReceivingLink, Sessions
from strata.txrx.sending import SendingSession
from strata.txrx.settings import TxRxSettings

LAST_SECOND = 2000.0
"""A world that is still busy after this time hangs."""


class BrokenRule(AssertionError):
    """A channel did what it must not."""


class World:
    """The clock, the network, and the one address that is served."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        chance = self.chance
        self.is_gentle = chance.random() < 0.6
        """Nothing in it may cost a message: no restart, no close, and more time than any trouble lasts."""
        timeout = 300.0 if self.is_gentle else chance.choice([2.0, 10.0])
        self.settings = TxRxSettings(
            message_ack_every_n_messages=chance.choice([1, 3, 1000]),
            message_ack_time_interval=chance.choice([0.05, 0.5]),
            message_ack_eagerly=chance.random() < 0.5,
            message_delivery_timeout=timeout,
            session_timeout=timeout + 60.0,
            queue_capacity=chance.choice([1, 2, 8, 100]),
            link_timeout=chance.choice([1.5, 10.0]),
            idle_frame_timeout=chance.choice([2.0, 30.0]),
        )
        self.delay = chance.choice([0.001, 0.02, 0.3])
        self.is_refusing = False
        self.wires: list[Wire] = []
        self.servers = [Server(self)]
        self.server: Server | None = self.servers[0]
        self.senders = [Sender(self, number) for number in range(chance.choice([1, 1, 2, 4]))]
        self._plan()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), call))

    def later(self, longest: float, call: Callable[[], None]) -> None:
        self.at(self.now + self.chance.uniform(0, longest), call)

    def run(self) -> None:
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            if self.now > LAST_SECOND:
                raise BrokenRule(f"seed {self.seed}: it does not come to an end")
            call()

    def _plan(self) -> None:
        """Schedule what will happen: after a while nothing goes wrong any more."""
        chance = self.chance
        seconds = chance.choice([0.5, 3.0, 20.0])
        for sender in self.senders:
            for _ in range(chance.randrange(1, 8)):
                self.later(seconds, sender.post_some)
        troubles = [self._cut, self._cut, self._cut, self._half_open, self._refuse, self._stall_reader]
        if not self.is_gentle:
            troubles += [self._restart, self._close_server, self._close_sender]
        for _ in range(chance.randrange(16)):
            self.later(seconds, chance.choice(troubles))

    # Troubles

    def _cut(self) -> None:
        if self.wires:
            self.chance.choice(self.wires).cut()

    def _half_open(self) -> None:
        if self.wires:
            self.chance.choice(self.wires).vanish()

    def _refuse(self) -> None:
        self.is_refusing = True
        self.later(5.0, self._admit)

    def _admit(self) -> None:
        self.is_refusing = False

    def _stall_reader(self) -> None:
        if self.server is not None:
            self.server.stalled_until = self.now + self.chance.uniform(0, 8)

    def _restart(self) -> None:
        """Kill the process; another one will serve the address."""
        if self.server is not None:
            self.server.die()
            self.server = None
            self.later(3.0, self._serve)

    def _serve(self) -> None:
        self.server = Server(self)
        self.servers.append(self.server)

    def _close_server(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            server.close()
            if self.chance.random() < 0.5:
                self.later(3.0, self._serve)

    def _close_sender(self) -> None:
        sender = self.chance.choice(self.senders)
        sender.session.close(TxRxClosed("closed by its owner"))
        sender.step()


class Alarm:
    """A single call, at the earliest of the times requested."""

    def __init__(self, world: World, call: Callable[[], None]) -> None:
        self._world, self._call = world, call
        self._when: float | None = None

    def arm(self, when: float | None) -> None:
        if when is not None and (self._when is None or when < self._when):
            self._when = when = max(when, self._world.now)
            self._world.at(when, lambda: self._ring(when))

    def _ring(self, when: float) -> None:
        if when == self._when:
            self._when = None
            self._call()


class Stream:
    """One direction of a connection: bytes arrive in order, in any pieces, or never."""

    def __init__(self, world: World, hear: Callable[[bytes], None], end: Callable[[], None]) -> None:
        self._world, self._hear, self._end = world, hear, end
        self._last_arrival = 0.0
        self._waiting: deque[bytes | None] = deque()
        self._delay = world.delay * world.chance.choice([1, 1, 1, 10])
        self.is_lost = False
        """Bytes on their way or sent later never arrive."""
        self.is_paused = False
        """The other end does not read: arriving bytes wait."""

    def send(self, data: bytes) -> None:
        chance = self._world.chance
        begin = 0
        while begin < len(data):
            longest = chance.choice([1, 20, 400, 100_000, 100_000])
            piece = data[begin : begin + chance.randint(1, longest)]
            begin += len(piece)
            if begin < len(data) and chance.random() < 0.7:
                piece, begin = piece + data[begin : begin + 100_000], begin + 100_000
            self._schedule(piece)

    def finish(self) -> None:
        self._schedule(None)

    def _schedule(self, piece: bytes | None) -> None:
        world = self._world
        self._last_arrival = max(self._last_arrival, world.now + world.chance.uniform(0, self._delay))
        world.at(self._last_arrival, lambda: self._arrive(piece))

    def _arrive(self, piece: bytes | None) -> None:
        if not self.is_lost:
            self._waiting.append(piece)
            self.flow()

    def flow(self) -> None:
        while self._waiting and not self.is_paused:
            piece = self._waiting.popleft()
            if piece is None:
                self._end()
            else:
                self._hear(piece)


class Wire:
    """A connection between a sender and a server."""

    def __init__(self, world: World, sender: Sender, server: Server) -> None:
        self._world = world
        self._sender = sender
        self.far = FarEnd(world, server, self)
        self.up = Stream(world, self.far.hear, self.far.lost)
        self.down = Stream(world, lambda data: sender.hear(self, data), lambda: sender.lost(self))
        world.wires.append(self)
        server.ends[self.far.link] = self.far

    def cut(self) -> None:
        """Both ends notice it, each at its own time: the sender may be back before the server knows."""
        self._silence()
        self._world.later(self._world.chance.choice([0.0, 0.1]), lambda: self._sender.lost(self))
        self._world.later(self._world.chance.choice([0.0, 5.0]), self.far.lost)

    def vanish(self) -> None:
        """Nobody notices, until much later the server's system does."""
        self._silence()
        self._world.later(30.0, self.far.lost)

    def _silence(self) -> None:
        self.up.is_lost = self.down.is_lost = True
        if self in self._world.wires:
            self._world.wires.remove(self)

    def leave(self) -> None:
        """The sender disconnects; written bytes still arrive, perhaps after those of its next connection."""
        self.down.is_lost = True
        self.up.finish()
        if self in self._world.wires:
            self._world.wires.remove(self)


class Sender:
    """A `SendingSession` with the shell that it needs."""

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.posted: list[int] = []
        self.refused: list[int] = []
        self.delivered: list[int] = []
        self.returned: list[tuple[int, DeliveryStatus]] = []
        self._world = world
        self.session: SendingSession[bytes, int] = SendingSession(
            self._new_id(), BytesCodec(), world.settings
        )
        self._wire: Wire | None = None
        self._is_connecting = False
        self._delay = 0.001
        self._alarm = Alarm(world, self._ring)

    def _new_id(self) -> int:
        return self._world.chance.getrandbits(64)

    def post_some(self) -> None:
        chance = self._world.chance
        for _ in range(chance.choice([1, 1, 5, 20])):
            number = len(self.posted) + len(self.refused)
            size = chance.choices([0, 300, 20_000, 70_000], [50, 20, 2, 1])[0]
            try:
                self.session.post(b"%d %d " % (self.number, number) + bytes(size), number)
            except TxRxError:
                self.refused.append(number)
            else:
                self.posted.append(number)
        self.step()

    def step(self) -> None:
        session, now = self.session, self._world.now
        session.mark(now)
        if self._wire is not None:
            for piece in session.data_to_send():
                self._wire.up.send(piece)
        elif session.pending and not self._is_connecting:
            self._is_connecting = True
            self._world.later(self._delay, self._connect)
            self._delay = min(1.0, self._delay * 2)
        self.delivered += session.take_delivered()
        for returned in session.take_returned():
            assert returned.token is not None, "every message is posted with its number"
            self.returned.append((returned.token, returned.delivery))
        if session.closed is not None and self._wire is not None:
            wire, self._wire = self._wire, None
            wire.leave()
        self._alarm.arm(session.get_timer())

    def _connect(self) -> None:
        self._is_connecting = False
        world = self._world
        if self.session.closed is None and world.server is not None and not world.is_refusing:
            self._wire = Wire(world, self, world.server)
            self.session.connection_made(world.now)
        self.step()

    def hear(self, wire: Wire, data: bytes) -> None:
        if wire is self._wire:
            room = self.session.get_buffer()
            room[: len(data)] = data
            self.session.buffer_updated(len(data), self._world.now)
            self._delay = 0.001
            self.step()

    def lost(self, wire: Wire) -> None:
        if wire is self._wire:
            self._wire = None
            wire.leave()
            self.session.connection_lost(self._new_id())
            self.step()

    def _ring(self) -> None:
        self.session.handle_timer(self._world.now)
        if self.session.is_dead and self._wire is not None:
            self.lost(self._wire)
        self.step()


class Server:
    """The sessions and the queue of one process, with a reader that is sometimes slow."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sessions: Sessions[Any] = Sessions(world.settings)
        self.counters = ReceiverCounters()
        self.ends: dict[ReceivingLink[bytes], FarEnd] = {}
        self.queue: deque[bytes] = deque()
        self.taken: list[tuple[int, int]] = []
        """The sender and number of every message that ever entered the queue."""
        self.is_gone = False
        self.stalled_until = 0.0
        self.waiting: dict[FarEnd, None] = {}
        self._is_reading = False
        self._alarm = Alarm(world, self._forget)

    @property
    def room(self) -> int:
        return self.world.settings.queue_capacity - len(self.queue)

    def put(self, messages: list[bytes]) -> None:
        for message in messages:
            self.queue.append(message)
            sender, number, _ = message.split(b" ", 2)
            self.taken.append((int(sender), int(number)))
        if len(self.queue) > self.world.settings.queue_capacity:
            raise BrokenRule("more in the queue than it holds")
        self._read_on()

    def _read_on(self) -> None:
        if self.queue and not self._is_reading and not self.is_gone:
            self._is_reading = True
            at = max(self.world.now, self.stalled_until)
            self.world.at(at + self.world.chance.choice([0.0, 0.001, 0.05]), self._read)

    def _read(self) -> None:
        self._is_reading = False
        if self.is_gone or not self.queue:
            return
        self.queue.popleft()
        for end in list(self.waiting):
            if self.room:
                del self.waiting[end]
                end.step()
        self._read_on()

    def lost(self, end: FarEnd) -> None:
        self.ends.pop(end.link, None)
        self.waiting.pop(end, None)
        self._alarm.arm(self.sessions.get_timer())

    def _forget(self) -> None:
        self.sessions.handle_timer(self.world.now)
        self._alarm.arm(self.sessions.get_timer())

    def close(self) -> None:
        """Close the channel as its receiver; connected senders are informed."""
        self.is_gone = True
        for end in list(self.ends.values()):
            end.link.close("the receiver has closed the channel")
            end.write()

    def die(self) -> None:
        self.is_gone = True
        for end in list(self.ends.values()):
            end.die()


class FarEnd:
    """A `ReceivingLink` with the shell that it needs."""

    def __init__(self, world: World, server: Server, wire: Wire) -> None:
        self.link: ReceivingLink[bytes] = ReceivingLink(
            server.sessions, BytesCodec(), world.settings, server.counters, world.now
        )
        self._world, self._server, self._wire = world, server, wire
        self._is_over = False
        self._alarm = Alarm(world, self._ring)

    def hear(self, data: bytes) -> None:
        while data and not self._is_over:
            room = self.link.get_buffer()
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            self.link.buffer_updated(count, self._world.now)
            self.step()
            if self.link.is_blocked and data:
                self._wire.up._waiting.appendleft(data)
                return

    def step(self) -> None:
        if self._is_over:
            return
        if not self._server.is_gone:
            self._server.put(self.link.take(self._server.room, self._world.now))
        if self.link.superseded is not None:
            older = self._server.ends.get(self.link.superseded)
            if older is not None:
                older.lost()
                older._wire.down.finish()
        if self.link.is_blocked:
            self._server.waiting[self] = None
        self.write()
        was_paused, self._wire.up.is_paused = self._wire.up.is_paused, self.link.is_blocked
        if was_paused and not self.link.is_blocked:
            self._wire.up.flow()

    def write(self) -> None:
        data = self.link.data_to_send()
        if data:
            self._wire.down.send(data)
        if self.link.is_finished and not self._is_over:
            self._wire.down.finish()
            self.lost()
        elif not self._is_over:
            self._alarm.arm(self.link.get_timer())

    def _ring(self) -> None:
        if not self._is_over:
            self.link.handle_timer(self._world.now)
            self.write()

    def lost(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.link.connection_lost(self._world.now)
            self._server.lost(self)

    def die(self) -> None:
        self._is_over = True
        self._wire.cut()


def run(seed: int) -> World:
    """Run one world to its end. Raises `BrokenRule`."""
    world = World(seed)
    world.run()
    for sender in world.senders:
        _judge(world, sender)
    return world


def _judge(world: World, sender: Sender) -> None:
    def demand(holds: bool, rule: str, *seen: Any) -> None:
        if not holds:
            raise BrokenRule(f"seed {world.seed}, sender {sender.number}: {rule}: {seen}")

    taken_by = [
        [number for whose, number in server.taken if whose == sender.number] for server in world.servers
    ]
    taken = set(itertools.chain.from_iterable(taken_by))
    for numbers in taken_by:
        rising = all(one < other for one, other in itertools.pairwise(numbers))
        demand(rising, "in a server's queue each message is once at most, and in order", numbers)
    returned = [number for number, _ in sender.returned]
    demand(sender.delivered == sorted(set(sender.delivered)), "delivered once, in order", sender.delivered)
    demand(returned == sorted(set(returned)), "returned once, in the order of posting", returned)
    demand(
        sorted(sender.delivered + returned) == sender.posted,
        "what was posted is delivered or returned",
        sender.posted,
        sender.delivered,
        returned,
    )
    demand(taken.issuperset(sender.delivered), "what is acknowledged is in the queue", sender.delivered)
    demand(taken.isdisjoint(sender.refused), "what was refused is not in the queue", sender.refused)
    never = {number for number, delivery in sender.returned if delivery is DeliveryStatus.NOT_DELIVERED}
    demand(taken.isdisjoint(never), "what is said not to be delivered is not", never & taken)
    if world.is_gentle:
        closed = sender.session.closed
        demand(closed is None and not returned, "nothing is lost without a reason", closed, returned)
    elif isinstance(sender.session.closed, DeliveryTimeout):
        demand(bool(returned), "nothing times out but a message")
