"""Drawn inputs against a live relay, and what must hold during and after them.

- Every request in good frames is answered once, or the relay closes the connection and gives the reason.
- No answer is `internal_error`; every answer is a message of RFC-0004.
- The answer to a RECONCILE is a message of negentropy, within the bound of a frame.
- A canary on a separate connection is served throughout.
- Acknowledged packets are served again, byte for byte, at once and at the end.
- When all have gone, the relay holds nothing for them and its log shows no accident.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from blake3 import blake3
from strata.protocol import canonical
from strata.protocol.errors import InvalidMessage, StrataError
from strata.protocol.negentropy import ItemSet, NegentropyError, Reconciler
from strata.protocol.provenance.serving import restore
from strata.protocol.wire import (
    Auth,
    AuthChallenge,
    Error,
    Event,
    Ok,
    Publish,
    Reconcile,
    Reconciled,
    RelayMessage,
    Subscribe,
    Unsubscribe,
    decode_client_message,
    decode_reconciled,
    decode_relay_message,
)

from tests.fuzz.grammar import FUZZER, Input, Piece, draw, from_json, kinds_of
from tests.support.bare_client import BareClient, open_client
from tests.support.made_packets import make, new_identity
from tests.support.relay_process import RelayProcess, http_get
from tests.support.waiting import until

__all__ = ["CORPUS", "Report", "fuzz", "keep", "read_corpus"]

CORPUS: Final = Path(__file__).parent / "corpus"
"""Inputs that once found something. They are sent first."""
_AT_ONCE: Final = 4
_ROUNDS_TO_LOOK: Final = 25
_TIMEOUT: Final = 20.0
_MOST_ANSWER_BYTES: Final = 200_000
"""The bound for negentropy, before it is written in hex."""
_HELD: Final = (
    "relayd_connections",
    "relayd_subscriptions",
    "relayd_subscriptions_behind",
    "relayd_publish_queue",
)


class Broken(AssertionError):
    """A promise was broken."""


@dataclass
class Report:
    """What a run sent and received, and which inputs broke a promise."""

    inputs: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    levels: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    closed: Counter[int] = field(default_factory=Counter)
    acknowledged: int = 0
    read_again: int = 0
    canary: int = 0
    broken: list[str] = field(default_factory=list)


class _Peer:
    """One connection that sends an input and keeps the answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.messages: list[RelayMessage | Reconciled] = []
        self.heard = asyncio.Event()
        self.close: tuple[int, str] | None = None
        self.ended = False
        self.challenge: AuthChallenge | None = None
        self._reading = asyncio.create_task(self._read(), name="fuzzing reader")

    async def challenged(self) -> AuthChallenge:
        """The relay's challenge, which comes first."""
        await self.wait(lambda: self.challenge is not None)
        assert self.challenge is not None
        return self.challenge

    async def send(self, data: bytes, step: int) -> None:
        """Send in pieces; bytes that the relay no longer reads are dropped."""
        with contextlib.suppress(OSError):
            for at in range(0, len(data), step):
                self._writer.write(data[at : at + step])
                await self._writer.drain()

    def finish(self) -> None:
        """Signal that nothing further comes."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds or the relay has closed. Raises `TimeoutError`."""
        async with asyncio.timeout(_TIMEOUT):
            while not condition() and not self.ended:
                self.heard.clear()
                await self.heard.wait()

    async def leave(self) -> None:
        self._writer.transport.abort()
        self._reading.cancel()
        [result] = await asyncio.gather(self._reading, return_exceptions=True)
        if isinstance(result, Broken):
            raise result

    async def _read(self) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._reader.readuntil(b"\r\n\r\n")
                while True:
                    first, length = await self._reader.readexactly(2)
                    if length > 125:
                        size = 2 if length == 126 else 8
                        length = int.from_bytes(await self._reader.readexactly(size), "big")
                    self._take(first & 15, await self._reader.readexactly(length))
        finally:
            self.ended = True
            self.heard.set()

    def _take(self, opcode: int, data: bytes) -> None:
        if opcode == 8:
            self.close = (int.from_bytes(data[:2], "big"), data[2:].decode())
        elif opcode == 1:
            reconciled = decode_reconciled(data)
            if isinstance(reconciled, Reconciled):
                self.messages.append(_checked(reconciled))
                self.heard.set()
                return
            try:
                message = decode_relay_message(data)
            except InvalidMessage as error:
                raise Broken(f"an answer is no message: {data[:300]!r}: {error}") from None
            if isinstance(message, AuthChallenge):
                self.challenge = message
            else:
                self.messages.append(message)
            self.heard.set()


def _checked(answer: Reconciled) -> Reconciled:
    """Raises `Broken` if it is not a message of negentropy, or is larger than one may be."""
    try:
        message = bytes.fromhex(answer.message)
        if message != b"\x61":
            Reconciler(ItemSet([])).receive(message)
    except (ValueError, NegentropyError) as error:
        raise Broken(f"a comparison is answered with what is no message of it: {error}") from None
    if len(message) > _MOST_ANSWER_BYTES:
        raise Broken(f"a comparison is answered with {len(message)} bytes")
    return answer


@contextlib.asynccontextmanager
async def _connected(relay: RelayProcess) -> AsyncIterator[_Peer]:
    parts = urlsplit(relay.ws)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
    key = base64.b64encode(random.randbytes(16)).decode()
    writer.write(
        f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    peer = _Peer(reader, writer)
    try:
        await peer.challenged()
        yield peer
    finally:
        await peer.leave()


class _Judge:
    """Sends inputs to one relay and holds it to its promises."""

    def __init__(self, relay: RelayProcess, report: Report, canary: BareClient) -> None:
        self.relay = relay
        self.report = report
        self._canary = canary
        self._author = new_identity()
        self._stored: dict[str, bytes] = {}
        """By packet id: the hash of what each acknowledged packet must read as."""

    async def send(self, made: Input) -> None:
        """Send one input and judge the answers. Raises `Broken` and `TimeoutError`."""
        async with _connected(self.relay) as peer:
            challenge = await peer.challenged()
            proof = "0x" + FUZZER.sign((challenge.challenge + challenge.server_id).encode()).hex()
            gaps = ((b"$challenge", challenge.challenge.encode()), (b"$proof", proof.encode()))
            sent = []
            for piece in made.pieces:
                data = piece.data
                for gap, value in gaps:
                    data = data.replace(gap, value)
                sent.append(data)
                await peer.send(piece.on_the_wire(data), made.step)
            if made.is_framed:
                await self._await_answers(peer, sent)
            else:
                peer.finish()
                await peer.wait(lambda: False)
        self._judge(peer, sent)
        self.report.inputs += 1
        self.report.levels.update(made.levels)
        self.report.requests.update(kinds_of(made))

    async def _await_answers(self, peer: _Peer, sent: Iterable[bytes]) -> None:
        """Check that every request is answered exactly once, or the relay closes and gives the reason."""
        barrier = "the end of it"
        await peer.send(_text(json.dumps({"type": "BARRIER", "client_msg_id": barrier})), 2**16)
        names = _due(sent)
        due = Counter([*names.values(), barrier])

        def answers() -> Counter[str]:
            named = (str(getattr(message, "client_msg_id", None)) for message in peer.messages)
            found = Counter(name for name in named if name in due)
            for message in peer.messages:
                if isinstance(message, Error) and message.client_msg_id is None:
                    # The subscription was ended by an AUTH with fewer rights: its marker is no longer due.
                    name = names.get(message.subscription_id, barrier)
                    found[name] = max(found[name], int(name != barrier))
            return found

        try:
            await peer.wait(lambda: answers().total() >= due.total())
        except TimeoutError:
            raise Broken(f"requests were not answered: {due - answers()}") from None
        # After bytes that are not UTF-8 the relay gives the reason for closing, but bytes still on their way
        # to the relay may reset the connection before the reason has arrived.
        if peer.ended and peer.close is None and all(map(_is_utf8, sent)):
            raise Broken(f"the relay closed the connection without a word; due were {due - answers()}")
        if extra := answers() - due:
            raise Broken(f"requests were answered twice: {extra}")

    def _judge(self, peer: _Peer, sent: Iterable[bytes]) -> None:
        if peer.close is not None:
            self.report.closed[peer.close[0]] += 1
            if peer.close[0] == 1011:
                raise Broken(f"the relay closed for a fault of its own: {peer.close}")
        published: dict[str, list[bytes]] = defaultdict(list)
        for data in sent:
            for name, packet in _published(data):
                published[name].append(packet)
        for message in peer.messages:
            kind = type(message).__name__
            self.report.answers[f"{kind} {message.code}" if isinstance(message, Error) else kind] += 1
            if isinstance(message, Error) and message.code == "internal_error":
                raise Broken(f"the relay had an accident: {message}")
            if isinstance(message, Ok) and not message.duplicate and message.duplicate_of is None:
                self._acknowledged(message, published)

    def _acknowledged(self, ok: Ok, published: Mapping[str, Sequence[bytes]]) -> None:
        self.report.acknowledged += 1
        # Several packets may share a name, and a name may be empty.
        packets = () if ok.client_msg_id is None else published.get(ok.client_msg_id, ())
        if not packets:
            return
        values: list[Any] = [canonical.parse(packet)[0] for packet in packets]
        value = next((one for one in values if one.get("packet_id") == ok.packet_id), None)
        if value is None:
            raise Broken(f"OK names {ok.packet_id} for {packets[-1][:300]!r}")
        if value.get("expires_at") is None:
            self._stored[ok.packet_id] = blake3(canonical.encode(value)).digest()

    async def serve_canary(self) -> None:
        """Check that an honest publish is answered. Raises `Broken`."""
        try:
            answer = await self._canary.publish(make(self._author))
        except TimeoutError:
            raise Broken("the canary was not served") from None
        if answer["type"] != "OK":
            raise Broken(f"the canary was refused: {answer}")
        self.report.canary += 1

    async def look(self) -> None:
        """With only the canary connected: nothing is held for others, and the log shows no accident."""
        held: dict[str, float] = {}

        def nothing_held() -> bool:
            held.update((name, self.relay.metric(name)) for name in _HELD)
            return held == {**dict.fromkeys(_HELD, 0.0), "relayd_connections": 1.0}

        try:
            await until(nothing_held, "nothing is held", _TIMEOUT)
        except AssertionError:
            raise Broken(f"the relay holds something for nobody: {held}") from None
        if complaints := self.relay.complaints():
            raise Broken(f"the log shows an accident: {complaints[0][:2000]}")
        for packet_id in list(self._stored)[-5:]:
            status, _, body = await asyncio.to_thread(http_get, f"{self.relay.http}/packets/{packet_id}")
            if status != 200:
                raise Broken(f"an acknowledged packet is not found: {packet_id}, {status}")
            event = msgspec.json.decode(body, type=_Served)
            self._compare(packet_id, event.packet, event.relay_annotations)

    async def read_all(self) -> None:
        """Read the whole log as a stream: every acknowledged packet is there once, unchanged."""
        waiting = set(self._stored)
        async with _connected(self.relay) as peer:
            await peer.send(_text('{"type":"SUBSCRIBE","subscription_id":"s","gapless":true}'), 2**16)
            seen: set[str] = set()
            while waiting:
                try:
                    await peer.wait(lambda: bool(peer.messages))
                except TimeoutError:
                    raise Broken(f"acknowledged packets are not in the log: {sorted(waiting)[:5]}") from None
                if peer.ended:
                    raise Broken("the relay closed a reader")
                taken, peer.messages = peer.messages, []
                for message in taken:
                    assert isinstance(message, Event), message
                    packet_id = json.loads(bytes(message.packet))["packet_id"]
                    if packet_id in seen:
                        raise Broken(f"a packet came twice: {packet_id}")
                    seen.add(packet_id)
                    if packet_id in waiting:
                        waiting.remove(packet_id)
                        self._compare(packet_id, message.packet, message.relay_annotations)

    def _compare(self, packet_id: str, packet: msgspec.Raw, annotations: dict[str, object] | None) -> None:
        try:
            restored, _ = restore(packet, annotations)
        except StrataError as error:
            raise Broken(f"a packet is not served as it was signed: {packet_id}: {error}") from None
        if blake3(restored.canonical).digest() != self._stored[packet_id]:
            raise Broken(f"a packet is served with other bytes than were acknowledged: {packet_id}")
        self.report.read_again += 1


class _Served(msgspec.Struct):
    packet: msgspec.Raw
    relay_annotations: dict[str, object] | None = None


def _text(text: str) -> bytes:
    return Piece(text.encode()).on_the_wire(text.encode())


def _due(sent: Iterable[bytes]) -> dict[object, str]:
    """The names under which answers must come, by subscription or number.

    A subscription that was ended, or that another has replaced, need not report the end of its history.
    """
    names: dict[object, str] = {}
    for number, data in enumerate(sent):
        with contextlib.suppress(InvalidMessage):
            message = decode_client_message(data)
            subject: object = number
            if isinstance(message, Subscribe | Unsubscribe):
                subject = message.subscription_id
                names.pop(subject, None)
            is_answered = isinstance(message, Publish | Auth | Reconcile) or (
                isinstance(message, Subscribe) and message.history_marker is True
            )
            if is_answered and message.client_msg_id is not None:
                names[subject] = message.client_msg_id
    return names


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _published(data: bytes) -> Iterable[tuple[str, bytes]]:
    with contextlib.suppress(InvalidMessage):
        message = decode_client_message(data)
        if isinstance(message, Publish) and message.client_msg_id is not None:
            yield message.client_msg_id, bytes(message.packet)


def read_corpus(folder: Path) -> list[Input]:
    """The inputs in a folder, in the order of their names."""
    return [from_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def keep(folder: Path, made: Input) -> None:
    """Write an input to a folder, under a name derived from it."""
    text = made.as_json()
    name = blake3(text.encode()).hexdigest()[:12]
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


async def fuzz(
    relay: RelayProcess,
    seed: int,
    *,
    inputs: int | None = None,
    seconds: float | None = None,
    first: Iterable[Input] = (),
    guilty: Callable[[Input], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Send the `first` inputs, then `inputs` drawn ones, or drawn ones for `seconds`.

    The first broken promise ends it. `guilty` is called with the inputs that broke it, or may have.
    """
    report = Report()
    chance = random.Random(seed)
    replayed = list(first)
    deadline = None if seconds is None else time.monotonic() + seconds
    drawn = 0
    async with open_client(relay.ws) as client:
        judge = _Judge(relay, report, client)
        try:
            for count in range(10**12):
                batch = replayed[:_AT_ONCE]
                replayed = replayed[_AT_ONCE:]
                is_over = time.monotonic() > deadline if deadline else drawn >= (inputs or 0)
                if not batch and is_over:
                    break
                if not batch:
                    batch = [draw(chance, int(time.time())) for _ in range(_AT_ONCE)]
                    drawn += len(batch)
                await _send_together(judge, batch, guilty)
                if count % _ROUNDS_TO_LOOK == 0:
                    await judge.look()
                if count % 1000 == 0:
                    progress(f"{report.inputs} inputs, {report.acknowledged} acknowledged")
            await judge.look()
            await judge.read_all()
        except (Broken, TimeoutError) as error:
            report.broken.append(str(error) or "the relay did not let go of a connection in time")
    return report


async def _send_together(judge: _Judge, batch: list[Input], guilty: Callable[[Input], None]) -> None:
    canary, *results = await asyncio.gather(
        judge.serve_canary(), *(judge.send(made) for made in batch), return_exceptions=True
    )
    for made, result in zip(batch, results, strict=True):
        if result is not None or canary is not None:
            guilty(made)
    for result in (canary, *results):
        if result is not None:
            raise result
