"""Admission between a fake log and fake peers. The log commits on request and feeds the key directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from strata.protocol import canonical, packets
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity, Signer
from strata.protocol.keys import KeyRules
from strata.protocol.packets import Packet
from strata.protocol.provenance import ProvenanceTrust
from strata.protocol.sequences import first_of_day
from strata.protocol.typed import trust_strength

from relayd.admission.budgets import TrustAct, TrustBudgets
from relayd.admission.limits import AdmissionLimits
from relayd.admission.parsing_apart import ApartParser
from relayd.admission.pipeline import Admission
from relayd.admission.request import Lane, PublishRequest
from relayd.faults import FaultLog
from relayd.identity.bootstrap import BootstrapContents
from relayd.identity.directory import Identities
from relayd.policy import Plugins, Policy
from relayd.store.identities import AuthorsPage
from relayd.store.payers import Payer, Unbilled
from relayd.store.types import LogEntry, NewPacket, StoredPacket, StoreUnavailable, TrustRow

NOW = 1_760_000_000
ALICE = Identity(bytes(range(32)))


def signed(author: Signer, content: Mapping[str, object], *, timestamp: int = NOW, **more: object) -> Packet:
    """A packet as anybody may send it, including claims that our own builder would not make."""
    members = {name: value for name, value in more.items() if value is not None}
    value = members | {
        "version": 1,
        "timestamp": timestamp,
        "author_id": author.did,
        "content": dict(content),
    }
    text = canonical.encode(value)
    value |= {"packet_id": packets.byte_hash(text), "signature": f"0x{author.sign(text).hex()}"}
    return Packet.parse(canonical.encode(value))


def made(number: int, *, timestamp: int = NOW, padding: int = 0, author: Signer = ALICE) -> bytes:
    content = {"type": "POST", "text": "x" * padding, "number": number}
    return signed(author, content, timestamp=timestamp).canonical


def tampered(raw: bytes) -> bytes:
    """The same packet with another signature: the id still recomputes."""
    at = raw.index(b'"signature":"0x') + len(b'"signature":"0x')
    return raw[:at] + (b"1" if raw[at : at + 1] != b"1" else b"2") + raw[at + 1 :]


class FakeLog:
    """A writer that commits on request, and the duplicate index over its commits."""

    def __init__(self) -> None:
        self.queue: list[tuple[NewPacket, PublishRequest]] = []
        self.received: list[bytes] = []
        self.stored: dict[bytes, tuple[int, int]] = {}
        self.entries: list[LogEntry] = []
        self.lookups: list[list[bytes]] = []
        self.reads: list[list[str]] = []
        self.down = False
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    def enqueue(self, packet: NewPacket, request: PublishRequest) -> None:
        self.queue.append((packet, request))
        self.received.append(packet.body)

    def append(self, packet: NewPacket, now: int) -> LogEntry | None:
        """Store a packet, as any process may; returns None if it is already there."""
        if packet.packet_id in self.stored:
            return None
        sequence = first_of_day(now // 86_400) + len(self.entries) + 1
        self.stored[packet.packet_id] = (sequence, now)
        self.entries.append(LogEntry(sequence, now, packet))
        return self.entries[-1]

    async def find(self, ids: Sequence[bytes], *_: object) -> dict[bytes, tuple[int, int]]:
        self.lookups.append(list(ids))
        if self.down:
            raise StoreUnavailable("down")
        return {key: self.stored[key] for key in ids if key in self.stored}

    async def findings(self, ids: Sequence[bytes], *_: object) -> dict[bytes, bytes]:
        if self.down:
            raise StoreUnavailable("down")
        found = {entry.packet.packet_id: entry.packet.annotation for entry in self.entries}
        return {key: note for key in ids if (note := found.get(key)) is not None}

    async def authors(self, type_: str, after: int = 0) -> AuthorsPage:
        found = [entry.packet for entry in self.entries if entry.packet.content_type == type_]
        return AuthorsPage({packet.author_id for packet in found}, None)

    async def packets_of(
        self, authors: Sequence[str], types: Iterable[str], *, after: int = 0, **_: object
    ) -> list[StoredPacket]:
        self.reads.append(list(authors))
        self.asked.set()
        found = [
            StoredPacket(entry.sequence, entry.received_at, entry.packet.body)
            for entry in self.entries
            if entry.packet.author_id in authors
            and entry.packet.content_type in set(types)
            and entry.sequence > after
        ]
        await self.gate.wait()
        if self.down:
            raise StoreUnavailable("down")
        return found

    async def trust_acts(
        self, author: str, types: Iterable[str], *, after: int, most: int, **_: object
    ) -> list[TrustRow]:
        rows = await self.packets_of([author], types, after=after)
        parsed = [(row, Packet.parse(row.body, max_depth=512)) for row in rows[::-1][:most]]
        return [
            TrustRow(packet.digest, row.received_at, packet.content_type, trust_strength(packet))
            for row, packet in parsed
        ]


class Peer:
    """A connection that records its answers: (client_msg_id, "ok" | "queued" | "duplicate" | code)."""

    def __init__(self) -> None:
        self.lane = Lane(self)
        self.answers: list[tuple[str | None, str]] = []
        self.errors: dict[str | None, InvalidPacket] = {}
        self.downgrades: list[str | None] = []
        self.checked_seconds = 0.0
        self.owes = 0.0
        self.account = Unbilled()

    def publish_accepted(
        self,
        request: PublishRequest,
        received_at: int,
        *,
        duplicate: bool,
        duplicate_of: bytes | None = None,
        queued: bool = False,
    ) -> None:
        what = "duplicate" if duplicate else "queued" if queued else "ok"
        self.answers.append((request.client_msg_id, what))
        self.downgrades.append(None if request.downgrade is None else request.downgrade.reason)

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        self.answers.append((request.client_msg_id, error.code))
        self.errors[request.client_msg_id] = error

    def checked_for(self, seconds: float) -> None:
        self.checked_seconds += seconds

    @property
    def payer(self) -> Payer:
        return self.account

    def turn(self, now: float) -> float:
        return now + self.owes

    def publish_unanswerable(self) -> None:
        self.answers.append((None, "closed"))

    def room_again(self) -> None: ...


class Rig:
    """One relay process's admission; `now` is its clock."""

    def __init__(
        self,
        *,
        bootstrap: BootstrapContents | None = None,
        trust: ProvenanceTrust | None = None,
        plugins: Plugins | None = None,
        rules: KeyRules | None = None,
        budgets: Mapping[TrustAct, int] | None = None,
        log: FakeLog | None = None,
        apart: ApartParser | None = None,
        publish_timeout: float = 10.0,
    ) -> None:
        self.now = NOW
        self.log = log or FakeLog()
        self.flushes = 0
        self.changed = asyncio.Event()
        self.errors: list[dict[str, object]] = []
        self.caught: list[str] = []
        self.faults = FaultLog(self.caught.append)
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.errors.append(context))
        self.identities = Identities(
            self.log,
            bootstrap or BootstrapContents(),
            rules or KeyRules(),
            on_change=lambda author, digest: self.admission.identity_applied(author, digest),
            faults=self.faults,
        )
        self.budgets = TrustBudgets(self.log, budgets or {}, clock=lambda: self.now)
        self.admission = Admission(
            enqueue=self.log.enqueue,
            log=self.log,
            identities=self.identities,
            budgets=self.budgets,
            policy=Policy(),
            plugins=plugins or Plugins(),
            trust=trust or ProvenanceTrust(),
            limits=AdmissionLimits(
                max_packet_bytes=262_144, max_json_depth=64, max_packet_age_seconds=86_400
            ),
            clock=lambda: self.now,
            verify_threads=2,
            on_verified=lambda _: None,
            on_flush=self.flushed,
            faults=self.faults,
            apart=apart,
            publish_timeout=publish_timeout,
        )

    def flushed(self) -> None:
        self.flushes += 1
        self.changed.set()

    def publish(self, peer: Peer, raw: bytes | Packet, name: str) -> None:
        raw = raw.canonical if isinstance(raw, Packet) else raw
        self.admission.submit(PublishRequest(raw, name, peer.lane, 0.0))

    def commit(self) -> None:
        """Commit everything queued, like the writer and the feed."""
        queue, self.log.queue = self.log.queue, []
        entries = []
        for packet, request in queue:
            if not self.admission.still_admitted(request, self.now):
                continue
            entry = self.log.append(packet, self.now)
            if entry is not None:
                entries.append(entry)
            self.admission.committed(request, self.now, duplicate=entry is None)
        self.observe(entries)
        if entries:
            self.flushed()

    def observe(self, entries: Sequence[LogEntry]) -> None:
        """Deliver these entries as the feed does."""
        self.identities.observe(entries)
        self.budgets.observe(entries)

    def elsewhere(self, *others: Packet) -> None:
        """Let another process commit these, and the feed deliver them."""
        new = [
            NewPacket(p.digest, p.author_id, p.content_type, p.timestamp, None, p.canonical) for p in others
        ]
        entries = [self.log.append(packet, self.now) for packet in new]
        self.observe([entry for entry in entries if entry is not None])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.commit()
                while self.log.queue:  # publishes that waited for these
                    self.commit()
                if condition():
                    break
                self.changed.clear()
                await self.changed.wait()
        assert not self.errors, self.errors

    async def queued(self, count: int) -> None:
        """Wait until `count` packets are on their way to the log, without committing any."""
        async with asyncio.timeout(60):
            while len(self.log.queue) < count:
                self.changed.clear()
                await self.changed.wait()

    async def settled(self) -> None:
        """Wait until no check and no read of keys is in progress."""
        pool, identities, slices = self.admission._pool, self.identities, self.admission._slices
        async with asyncio.timeout(60):
            for _ in range(10):  # the end of a check may start another
                while (  # noqa: ASYNC110
                    pool._gathered or pool._quick_under_way or identities._loading or slices._waiting
                ):
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0)

    async def answers(self, peer: Peer, count: int) -> list[tuple[str | None, str]]:
        await self.until(lambda: len(peer.answers) >= count)
        return peer.answers

    async def close(self) -> None:
        await self.admission.close()
        await self.identities.close()
