"""The key directory: what it reads, what it keeps, and that the feed updates it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest
from strata.protocol import packets
from strata.protocol.documents import VerificationMethod, build_document, method_id
from strata.protocol.ids import Identity
from strata.protocol.keys import KeyChain, KeyRules, revoke_content

from relayd.faults import FaultLog
from relayd.identity import authors
from relayd.identity.bootstrap import BootstrapContents
from relayd.identity.directory import Identities
from relayd.store.identities import AuthorsPage
from relayd.store.payers import NOBODY, Unbilled
from relayd.store.types import LogEntry, NewPacket, StoredPacket, StoreUnavailable

NOW = 1_760_000_000
ALICE, BOB, CLIENT = (Identity(bytes([n]) * 32) for n in (1, 2, 9))


def revocation(who: Identity = ALICE, **more):
    content = revoke_content(method_id(who.did), revoked_at=NOW)
    return packets.build(who, content, timestamp=NOW, **more)


def manifest(name: str, who: Identity = CLIENT):
    keys = [{"key_id": "k1", "public_key": f"0x{who.public_key.hex()}", "valid_from": 0, "valid_until": 0}]
    content = {"type": "CLIENT_MANIFEST", "client_id": who.did, "name": name, "public_keys": keys}
    return packets.build(who, content, timestamp=NOW)


class Log:
    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.reads: list[list[str]] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.names_gate = asyncio.Event()
        self.names_gate.set()

    def add(self, packet: packets.Packet, at: int = NOW, witnessed_at: int | None = None) -> LogEntry:
        new = NewPacket(
            packet.digest,
            packet.author_id,
            packet.content_type,
            packet.timestamp,
            None,
            packet.canonical,
            witnessed_at=witnessed_at,
        )
        self.entries.append(LogEntry(len(self.entries) + 1, at, new))
        return self.entries[-1]

    async def authors(self, type_: str, after: int = 0) -> AuthorsPage:
        await self.names_gate.wait()
        found = [entry.packet for entry in self.entries if entry.packet.content_type == type_]
        return AuthorsPage({packet.author_id for packet in found}, None)

    async def packets_of(
        self, authors: Sequence[str], types: Iterable[str], **_: object
    ) -> list[StoredPacket]:
        self.reads.append(sorted(authors))
        rows = [
            StoredPacket(entry.sequence, entry.told_at, entry.packet.body)
            for entry in self.entries
            if entry.packet.author_id in authors and entry.packet.content_type in types
        ]
        self.asked.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return rows


@pytest.fixture
def log() -> Log:
    return Log()


def directory(log: Log, bootstrap: BootstrapContents | None = None, **options) -> Identities:
    return Identities(log, bootstrap or BootstrapContents(), KeyRules(), **options)


@pytest.mark.req("R-056", "R-060")
async def test_a_plain_author_needs_no_read(log):
    identities = directory(log)
    await identities.open()
    assert identities.is_plain(ALICE.did) and not identities.missing([ALICE.did], [ALICE.did])
    assert (await identities.resolve(ALICE.did)).candidates(NOW) == (ALICE.public_key,)
    assert not log.reads


async def test_how_a_plain_chain_begins_is_worked_out_once_and_counts_until_its_first_event(log, monkeypatch):
    begun = []
    genuine = KeyChain.genesis

    def genesis(did: str, **options) -> KeyChain:
        begun.append(did)
        return genuine(did, **options)

    monkeypatch.setattr(KeyChain, "genesis", genesis)
    identities = directory(log)
    await identities.open()
    for _ in range(3):
        for who in (ALICE, BOB):
            chain = identities.chain(who.did)
            assert chain is not None and chain.candidates(NOW) == (who.public_key,)
    assert begun == [ALICE.did, BOB.did]
    identities.observe([log.add(revocation())])
    assert identities.chain(ALICE.did) is not identities.chain(BOB.did)
    assert not (await identities.resolve(ALICE.did)).candidates(NOW + 1)
    assert (await identities.resolve(BOB.did)).candidates(NOW + 1)
    assert begun == [ALICE.did, BOB.did] and not log.reads


@pytest.mark.req("R-047", "R-056")
async def test_a_name_has_a_key_only_where_the_bootstrap_file_gives_it_one(log):
    named = "did:strata:relay_1"
    assert not (await directory(log).resolve(named)).is_resolvable
    by_key = directory(log, BootstrapContents(keys={named: BOB.public_key}))
    assert (await by_key.resolve(named)).candidates(NOW) == (BOB.public_key,)
    method = VerificationMethod(method_id(named), ALICE.public_key, 0)
    document = build_document(named, [method], created_at=0)
    by_document = directory(log, BootstrapContents(documents={named: (document,)}))
    assert (await by_document.resolve(named)).candidates(NOW) == (ALICE.public_key,)


@pytest.mark.req("R-056")
async def test_the_log_goes_before_the_key_in_the_did(log):
    log.add(revocation())
    identities = directory(log)
    await identities.open()
    assert identities.missing([ALICE.did, BOB.did]) == [ALICE.did]
    assert not (await identities.resolve(ALICE.did)).candidates(NOW + 1)


async def test_many_who_wait_for_one_author_cost_one_read(log):
    log.add(revocation())
    log.add(revocation(BOB))
    identities = directory(log)
    await identities.open()
    await asyncio.gather(
        *(identities.resolve(ALICE.did) for _ in range(20)),
        identities.load(dict.fromkeys([ALICE.did, BOB.did], NOBODY)),
    )
    assert log.reads == [[ALICE.did], [BOB.did]]


async def test_who_is_cancelled_while_waiting_takes_nobody_along(log):
    log.add(revocation())
    identities = directory(log)
    await identities.open()
    log.gate.clear()
    first, second = (asyncio.create_task(identities.resolve(ALICE.did)) for _ in range(2))
    await log.asked.wait()
    first.cancel()
    log.gate.set()
    assert not (await second).candidates(NOW + 1)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(log.reads) == 1


class Debtor(Unbilled):
    """An asker that owes ten seconds for each chain that was read for it."""

    def __init__(self) -> None:
        self.charged: list[float] = []

    def checked_for(self, seconds: float) -> None:
        self.charged.append(seconds)

    def turn(self, now: float) -> float:
        return now + 10.0 * len(self.charged)


async def test_who_has_a_chain_read_is_charged_for_it_though_gone_and_who_waits_too_is_not(log):
    log.add(revocation())
    identities = directory(log)
    await identities.open()
    log.gate.clear()
    gone, waiting = Debtor(), Debtor()
    first = asyncio.create_task(identities.resolve(ALICE.did, gone))
    await log.asked.wait()
    second = asyncio.create_task(identities.resolve(ALICE.did, waiting))
    await asyncio.sleep(0)
    first.cancel()
    log.gate.set()
    await second
    await identities.resolve(ALICE.did, waiting)  # in memory
    assert len(gone.charged) == 1 and gone.charged[0] > 0 and not waiting.charged


async def reading(log: Log, count: int) -> None:
    """Let everybody ask, and see that this many reads have begun."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(log.reads) == count


async def test_who_has_many_chains_read_waits_behind_itself(log):
    people = [Identity(bytes([100 + n]) * 32) for n in range(20)]
    for who in (*people, BOB):
        log.add(revocation(who))
    identities = directory(log)
    await identities.open()
    log.gate.clear()
    debtor = Debtor()
    many = [asyncio.create_task(identities.resolve(who.did, debtor)) for who in people]
    await reading(log, 2)
    another = asyncio.create_task(identities.resolve(BOB.did))
    await reading(log, 2)
    log.gate.set()
    await asyncio.gather(another, *many)
    assert [BOB.did] in log.reads[2:4] and len(log.reads) == 21


async def test_a_turn_to_read_a_chain_lasts_as_long_as_the_read_though_who_asked_has_gone(log):
    people = [Identity(bytes([100 + n]) * 32) for n in range(4)]
    for who in people:
        log.add(revocation(who))
    identities = directory(log)
    await identities.open()
    log.gate.clear()
    first, second, third, fourth = (asyncio.create_task(identities.resolve(who.did)) for who in people)
    await reading(log, 2)
    first.cancel()
    third.cancel()
    await reading(log, 2)
    log.gate.set()
    await asyncio.gather(second, fourth)
    assert log.reads == [[people[0].did], [people[1].did], [people[3].did]], "the third waited in vain"


async def test_a_read_that_fails_is_told_to_all_and_tried_again(log):
    log.add(revocation())
    identities = directory(log)
    await identities.open()
    log.error = StoreUnavailable("down")
    results = await asyncio.gather(*(identities.resolve(ALICE.did) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) for result in results)
    log.error = None
    assert not (await identities.resolve(ALICE.did)).candidates(NOW + 1)


@pytest.mark.req("R-192")
async def test_a_chain_that_cannot_be_read_fails_alone(log, monkeypatch):
    log.add(revocation())
    log.add(revocation(BOB))
    identities = directory(log)
    await identities.open()
    replay = KeyChain.replay

    def failing(did, events, **options):
        if did == ALICE.did:
            raise ArithmeticError("a fault of ours")
        return replay(did, events, **options)

    monkeypatch.setattr(KeyChain, "replay", failing)
    with pytest.raises(ArithmeticError):
        await identities.load(dict.fromkeys([BOB.did, ALICE.did], NOBODY))
    assert identities.chain(BOB.did) is not None
    assert identities.chain(ALICE.did) is None
    monkeypatch.undo()
    assert not (await identities.resolve(ALICE.did)).candidates(NOW + 1)


@pytest.mark.req("R-074")
async def test_the_feed_brings_a_chain_forward(log):
    changed: list[str] = []
    identities = directory(log, on_change=lambda author, digest: changed.append(author))
    before = identities.generation
    post = packets.build(BOB, {"type": "POST"}, timestamp=NOW)
    identities.observe([log.add(post), log.add(revocation())])
    assert changed == [ALICE.did] and identities.generation > before
    assert not identities.is_plain(ALICE.did) and identities.is_plain(BOB.did)
    assert not (await identities.resolve(ALICE.did)).candidates(NOW + 1)
    assert not log.reads  # a first event needs none


@pytest.mark.req("R-074")
async def test_an_event_that_comes_during_the_read_counts(log):
    content = {"type": "KEY_EVENT", "event": "NOTE", "key_id": method_id(ALICE.did)}
    log.add(packets.build(ALICE, content, timestamp=NOW))
    identities = directory(log)
    await identities.open()
    log.gate.clear()
    task = asyncio.create_task(identities.resolve(ALICE.did))
    await log.asked.wait()
    identities.observe([log.add(revocation())])
    log.gate.set()
    chain = await task
    assert len(chain.events) == 2 and not chain.candidates(NOW + 1)


async def test_chains_out_of_memory_are_read_again(log):
    people = [Identity(bytes([100 + n]) * 32) for n in range(5)]
    for who in people:
        log.add(revocation(who))
    identities = directory(log, max_chain_bytes=10_000)
    await identities.open()
    for who in people * 2:
        assert not (await identities.resolve(who.did)).candidates(NOW + 1)
    assert len(log.reads) == 10


def crowd(log, *, values: int, size: int) -> list[Identity]:
    """Six people with four events each, of values without meaning to a relay, and of text."""
    people = [Identity(bytes([100 + n]) * 32) for n in range(6)]
    for who in people:
        log.add(revocation(who))
        for n in range(4):
            content = {
                "type": "KEY_EVENT",
                "event": "NOTE",
                "key_id": method_id(who.did),
                "n": n,
                "x": [[]] * values,
                "y": "y" * size,
            }
            log.add(packets.build(who, content, timestamp=NOW - 1), NOW - 1)
    return people


async def test_long_chains_leave_less_room_for_others(log):
    people = crowd(log, values=0, size=80_000)
    identities = directory(log, max_chain_bytes=2**20)
    await identities.open()
    for who in people:
        assert len((await identities.resolve(who.did)).events) == 5
        assert identities.missing([who.did]) == [], "somebody is about to use it"
    assert 1 <= 6 - len(identities.missing([who.did for who in people])) <= 2


async def test_what_nobody_reads_in_an_identity_packet_takes_its_bytes_and_no_more(log):
    """Decoded, 2000 empty lists are many times larger than their text."""
    people = crowd(log, values=2000, size=0)
    identities = directory(log, max_chain_bytes=2**20)
    await identities.open()
    for who in people:
        chain = await identities.resolve(who.did)
        assert all(packet.content.get("x", []) == [] for packet, _ in chain.events)
        assert sorted(len(packet.canonical) for packet, _ in chain.events)[1] > 6000
    assert identities.missing([who.did for who in people]) == []


@pytest.mark.req("R-066")
async def test_until_all_names_are_known_everybody_is_looked_up(log):
    """No key is taken from a DID while the log may contain a revocation."""
    log.add(revocation())
    log.names_gate.clear()
    identities = directory(log)
    opening = asyncio.create_task(identities.open())
    await asyncio.sleep(0)
    for who in (ALICE, BOB):
        assert not identities.is_plain(who.did) and identities.chain(who.did) is None
        assert identities.missing([who.did], [who.did]) == [who.did, who.did]
    await identities.load(dict.fromkeys([ALICE.did, BOB.did], NOBODY))
    assert not identities.missing([ALICE.did, BOB.did], [BOB.did]), "each is looked up once"
    assert not (await identities.resolve(ALICE.did)).candidates(NOW + 1)
    assert (await identities.resolve(BOB.did)).candidates(NOW + 1) == (BOB.public_key,)
    identities.observe([log.add(revocation(CLIENT))])  # the first one seen need not be the first that exists
    assert not (await identities.resolve(CLIENT.did)).candidates(NOW + 1)
    log.names_gate.set()
    await opening
    assert identities.is_plain(BOB.did) and not identities.is_plain(ALICE.did)


async def test_a_log_that_cannot_be_read_while_names_come_is_asked_again(log, monkeypatch):
    answers: list[AuthorsPage | Exception] = [
        AuthorsPage({ALICE.did}, 1),
        StoreUnavailable("down"),
        AuthorsPage({BOB.did}, None),
    ]
    pages = iter(answers)

    async def authors(type_: str, after: int = 0) -> AuthorsPage:
        page = next(pages, AuthorsPage(set(), None)) if type_ == "KEY_EVENT" else AuthorsPage(set(), None)
        if isinstance(page, Exception):
            raise page
        return page

    monkeypatch.setattr(log, "authors", authors)
    identities = directory(log)
    await identities.open()
    assert not identities.is_plain(ALICE.did) and not identities.is_plain(BOB.did)
    assert identities.is_plain(CLIENT.did)


async def test_names_that_cannot_be_learned_after_the_start_are_a_fault(log, monkeypatch):
    monkeypatch.setattr(authors, "_START_PATIENCE", 0.01)
    caught = asyncio.Event()
    identities = directory(log, faults=FaultLog(lambda place: caught.set()))

    async def broken(type_: str, after: int = 0) -> AuthorsPage:
        await log.names_gate.wait()
        raise RuntimeError

    monkeypatch.setattr(log, "authors", broken)
    log.names_gate.clear()
    await identities.open()
    log.names_gate.set()
    await caught.wait()
    assert not identities.is_plain(ALICE.did)
    assert (await identities.resolve(ALICE.did)).candidates(NOW) == (ALICE.public_key,)


async def test_an_event_that_does_not_hold_changes_nothing(log):
    """Another program may have let it into the log; a chain is what the packets prove."""
    forged = packets.build(ALICE, revoke_content(method_id(BOB.did), revoked_at=NOW), timestamp=NOW)
    identities = directory(log)
    identities.observe([log.add(forged)])
    assert (await identities.resolve(ALICE.did)).candidates(NOW + 1) == (ALICE.public_key,)
    assert (await identities.resolve(BOB.did)).candidates(NOW + 1) == (BOB.public_key,)


@pytest.mark.parametrize("way", ["read", "feed"])
async def test_bytes_that_are_no_packet_stop_nobody(log, way):
    """A log to which somebody has written by hand: the feed continues, and the rest of the chain counts."""
    revoke = revocation()
    entries = [
        LogEntry(1, NOW, NewPacket(b"x" * 32, ALICE.did, "KEY_EVENT", NOW, None, b"{}")),
        log.add(revoke),
    ]
    log.entries[:] = entries
    identities = directory(log)
    if way == "feed":
        identities.observe(entries)
    else:
        await identities.open()
    assert not (await identities.resolve(ALICE.did)).candidates(NOW + 1)


@pytest.mark.req("R-236")
@pytest.mark.parametrize("way", ["read", "feed"])
async def test_the_newest_client_manifest_counts(log, way):
    twins = sorted((manifest("a"), manifest("b")), key=lambda packet: packet.packet_id)
    entries = [log.add(manifest("old"), NOW - 5)]
    entries += [log.add(twin, NOW) for twin in reversed(twins)]
    entries.append(log.add(manifest("late in the log, early in time"), NOW - 1))
    entries.append(log.add(manifest("brought by a peer, which had it before"), NOW + 5, NOW - 1))
    identities = directory(log)
    if way == "feed":
        identities.observe(entries)
    else:
        await identities.open()
        assert identities.missing([], [CLIENT.did]) == [CLIENT.did]
        await identities.load(dict.fromkeys([CLIENT.did], NOBODY))
    found = identities.manifest(CLIENT.did)
    assert found is not None and found.packet_id == twins[0].packet_id


async def test_a_manifest_that_was_erased_counts_no_more(log):
    log.add(manifest("old"), NOW - 5)
    erased = log.add(manifest("new"))
    identities = directory(log)
    await identities.open()
    await identities.load(dict.fromkeys([CLIENT.did], NOBODY))
    before = identities.generation
    log.entries.remove(erased)
    identities.forget_manifests()
    assert identities.changed_since(CLIENT.did, before) and not identities.changed_since(
        CLIENT.did, identities.generation
    )
    assert identities.missing([], [CLIENT.did]) == [CLIENT.did]
    await identities.load(dict.fromkeys([CLIENT.did], NOBODY))
    found = identities.manifest(CLIENT.did)
    assert found is not None and found.content["name"] == "old"


async def test_a_manifest_that_was_read_before_it_was_erased_is_read_again(log):
    erased = log.add(manifest("new"))
    identities = directory(log)
    await identities.open()
    log.gate.clear()
    loading = asyncio.create_task(identities.load(dict.fromkeys([CLIENT.did], NOBODY)))
    await log.asked.wait()
    log.entries.remove(erased)
    identities.forget_manifests()
    log.gate.set()
    await loading
    assert identities.missing([], [CLIENT.did]) == [CLIENT.did]
    await identities.load(dict.fromkeys([CLIENT.did], NOBODY))
    assert identities.missing([], [CLIENT.did]) == [] and identities.manifest(CLIENT.did) is None


async def test_closing_ends_a_read_under_way(log):
    log.add(revocation())
    identities = directory(log)
    await identities.open()
    log.gate.clear()
    task = asyncio.create_task(identities.resolve(ALICE.did))
    await log.asked.wait()
    await identities.close()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_closing_begins_no_read_for_those_who_wait_for_a_turn(log):
    people = [Identity(bytes([100 + n]) * 32) for n in range(5)]
    for who in people:
        log.add(revocation(who))
    identities = directory(log)
    await identities.open()
    log.gate.clear()
    tasks = [asyncio.create_task(identities.resolve(who.did)) for who in people]
    await reading(log, 2)
    await identities.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert len(log.reads) == 2


async def test_it_tells_whose_chain_has_changed_since(log, monkeypatch):
    monkeypatch.setattr("relayd.identity.directory._REMEMBERED_CHANGES", 3)
    identities = Identities(log, BootstrapContents(), KeyRules())
    await identities.open()
    assert not identities.changed_since(ALICE.did, 0)
    identities.observe([log.add(revocation())])
    seen = identities.generation
    assert identities.changed_since(ALICE.did, seen - 1)
    assert not identities.changed_since(ALICE.did, seen)
    assert not identities.changed_since(BOB.did, 0)
    others = [Identity(bytes([n]) * 32) for n in range(20, 24)]
    identities.observe([log.add(revocation(who)) for who in others])
    assert not identities.changed_since(ALICE.did, identities.generation)
    assert identities.changed_since(others[-1].did, seen)
    assert identities.changed_since(ALICE.did, seen - 1), "it is forgotten, so it may have"
