"""A bare peer: one WebSocket that speaks RFC-0004's JSON and takes nothing for granted.

It sends anything, collects what arrives, and waits at most `Patience.answer` for any message. A request is
answered by the next OK, ERROR or AUTH_OK, whether or not that echoes an id, so that a relay which echoes
wrongly fails the check on echoes and no other.

RFC-0004 has no end of history and no barrier. If the relay announces `history_marker`, the end is known;
otherwise history has ended when nothing arrives for `Patience.quiet` seconds. A message counts as not sent
if it has not arrived `Patience.settle` seconds after the answer to a later request.

A relay may limit the requests it accepts. Unless the check is about that limit, an ERROR `rate_limited`
raises `Throttled` wherever the check waits for a message, and the runner repeats the check when it may.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.protocol.packets import Packet
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from strata_testkit.conformance.forge import publish_text
from strata_testkit.conformance.verdicts import Failed, Message, Skipped, Throttled, expect, shorten
from strata_testkit.conformance.witness import Witness

__all__ = ["Patience", "Peer", "StoredHistory", "expect_error", "expect_ok", "ids_of"]

_MAX_INBOX = 20_000
_WINDOW = 64
"""The number of publishes sent before the peer waits for the first answer."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds: `answer` for a message that must arrive, `quiet` for history that may
    have ended, and `settle` for a message that must not arrive."""

    answer: float = 10.0
    quiet: float = 1.0
    settle: float = 0.1


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """The stored packets that a subscription sent, as EVENTs, and the marker if the relay sends one."""

    events: list[Message]
    marker: Message | None

    @property
    def ids(self) -> list[str]:
        """The packet ids, in the order of arrival."""
        return ids_of(self.events)

    def page(self, limit: int) -> StoredHistory:
        """This history without live EVENTs: of the first `limit` EVENTs those with a cursor. If the relay
        sends no marker, nothing else distinguishes them."""
        return StoredHistory([event for event in self.events[:limit] if event.get("cursor")], self.marker)

    @property
    def cursor(self) -> str:
        """The cursor of the last EVENT."""
        expect(self.events, "stored packets", "none")
        cursor = self.events[-1].get("cursor")
        if not isinstance(cursor, str):
            raise Failed("a cursor on every historical EVENT", shorten(self.events[-1].get("cursor")))
        return cursor


class Peer:
    """One connection. Messages that the check has not taken yet wait in `inbox`, in the order of arrival.

    AUTH_CHALLENGEs are kept separately, in `challenges`, since a relay may send one at any time.
    """

    def __init__(
        self,
        socket: ClientConnection,
        witness: Witness,
        patience: Patience,
        *,
        has_markers: bool,
        expects_limit: str | None = None,
    ) -> None:
        self.socket = socket
        self.inbox: deque[Message] = deque()
        self.challenges: list[Message] = []
        self.patience = patience
        self.is_authenticated = False
        self._witness = witness
        self._has_markers = has_markers
        self._expected_limit = expects_limit
        self._names = itertools.count(1)

    # Frames.

    async def send(self, message: Message | str | bytes) -> None:
        """Send an object as JSON, or a text or binary frame as it is."""
        frame = json.dumps(message) if isinstance(message, dict) else message
        async with asyncio.timeout(self.patience.answer):
            await self.socket.send(frame)

    async def receive(self) -> Message:
        """The next message that is not a challenge, from the inbox first. Fails if none arrives in time."""
        return self.inbox.popleft() if self.inbox else await self._next(self.patience.answer)

    async def expect(self, wanted: Callable[[Message], bool], what: str) -> Message:
        """The first message for which `wanted` is true; the others stay in the inbox. Fails if none comes."""
        for message in self.inbox:
            if wanted(message):
                self.inbox.remove(message)
                return message
        deadline = asyncio.get_running_loop().time() + self.patience.answer
        while True:
            try:
                message = await self._read(deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                raise Failed(what, self._silence()) from None
            if wanted(message):
                return message
            self.inbox.append(message)

    async def challenge(self) -> Message:
        """The newest AUTH_CHALLENGE; waits if there is none yet."""
        deadline = asyncio.get_running_loop().time() + self.patience.answer
        try:
            while not self.challenges:
                self.inbox.append(
                    await self._read(deadline - asyncio.get_running_loop().time(), challenge=True)
                )
                if self.inbox[-1].get("type") == "AUTH_CHALLENGE":
                    self.inbox.pop()
        except TimeoutError:
            raise Failed("an AUTH_CHALLENGE", self._silence()) from None
        return self.challenges[-1]

    async def close_code(self) -> int | None:
        """Read until the relay closes; return its code, or None if the connection was cut without one."""
        try:
            while True:
                self.inbox.append(await self._next(self.patience.answer))
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else None

    async def _next(self, timeout: float) -> Message:
        try:
            return await self._read(timeout)
        except TimeoutError:
            raise Failed("a message", self._silence()) from None

    async def _read(self, timeout: float, *, challenge: bool = False) -> Message:
        """The next message from the socket. Raises `TimeoutError`."""
        async with asyncio.timeout(max(timeout, 0)):
            while True:
                frame = await self.socket.recv()
                message = self._decoded(frame)
                if message.get("type") != "AUTH_CHALLENGE":
                    break
                self.challenges.append(message)
                if challenge:
                    break
        expect(len(self.inbox) < _MAX_INBOX, "a relay that sends what was asked for", "a flood of messages")
        return message

    def _decoded(self, frame: str | bytes) -> Message:
        if isinstance(frame, bytes):
            raise Failed("text frames from the relay", "a binary frame")
        try:
            message = json.loads(frame)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Failed("one JSON object in each frame", shorten(frame))
        self._witness.see(message, frame)
        if message.get("code") == "rate_limited" and not self._is_expected(message):
            raise Throttled(_pause(message))
        return message

    def _is_expected(self, limit: Message) -> bool:
        """Whether a limit is the one that the check is about, or may be because it has no detail."""
        return self._expected_limit is not None and limit.get("detail") in (None, self._expected_limit)

    def _silence(self) -> str:
        waiting = f", and {len(self.inbox)} other messages" if self.inbox else ""
        return f"nothing of the kind in {self.patience.answer:g} s{waiting}"

    # Requests.

    def name(self) -> str:
        """A fresh `client_msg_id`."""
        return f"c{next(self._names)}"

    async def answer(self, what: str = "an answer") -> Message:
        """The next OK, ERROR, AUTH_OK or END_OF_HISTORY; EVENTs stay in the inbox."""
        return await self.expect(lambda message: message.get("type") != "EVENT", what)

    async def answer_to(self, name: str) -> Message:
        """The answer that echoes this `client_msg_id`, for requests sent together."""
        return await self.expect(lambda message: message.get("client_msg_id") == name, f"an answer to {name}")

    async def ask(self, message: Message) -> Message:
        """Send a request under a fresh `client_msg_id` and return the answer."""
        await self.send({"client_msg_id": self.name(), **message})
        return await self.answer(f"an answer to {message.get('type')}")

    async def publish(self, packet: Packet | bytes | str) -> Message:
        """Publish and return the OK or ERROR. Skips the check if the relay requires an identity first."""
        await self.send(publish_text(packet, self.name()))
        answer = await self.answer("OK or ERROR for a PUBLISH")
        self._need_admission(answer)
        return answer

    async def publish_all(self, packets: Sequence[Packet | bytes]) -> list[Message]:
        """Publish all, many at a time, and return the answers in the order of the packets."""
        names = [self.name() for _ in packets]
        waiting: deque[str] = deque()
        answers: dict[str, Message] = {}
        for name, packet in zip(names, packets, strict=True):
            await self.send(publish_text(packet, name))
            waiting.append(name)
            if len(waiting) >= _WINDOW:
                first = waiting.popleft()
                answers[first] = await self.answer_to(first)
        for name in waiting:
            answers[name] = await self.answer_to(name)
        for answer in answers.values():
            self._need_admission(answer)
        return [answers[name] for name in names]

    async def store(self, *packets: Packet | bytes) -> list[Message]:
        """Publish packets that must be accepted, and return the OKs."""
        answers = [await self.publish(packets[0])] if len(packets) == 1 else await self.publish_all(packets)
        for answer in answers:
            expect_ok(answer)
        return answers

    def _need_admission(self, answer: Message) -> None:
        if answer.get("code") == "unauthenticated" and not self.is_authenticated:
            raise Skipped("the relay wants an authenticated session for this; give --identity")

    # Subscriptions.

    async def subscribe(
        self, subscription_id: str, filters: Message | None = None, **options: object
    ) -> StoredHistory:
        """Open a subscription and return its stored packets. Fails on an ERROR."""
        history, error = await self.try_subscribe(subscription_id, filters, **options)
        if error is not None:
            raise Failed("a subscription", shorten(error))
        return history

    async def try_subscribe(
        self, subscription_id: str, filters: Message | None = None, **options: object
    ) -> tuple[StoredHistory, Message | None]:
        """Open a subscription; return its stored packets, and the ERROR if it is refused."""
        message = {
            "type": "SUBSCRIBE",
            "subscription_id": subscription_id,
            "filters": filters or {},
            **options,
        }
        if self._has_markers:
            message = {"history_marker": True, "client_msg_id": self.name(), **message}
        await self.send(message)
        last = await self._history_end()
        events = self.taken(subscription_id)
        if last is not None and last.get("type") == "ERROR":
            self._need_admission(last)
            return StoredHistory(events, None), last
        return StoredHistory(events, last), None

    async def _history_end(self) -> Message | None:
        if self._has_markers:
            return await self.answer("the end of a subscription's history")
        try:
            while True:
                message = await self._read(self.patience.quiet)
                if message.get("type") == "ERROR":
                    return message
                self.inbox.append(message)
        except TimeoutError:
            return None

    async def refused_subscription(self, message: Message) -> Message:
        """Send a SUBSCRIBE that must be refused, and return the ERROR."""
        await self.send({"type": "SUBSCRIBE", **message})
        return await self.expect(
            lambda answer: answer.get("type") in ("ERROR", "END_OF_HISTORY"), "an ERROR for a SUBSCRIBE"
        )

    async def unsubscribe(self, subscription_id: str) -> None:
        """End a subscription; there is no answer."""
        await self.send({"type": "UNSUBSCRIBE", "subscription_id": subscription_id})

    async def events(self, subscription_id: str, count: int) -> list[Message]:
        """The next `count` EVENTs of a subscription."""
        return [
            await self.expect(
                lambda message: _is_event_of(message, subscription_id),
                f"EVENT {number} of {count} on subscription {subscription_id}",
            )
            for number in range(1, count + 1)
        ]

    def taken(self, subscription_id: str) -> list[Message]:
        """Remove this subscription's EVENTs from the inbox and return them."""
        events = [message for message in self.inbox if _is_event_of(message, subscription_id)]
        self.inbox = deque(message for message in self.inbox if not _is_event_of(message, subscription_id))
        return events

    async def barrier(self) -> None:
        """Wait until everything that the earlier requests caused has arrived.

        A PUBLISH without a packet must be answered (R-192); messages on other paths then get a moment more.
        """
        await self.send(publish_text("{}", self.name()))
        await self.answer("OK or ERROR for a PUBLISH")
        try:
            deadline = asyncio.get_running_loop().time() + self.patience.settle
            while True:
                self.inbox.append(await self._read(deadline - asyncio.get_running_loop().time()))
        except TimeoutError:
            return

    async def quiet(self, subscription_id: str) -> list[Message]:
        """The EVENTs that this subscription was sent up to now, removed from the inbox."""
        await self.barrier()
        return self.taken(subscription_id)


def expect_ok(answer: Message, packet: Packet | None = None) -> Message:
    """Fail unless the answer is an OK, for this packet if one is given."""
    expect(answer.get("type") == "OK", "OK", answer)
    if packet is not None:
        expect(answer.get("packet_id") == packet.packet_id, f"OK for {packet.packet_id}", answer)
    return answer


def expect_error(answer: Message, *codes: str, detail: str | None = None) -> Message:
    """Fail unless the answer is an ERROR, with one of these codes and this detail if they are given."""
    wanted = f"ERROR {' or '.join(codes)}".strip() + (f" with detail {detail}" if detail else "")
    expect(answer.get("type") == "ERROR", wanted, answer)
    expect(not codes or answer.get("code") in codes, wanted, answer)
    expect(detail is None or answer.get("detail") == detail, wanted, answer)
    return answer


def ids_of(events: Sequence[Message]) -> list[str]:
    """The packet ids of EVENTs, in order."""
    return [str((event.get("packet") or {}).get("packet_id")) for event in events]


def _is_event_of(message: Message, subscription_id: str) -> bool:
    return message.get("type") == "EVENT" and message.get("subscription_id") == subscription_id


def _pause(refusal: Message) -> int:
    """How long to wait after a `rate_limited`, in seconds: the longer of its `retry_after` and its window."""
    times = (refusal.get("retry_after"), refusal.get("window_seconds"))
    return max((time for time in times if type(time) is int and time > 0), default=1)
