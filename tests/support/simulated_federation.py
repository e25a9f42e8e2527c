"""Relays that read from each other and compare sets, on one virtual clock, around the daemon's own core.

`Mesh`, `Intake`, `Standings`, `Rounds`, `Withholding`, negentropy and the rules for ages and witnesses are
the real ones. The log, the network and time are simulated."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.negentropy import ItemSet, Reconciler
from strata.relays.conduct import Aspect

from relayd.admission.origin import PeerOrigin, check_age, witness_of
from relayd.federation.comparing import RECENT_SECONDS, SETTLED_SECONDS
from relayd.federation.intake import Intake, Item, PeerVerdict, judge_refusal, retry_delay
from relayd.federation.mesh import Mesh
from relayd.federation.rounds import Rounds
from relayd.federation.standings import KeptConduct, Standings
from relayd.federation.withholding import Withholding

__all__ = ["SimulatedRelay", "SimulatedWorld"]

START = 1_760_000_000
TICK = 5.0
_PER_TICK = 20
_BACKFILL = 604_800
_INVENTED = 5
_REFUSALS = (ErrorCode.POLICY_REJECTED, ErrorCode.BLOCKED_AUTHOR, ErrorCode.PACKET_TOO_LARGE)


@dataclass(frozen=True)
class SimulatedPacket:
    """The part of a packet that the rules look at."""

    packet_id: int
    timestamp: int
    is_forged: bool = False
    content_type: str = "POST"
    expires_at: int | None = None

    @property
    def raw(self) -> bytes:
        return b"%d" % self.packet_id


@dataclass
class Row:
    """One place of a log."""

    packet: SimulatedPacket
    via: str | None
    told_at: int


@dataclass
class Reader:
    """One link: its state in memory."""

    intake: Intake
    not_via: tuple[str, ...] = ()
    taken: str | None = None
    is_connected: bool = False
    waiting: list[tuple[float, Intake, Item, Row]] = field(default_factory=list)
    withholding: Withholding = field(default_factory=Withholding)
    lacking: set[int] = field(default_factory=set)
    gone_since: float = math.inf


class SimulatedRelay:
    """A log and its cursors, which persist, and the links, which a kill ends."""

    def __init__(self, world: SimulatedWorld, did: str, skew: int) -> None:
        self.world, self.did, self.skew = world, did, skew
        self.log: list[Row] = []
        self.known: dict[int, Row] = {}
        self.cursors: dict[str, str | None] = {}
        self.standings = Standings()
        self.skips: dict[str, dict[int, int]] = {}
        """By peer: the packets refused from it, with their timestamps."""
        self.refuses: Callable[[int], bool] = lambda packet_id: False
        """Whether a rule of its operator refuses this packet."""
        self.repeats: Callable[[int], bool] = lambda packet_id: False
        """Whether this packet states the same as another one, which is stored."""
        self.erased: set[int] = set()
        self.lies = False
        self.accusations = 0
        """The number of offences that it has noted against its peers."""
        self.epoch, self.lost_from = 1, 0
        self.kept: dict[str, Any] | None = None
        self.received = 0
        self.brought = 0
        """The number of received packets that came by comparing."""
        self.up = True
        for number in range(len(world.dids)):
            self.standings.take_up(number, KeptConduct(0, 0, 0, None), self.clock)
        self.start()

    @property
    def clock(self) -> int:
        return int(START + self.world.now) + self.skew

    def start(self) -> None:
        """Start a fresh process on the stored state."""
        others = [did for did in self.world.dids if did != self.did and self.world.reads(self.did, did)]
        group = "" if self.world.is_ring else "mesh"
        self.mesh = Mesh(self.did, dict.fromkeys(others, group), self.world.now)
        self.readers: dict[str, Reader] = {}
        for did in others:
            self.link(did)
        self.rounds = {
            did: Rounds(self.world.compares_each, self.world.now, self.world.random.random) for did in others
        }

    def link(self, did: str) -> None:
        """Begin a link at the stored place."""
        cursor = self.cursors.get(did)
        self.readers[did] = Reader(Intake(cursor), taken=cursor)
        self.mesh.start(did, cursor, self.world.now)

    def back_up(self) -> None:
        """Keep a copy of the stored state."""
        stored = {"log": self.log, "cursors": self.cursors, "skips": self.skips}
        self.kept = copy.deepcopy(stored)

    def restore(self, *, guarded: bool) -> None:
        """Start on the copy. With a guard the relay notices that its log has lost its end: it begins an
        epoch, and forgets what it has refused."""
        assert self.kept is not None
        was, kept = len(self.log), copy.deepcopy(self.kept)
        self.log, self.cursors, self.skips = kept["log"], kept["cursors"], kept["skips"]
        self.known = {row.packet.packet_id: row for row in self.log}
        if guarded and was > len(self.log):
            self.epoch, self.lost_from, self.skips = self.epoch + 1, len(self.log), {}
        self.start()

    def _place(self, cursor: str | None) -> int:
        """The place of a cursor; the beginning if the log has lost that place."""
        if cursor is None:
            return 0
        epoch, index = map(int, cursor.split(":"))
        return 0 if epoch < self.epoch and index > self.lost_from else index

    def publish(self, packet: SimulatedPacket) -> None:
        self._store(packet, None, self.clock)

    def _store(self, packet: SimulatedPacket, via: str | None, told_at: int) -> None:
        row = Row(packet, via, told_at)
        self.log.append(row)
        self.known[packet.packet_id] = row

    def serve(self, after: str | None, not_via: tuple[str, ...]) -> list[tuple[str, Row]]:
        """What an upstream sends; a liar invents packets and times."""
        found = []
        for index in range(self._place(after), len(self.log)):
            row = self.log[index]
            if row.via in not_via or row.packet.packet_id in self.erased:
                continue
            if self.lies:
                chance = self.world.random.random()
                if chance < 0.2:
                    row = Row(SimulatedPacket(-self.world.random.getrandbits(40), 0, True), None, 0)
                elif chance < 0.4:
                    row = Row(row.packet, row.via, self.world.random.choice([0, -(2**70), 2**60]))
            found.append((f"{self.epoch}:{index + 1}", row))
            if len(found) == _PER_TICK:
                break
        return self.world.network(found)

    def claims(self, since: int, until: int) -> list[tuple[int, bytes]]:
        """The set that an upstream compares: what it serves; a liar includes packets that never existed."""
        items = self.items()
        if self.lies:
            items |= {2**200 + n: until - n for n in range(_INVENTED)}
        return [(at, n.to_bytes(32, "big")) for n, at in items.items() if since <= at <= until]

    def items(self) -> dict[int, int]:
        """The packets that it serves, with their timestamps."""
        return {n: row.packet.timestamp for n, row in self.known.items() if n not in self.erased}

    def step(self) -> None:
        for did, reader in self.readers.items():
            self._read(did, reader)
            if self.world.compares_each:
                self._compare(did, reader)

    def _compare(self, did: str, reader: Reader) -> None:
        world, rounds, upstream = self.world, self.rounds[did], self.world.relays[did]
        is_there = reader.is_connected and reader.gone_since == math.inf
        if not is_there or not rounds.is_due(world.now):
            return
        whole = rounds.begin(world.now)
        since = self.clock - (_BACKFILL - 3600 if whole else RECENT_SECONDS)
        until = self.clock - SETTLED_SECONDS
        need, is_whole = self._differences(did, reader, max(0, since), until)
        wanted = sorted(need - self.known.keys() - self.skips.get(did, {}).keys())
        withheld, brought = set(), 0
        for packet_id in wanted:
            row = upstream.known.get(packet_id)
            if row is None:
                withheld.add(packet_id)
                continue
            intake, brought = Intake(None), brought + 1
            self.received += 1
            self.brought += 1
            self._judge(did, reader, intake, intake.add(row.packet.raw, row.told_at, None), row)
        reader.withholding.withheld(n.to_bytes(32, "big") for n in withheld)
        number = world.dids.index(did)
        if reader.withholding.round_ended():
            self.accusations += 1
            self.standings.note(number, Aspect.PRESENCE, self.clock, 0, 1, None)
        elif brought and not withheld:
            self.standings.note(number, Aspect.PRESENCE, self.clock, 1, 0, None)
        rounds.ended(world.now, 1.0, is_whole=is_whole, has_brought=brought > 0)

    def _differences(self, did: str, reader: Reader, since: int, until: int) -> tuple[set[int], bool]:
        """What the peer has and this relay has not; the network may interrupt the exchange."""
        upstream = self.world.relays[did]
        ours = {n: at for n, at in self.items().items() if n not in reader.lacking} | self.skips.get(did, {})
        items = [(at, n.to_bytes(32, "big")) for n, at in ours.items() if since <= at <= until]
        mine = Reconciler(ItemSet(items))
        theirs = Reconciler(ItemSet(upstream.claims(since, until)))
        need: set[int] = set()
        message: bytes | None = mine.initiate()
        while message is not None:
            if self.world.loses():
                return need, False
            found = mine.receive(theirs.respond(message))
            need |= {int.from_bytes(packet_id, "big") for packet_id in found.need}
            reader.lacking |= {int.from_bytes(packet_id, "big") for packet_id in found.have}
            reader.lacking -= need
            message = found.message
        return need, True

    def _read(self, did: str, reader: Reader) -> None:
        world, mesh, upstream = self.world, self.mesh, self.world.relays[did]
        barred = self.standings.is_barred(world.dids.index(did), self.clock)
        is_gone = not upstream.up or world.is_cut(self.did, did)
        reader.gone_since = min(reader.gone_since, world.now) if is_gone else math.inf
        is_noticed = not reader.is_connected or world.now - reader.gone_since >= world.unnoticed
        if barred or (is_gone and is_noticed):
            mesh.lost(did, world.now)
            reader.is_connected = False
            return
        if is_gone:
            self.cursors[did] = mesh.to_store(did, reader.intake.cursor_with(()), world.now)
            return
        if not reader.is_connected:
            reader.is_connected = True
            mesh.heard(did)
            reader.not_via = ()
        if mesh.is_due(did, world.now) or not reader.not_via:
            reading = mesh.read(did, world.now)
            reader.not_via = reading.not_via
            if reading.rewinds:
                reader.intake, reader.taken = Intake(reading.from_cursor), reading.from_cursor
        for due in [each for each in reader.waiting if each[0] <= world.now]:
            reader.waiting.remove(due)
            self._judge(did, reader, *due[1:])
        events = upstream.serve(reader.taken, reader.not_via)
        if not events:
            mesh.caught_up(did)
        for cursor, row in events:
            if not reader.intake.has_room:
                break
            self.received += 1
            item = reader.intake.add(row.packet.raw, row.told_at, cursor)
            reader.taken = cursor
            # Some verdicts take a while, so that they come out of order and a kill hits unfinished ones.
            if world.random.random() < 0.1:
                reader.waiting.append((world.now + 2 * TICK, reader.intake, item, row))
            else:
                self._judge(did, reader, reader.intake, item, row)
        self.cursors[did] = mesh.to_store(did, reader.intake.cursor_with(()), world.now)

    def _judge(self, did: str, reader: Reader, intake: Intake, item: Item, row: Row) -> None:
        """Admission, as far as peers are concerned: the row and the cursor are stored together."""
        item.attempts += 1
        packet = row.packet
        try:
            witness = self._admit(row)
        except InvalidPacket as error:
            verdict = judge_refusal(item, error)
            if verdict is PeerVerdict.LATER:
                delay = retry_delay(item, cast(Any, packet), error, self.clock)
                reader.waiting.append((self.world.now + delay, intake, item, row))
                return
            if verdict is PeerVerdict.FORGED:
                self.accusations += 1
                self.standings.note(self.world.dids.index(did), Aspect.VALIDITY, self.clock, 0, 1, None)
            elif not packet.is_forged:
                self.skips.setdefault(did, {})[packet.packet_id] = packet.timestamp
        else:
            self.standings.note(self.world.dids.index(did), Aspect.VALIDITY, self.clock, 1, 0, None)
            if packet.packet_id not in self.known and self.repeats(packet.packet_id):
                self.skips.setdefault(did, {})[packet.packet_id] = packet.timestamp
            elif packet.packet_id not in self.known:
                self._store(packet, did, witness)
            elif witness < self.known[packet.packet_id].told_at:
                self.known[packet.packet_id].told_at = witness
        intake.settle(item, self.clock)

    def _admit(self, row: Row) -> int:
        packet = cast(Any, row.packet)
        if row.packet.is_forged:
            raise InvalidPacket(ErrorCode.INVALID_SIGNATURE, "made up", detail="packet_id_mismatch")
        if self.refuses(row.packet.packet_id):
            raise InvalidPacket(_REFUSALS[row.packet.packet_id % len(_REFUSALS)], "not here")
        origin = PeerOrigin(1, row.told_at, True, 604_800)
        witness = witness_of(packet, origin, self.clock)
        check_age(packet, origin, witness, self.clock, max_age_seconds=86_400)
        return self.clock if witness is None else witness


class SimulatedWorld:
    """Relays that all read from each other, or each from the next; `cuts` holds the pairs that are cut off
    from each other, and until when."""

    def __init__(
        self,
        seed: int,
        count: int,
        *,
        skews: tuple[int, ...] = (),
        tick: float = TICK,
        compares_each: float = 0.0,
        loss: float = 0.0,
        is_ring: bool = False,
        unnoticed: float = 0.0,
    ) -> None:
        """`compares_each` is the interval of comparisons; 0 means none. `loss` is the fraction of messages
        lost; equally many are duplicated or reordered. A cut or a death stays `unnoticed` for so long."""
        self.random = random.Random(seed)
        self.tick = tick
        self.compares_each = compares_each
        self.loss = loss
        self.is_ring = is_ring
        self.unnoticed = unnoticed
        self.now = 0.0
        self.dids = [f"did:strata:z{n}" for n in range(count)]
        self.cuts: dict[frozenset[str], float] = {}
        self.relays: dict[str, SimulatedRelay] = {}
        self.published = 0
        for n, did in enumerate(self.dids):
            self.relays[did] = SimulatedRelay(self, did, skews[n] if skews else 0)

    def reads(self, reader: str, upstream: str) -> bool:
        if self.is_ring:
            return self.dids.index(upstream) == (self.dids.index(reader) + 1) % len(self.dids)
        return reader != upstream

    def is_cut(self, one: str, other: str) -> bool:
        return self.cuts.get(frozenset((one, other)), 0.0) > self.now

    def publish(self, did: str) -> None:
        relay = self.relays[did]
        if relay.up:
            self.published += 1
            relay.publish(SimulatedPacket(self.published, relay.clock))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += self.tick
            for relay in self.relays.values():
                if relay.up:
                    relay.step()

    def loses(self) -> bool:
        """Whether this message is lost."""
        return bool(self.loss) and self.random.random() < self.loss

    def network(self, events: list[tuple[str, Row]]) -> list[tuple[str, Row]]:
        """The events that arrive. A cursor denotes a place in the stream, whatever arrives at that place."""
        if not self.loss or not events:
            return events
        rows = [row for _, row in events]
        if self.loses():
            self.random.shuffle(rows)
        arrived = []
        for (cursor, _), row in zip(events, rows, strict=True):
            copies = 0 if self.loses() else 2 if self.loses() else 1
            arrived += [(cursor, row)] * copies
        return arrived or [(events[-1][0], rows[-1])]

    def step_clock(self) -> None:
        """Step one relay's clock by minutes, forward or back."""
        relay = self.relays[self.random.choice(self.dids)]
        relay.skew += self.random.choice((-600, -90, 90, 600))

    def trouble(self) -> None:
        """Cause trouble: a cut, a kill, or a relay that stays away for a while."""
        one, other = self.random.sample(self.dids, 2)
        match self.random.randrange(4):
            case 0:
                self.cuts[frozenset((one, other))] = self.now + self.random.choice([15, 45, 200, 2000])
            case 1:
                self.relays[one].start()
            case 2:
                self.relays[one].up = False
            case _:
                for relay in self.relays.values():
                    if not relay.up:
                        relay.up = True
                        relay.start()

    def heal(self) -> None:
        """End all trouble."""
        self.cuts.clear()
        self.loss = 0.0
        for relay in self.relays.values():
            if not relay.up:
                relay.up = True
                relay.start()
            relay.skew = 0 if self.compares_each else relay.skew

    def sets(self, *, but: str | None = None) -> list[set[int]]:
        return [set(relay.known) for did, relay in self.relays.items() if did != but]

    @property
    def accusations(self) -> int:
        return sum(relay.accusations for relay in self.relays.values())

    @property
    def brought(self) -> int:
        return sum(relay.brought for relay in self.relays.values())

    @property
    def received(self) -> int:
        return sum(relay.received for relay in self.relays.values())
