from __future__ import annotations

import asyncio
import functools
import io
import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import pytest
from strata.protocol import packets
from strata.protocol.documents import method_id
from strata.protocol.equivalence import equivalence_key
from strata.protocol.ids import Identity
from strata.protocol.keys import IDENTITY_TYPES, add_content, revoke_content
from strata.protocol.provenance import Downgrade, ProvenanceTrust
from strata.protocol.tombstones import Tombstone, read_tombstone, sign_tombstone

from relayd.admission.limits import AdmissionLimits
from relayd.config import Settings
from relayd.identity.directory import Identities
from relayd.store.identities import AuthorsPage
from relayd.store.types import (
    Appended,
    AppendOutcome,
    Disposition,
    IdentitiesMoved,
    LogEntry,
    NewPacket,
    StoredPacket,
)
from relayd.transfer import files
from relayd.transfer.examiner import Examiner
from relayd.transfer.files import ExportSummary, ImportSummary, export_log, import_log, resume_point
from tests.support.made_origins import AUTHOR, CLIENT, attested, software_header

NOW = 1_760_000_000


class MemoryStore:
    """The part of the store that a transfer uses, with the store's own rules for time and duplicates."""

    def __init__(self, *, page_rows: int = 500, refuse: bytes | None = None) -> None:
        self.log: list[LogEntry] = []
        self.places: dict[bytes, Disposition] = {}
        self.page_rows = page_rows
        self.refuse = refuse
        self.buried: dict[bytes, bytes] = {}

    async def tombstones(self, ids: Sequence[bytes]) -> dict[bytes, bytes]:
        return {name: self.buried[name] for name in ids if name in self.buried}

    async def head(self) -> int:
        return self.log[-1].sequence if self.log else 0

    async def tail(self, after: int, up_to: int | None, limit: int) -> list[LogEntry]:
        last = await self.head() if up_to is None else up_to
        found = [entry for entry in self.log if after < entry.sequence <= last]
        return found[: min(limit, self.page_rows)]

    async def find(self, ids: Sequence[bytes]) -> dict[bytes, tuple[int, int]]:
        return {name: self.places[name][1:3] for name in ids if name in self.places}

    @property
    def identities(self) -> MemoryStore:
        return self

    async def authors(self, type_: str, after: int = 0) -> AuthorsPage:
        found = [entry.packet for entry in self.log if entry.packet.content_type == type_]
        return AuthorsPage({packet.author_id for packet in found}, None)

    async def packets_of(
        self, authors: Sequence[str], types: Iterable[str], **_: object
    ) -> list[StoredPacket]:
        wanted = set(types)
        return [
            StoredPacket(entry.sequence, entry.received_at, entry.packet.body)
            for entry in self.log
            if entry.packet.author_id in authors and entry.packet.content_type in wanted
        ]

    async def append(self, batch: Sequence[NewPacket], now: int, followed: int | None = None) -> Appended:
        previous = await self.head()
        decisive = [entry.sequence for entry in self.log if entry.packet.content_type in IDENTITY_TYPES]
        if followed is not None and decisive and decisive[-1] > followed:
            raise IdentitiesMoved(decisive[-1])
        return Appended(previous, [self._append(packet, now) for packet in batch])

    def _append(self, packet: NewPacket, now: int) -> Disposition:
        if packet.packet_id == self.refuse:
            return Disposition(AppendOutcome.INVALID, 0, 0)
        if place := self.places.get(packet.packet_id):
            return Disposition(AppendOutcome.DUPLICATE, place.sequence, place.received_at)
        received_at = max(now, self.log[-1].received_at if self.log else 0)
        place = Disposition(AppendOutcome.STORED, len(self.log) + 1, received_at)
        self.log.append(LogEntry(place.sequence, received_at, packet))
        self.places[packet.packet_id] = place
        return place


@pytest.fixture(scope="module")
def identity():
    return Identity.from_seed(bytes(32))


def packet(identity, number: int) -> packets.Packet:
    content = {"type": "POST", "text": f"é {number}"}
    return packets.build(identity, content, timestamp=NOW - 10**8 + number)


def line(made: packets.Packet, received_at: int = NOW) -> bytes:
    return b'{"packet":%b,"received_at":%d}\n' % (made.canonical, received_at)


def exported(identity, count: int) -> bytes:
    return b"".join(line(packet(identity, number), NOW + number // 3) for number in range(count))


async def bring_in(store: MemoryStore, data: bytes, **options) -> ImportSummary:
    trust, settings = options.pop("trust", ProvenanceTrust()), options.pop("settings", Settings())
    examiner = Examiner(store, trust=trust, limits=AdmissionLimits.from_settings(settings))
    return await import_log(store, io.BytesIO(data), examiner, now=lambda: NOW + 10**4, **options)


async def taken_out(store: MemoryStore, **options) -> tuple[bytes, ExportSummary]:
    file = io.BytesIO()
    summary = await export_log(store, file, **options)
    return file.getvalue(), summary


async def test_what_goes_in_comes_out_byte_for_byte_with_its_time(identity):
    data = exported(identity, 600)
    store = MemoryStore(page_rows=7)
    summary = await bring_in(store, data)
    assert (summary.lines, summary.stored, summary.duplicates, summary.quarantined) == (600, 600, 0, 0)
    assert summary.bytes_read == len(data)
    out, result = await taken_out(store)
    assert out == data
    assert (result.packets, result.bytes_written, result.last_sequence) == (600, len(data), 600)


async def test_an_export_that_windows_has_saved_comes_in(identity):
    store, data = MemoryStore(), exported(identity, 3)
    with pytest.raises(ValueError, match="the text is UTF-16"):
        await bring_in(store, data.decode().encode("utf-16"))
    summary = await bring_in(store, b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"))
    assert (summary.lines, summary.quarantined) == (3, 0)


async def test_an_import_may_be_repeated(identity):
    data, store = exported(identity, 5), MemoryStore()
    await bring_in(store, data[: len(data) // 2].rpartition(b"\n")[0])
    again = await bring_in(store, data)
    assert again.stored + again.duplicates == 5
    assert again.duplicates == 2
    assert (await taken_out(store))[0].count(b"\n") == 5


def tampered(made: packets.Packet, **changes) -> bytes:
    return json.dumps({"packet": made.value | changes, "received_at": NOW}).encode() + b"\n"


async def test_nothing_is_believed_and_nothing_is_lost_silently(identity):
    good, other = packet(identity, 1), packet(identity, 2)
    bad = {
        b"not json\n": "invalid_schema",
        b"[]\n": "invalid_schema",
        b'{"packet":{}}\n': "invalid_schema",
        b"\xff\xfe\n": "invalid_schema",
        b"[" * 5000 + b"\n": "invalid_schema",
        tampered(good, signature=other.signature): "invalid_signature",
        tampered(good, timestamp=good.timestamp + 1): "invalid_signature",
        line(good, NOW + 10**6): "timestamp_in_future",
        line(good, -1): "timestamp_in_future",
        line(good, good.timestamp - 301): "timestamp_in_future",  # queries by time would not find it
    }
    store, quarantine = MemoryStore(), io.BytesIO()
    data = b"\n".join([line(good), *bad, line(other, other.timestamp - 300)])
    summary = await bring_in(store, data, quarantine=quarantine)
    assert (summary.stored, summary.quarantined) == (2, len(bad))
    assert summary.lines == summary.stored + summary.quarantined
    kept = [json.loads(text) for text in quarantine.getvalue().splitlines()]
    assert [item["code"] for item in kept] == list(bad.values())
    assert summary.reasons == {"invalid_schema": 5, "invalid_signature": 2, "timestamp_in_future": 3}
    assert all(
        data.splitlines()[item["line"] - 1].decode("utf-8", "backslashreplace") == item["text"]
        for item in kept
    )


async def test_a_row_the_database_refuses_is_quarantined(identity):
    first, second = packet(identity, 1), packet(identity, 2)
    store = MemoryStore(refuse=first.digest)
    summary = await bring_in(store, line(first) + line(second))
    assert (summary.stored, summary.quarantined) == (1, 1)


async def test_a_line_without_end_fills_no_memory_and_hides_no_other(identity):
    store = MemoryStore()
    summary = await bring_in(store, b"x" * (9 * 2**20) + b"\n" + line(packet(identity, 1)))
    assert (summary.stored, summary.quarantined) == (1, 1)


async def test_time_in_a_log_never_goes_back(identity):
    store = MemoryStore()
    await bring_in(store, line(packet(identity, 1), NOW + 5) + line(packet(identity, 2), NOW))
    assert [entry.received_at for entry in store.log] == [NOW + 5, NOW + 5]


# Keys and origins: judged by the log before the packet.

SECOND = Identity.from_seed(b"2" * 32)
HEADER: dict[str, object] = {"origin_type": "SOFTWARE", "genesis_media_hash": None, "edit_history": []}


def rotated(identity: Identity) -> list[packets.Packet]:
    """A post by the new key too early, the rotation, then one by each key, the old one revoked."""
    new = SECOND.speaking_for(identity.did)
    made: list[tuple[Identity, Mapping[str, object]]] = [
        (new, {"type": "POST", "text": "too early"}),
        (identity, add_content(f"{identity.did}#k2", new.public_key, valid_from=NOW)),
        (new, {"type": "POST", "text": "by the new one"}),
        (identity, {"type": "POST", "text": "by the old one"}),
        (new, revoke_content(f"{identity.did}#keys-1", revoked_at=NOW)),
        (identity, {"type": "POST", "text": "by the revoked one"}),
    ]
    return [packets.build(by, content, timestamp=NOW - 10) for by, content in made]


def lines_of(made: list[packets.Packet]) -> bytes:
    return b"".join(line(packet, NOW + number) for number, packet in enumerate(made))


@pytest.mark.req("R-062", "R-074", "R-076")
async def test_the_keys_that_count_are_those_of_the_log_up_to_there(identity):
    made, store, quarantine = rotated(identity), MemoryStore(), io.BytesIO()
    summary = await bring_in(store, lines_of(made), quarantine=quarantine)
    assert [entry.packet.packet_id for entry in store.log] == [packet.digest for packet in made[1:5]]
    kept = [json.loads(text) for text in quarantine.getvalue().splitlines()]
    assert [(item["line"], item["code"]) for item in kept] == [(1, "invalid_signature"), (6, "key_revoked")]
    assert (summary.stored, summary.quarantined) == (4, 2)


async def test_what_is_in_the_log_is_a_duplicate_whatever_became_of_its_key(identity):
    made, store = rotated(identity), MemoryStore()
    await bring_in(store, lines_of(made))
    again = await bring_in(store, lines_of(made))
    # The one by the key revoked since, with effect from before, also counts as present; and the one that was
    # too early for its key now fails only for its line's time.
    assert (again.duplicates, again.stored + again.quarantined, again.lines) == (4, 2, 6)


def witnessed(made: packets.Packet, witness: object, received_at: int) -> bytes:
    return line(made, received_at)[:-2] + b',"witnessed_at":%b}\n' % msgspec.json.encode(witness)


@pytest.mark.req("R-367", "R-370")
async def test_what_a_peer_brought_late_counts_from_when_a_relay_first_had_it(identity):
    made = rotated(identity)
    late, revoked = made[3], made[5]
    in_time = lines_of([made[0], made[1], made[2], revoked, made[4]])  # the key is revoked as of the time NOW
    source, copy = MemoryStore(), MemoryStore()
    await bring_in(source, in_time)
    brought = msgspec.structs.replace(_new(late), witnessed_at=NOW - 5, ingest_peer=3)
    await source.append([brought], NOW + 9)
    out, _ = await taken_out(source)
    assert out.endswith(witnessed(late, NOW - 5, NOW + 9))
    summary = await bring_in(copy, out)
    assert (summary.reasons, copy.log[-1].packet.packet_id) == ({}, late.digest)
    assert (copy.log[-1].received_at, copy.log[-1].told_at) == (NOW + 9, NOW - 5)
    assert copy.log[-1].packet.ingest_peer is None  # the number of a peer means nothing elsewhere
    assert (await taken_out(copy))[0] == out


@pytest.mark.req("R-369")
@pytest.mark.parametrize("witness", [NOW + 1, NOW - 10**8 - 301, -1, 2**63, None])
async def test_a_time_that_cannot_be_that_of_the_first_relay_does_not_count(identity, witness):
    made, store = packet(identity, 0), MemoryStore()
    await bring_in(store, witnessed(made, witness, NOW))
    assert [(entry.received_at, entry.told_at) for entry in store.log] == [(NOW, NOW)]


@pytest.mark.req("R-074")
async def test_a_key_event_that_another_process_appends_meanwhile_is_met(identity, monkeypatch):
    made, store = rotated(identity), MemoryStore()
    genuine = store.append
    others = [made[1], made[4]]

    async def append(batch: Sequence[NewPacket], now: int, followed: int | None = None) -> Appended:
        if others:
            event = others.pop(0)
            await genuine([_new(event)], NOW)
        return await genuine(batch, now, followed)

    monkeypatch.setattr(store, "append", append)
    summary = await bring_in(store, line(made[3], NOW + 5) + line(made[2], NOW + 6))
    assert (summary.stored, summary.reasons) == (1, {"key_revoked": 1})
    assert summary.lines == 2


async def test_of_what_was_erased_a_tombstone_travels_and_nothing_comes_back(identity, tmp_path):
    made = [packet(identity, number) for number in range(3)]
    store = MemoryStore()
    await bring_in(store, b"".join(map(line, made)))
    for number in (1, 2):  # the middle, and the last, where the next export continues
        entry = store.log[number]
        place = Tombstone(made[number].packet_id, entry.sequence, entry.received_at, NOW, identity.did)
        store.buried[made[number].digest] = sign_tombstone(place, identity)
        gone = NewPacket(made[number].digest, "", "", 0, 0, b"")
        store.log[number] = LogEntry(entry.sequence, entry.received_at, gone)
    path = tmp_path / "export.jsonl"
    with path.open("wb") as file:
        exported = await export_log(store, file)
    assert (exported.packets, exported.erased) == (1, 2)
    text = path.read_bytes()
    assert made[1].canonical not in text
    assert read_tombstone(msgspec.json.encode(json.loads(text.splitlines()[1])["tombstone"])).sequence == (
        store.log[1].sequence
    )
    assert await resume_point(path, store) == store.log[2].sequence
    fresh = MemoryStore()
    summary = await bring_in(fresh, text)
    assert (summary.lines, summary.stored, summary.erased, summary.quarantined) == (3, 1, 2, 0)
    # A relay that has forgotten the id, but not that it erased the packet, accepts no copy of it.
    fresh.buried = store.buried
    summary = await bring_in(fresh, line(made[1]))
    assert (summary.stored, summary.erased) == (0, 1)


def _new(made: packets.Packet) -> NewPacket:
    return NewPacket(
        made.digest, made.author_id, made.content_type, made.timestamp, made.expires_at, made.canonical
    )


@pytest.mark.req("R-202", "R-206", "R-208")
async def test_origins_are_found_anew_and_no_file_brings_its_own(identity):
    claimed = packets.build(
        identity,
        {"type": "POST", "text": "x"},
        timestamp=NOW,
        provenance_header=HEADER,
        allow_unattested=True,
    )
    invented = Downgrade("SOFTWARE", "AI_MODEL", "because")
    forged = b',"annotation":' + invented.encode() + b"}"
    plain = packet(identity, 1)
    store = MemoryStore()
    await bring_in(store, line(plain)[:-2] + forged + b"\n" + line(claimed)[:-2] + forged + b"\n")
    assert store.log[0].packet.annotation is None
    annotation = store.log[1].packet.annotation
    assert annotation is not None
    found = Downgrade.decode(annotation)
    assert (found.claimed_origin_type, found.effective_origin_type) == ("SOFTWARE", "UNKNOWN")
    out, _ = await taken_out(store)
    assert out == line(plain) + line(claimed)[:-2] + b',"annotation":' + annotation + b"}\n"
    other = MemoryStore()
    await bring_in(other, out)
    assert other.log == store.log


@pytest.mark.req("R-214", "R-219")
async def test_a_high_claim_that_this_relay_cannot_follow_is_not_taken_over(identity):
    header = HEADER | {"origin_type": "AI_MODEL"}
    claimed = packets.build(
        identity,
        {"type": "POST", "text": "x"},
        timestamp=NOW,
        provenance_header=header,
        allow_unattested=True,
    )
    summary = await bring_in(MemoryStore(), line(claimed))
    assert summary.reasons == {"missing_proof": 1}


@pytest.mark.req("R-113")
async def test_packets_that_say_the_same_keep_their_key(identity):
    content = {
        "type": "CONSENSUS_METRIC",
        "source_id": identity.did,
        "target_packet": "0x" + "1" * 64,
        "observed_at": NOW,
        "metrics": {},
    }
    made = packets.build(identity, content, timestamp=NOW)
    store = MemoryStore()
    await bring_in(store, line(made))
    assert [entry.packet.equivalence_key for entry in store.log] == [equivalence_key(made)] != [None]


@pytest.mark.parametrize("torn", [b"", b'{"packet":{"ha', b"x" * 100_000])
async def test_an_export_goes_on_behind_its_last_whole_line(identity, tmp_path, torn):
    data, store, path = exported(identity, 9), MemoryStore(), tmp_path / "log.jsonl"
    await bring_in(store, data)
    path.write_bytes(b"".join(data.splitlines(keepends=True)[:4]) + torn)
    after = await resume_point(path, store)
    assert after == 4
    with path.open("ab") as file:
        summary = await export_log(store, file, after=after)
    assert summary.packets == 5
    assert path.read_bytes() == data
    assert await resume_point(path, store) == 9


@pytest.mark.parametrize("most", [4 * 2**20, 100])
async def test_an_export_goes_on_before_empty_rows_that_no_tombstone_names(
    identity, tmp_path, monkeypatch, most
):
    data, store, path = exported(identity, 9), MemoryStore(), tmp_path / "log.jsonl"
    await bring_in(store, data)
    monkeypatch.setattr(files, "_MAX_LINE_BYTES", most)  # twice this is read at a time
    named, nameless = b"".join(data.splitlines(keepends=True)[:4]), b'{"tombstone":null,"received_at":7}\n'
    path.write_bytes(named + 30 * nameless + nameless[:9])
    assert await resume_point(path, store) == 4
    assert path.read_bytes() == named
    path.write_bytes(30 * nameless)
    assert await resume_point(path, store) == 0
    assert path.read_bytes() == b""


@pytest.mark.parametrize("most", [4 * 2**20, 100])
async def test_an_export_goes_on_before_rows_that_are_damaged(identity, tmp_path, monkeypatch, most):
    data, store, path = exported(identity, 9), MemoryStore(), tmp_path / "log.jsonl"
    await bring_in(store, data)
    monkeypatch.setattr(files, "_MAX_LINE_BYTES", most)
    sound = data.splitlines(keepends=True)[:4]
    damaged = [
        b'{"packet":{"version":1},"received_at":7}\n',
        b'{"packet":\xff\x00,"received_at":7}\n',
        b'{"tombstone":null,"received_at":7}\n',
    ]
    path.write_bytes(b"".join([*sound, *damaged, *damaged, damaged[1][:9]]))
    assert await resume_point(path, store) == 4
    assert path.read_bytes() == b"".join(sound)
    # If no line names a packet, nobody knows whose file it is.
    path.write_bytes(damaged[0] * 3)
    with pytest.raises(ValueError, match="not one of an export"):
        await resume_point(path, store)
    assert path.read_bytes() == damaged[0] * 3


async def test_two_logs_never_mix_in_one_file(identity, tmp_path):
    path, store = tmp_path / "log.jsonl", MemoryStore()
    assert await resume_point(path, store) == 0
    path.write_bytes(b"")
    assert await resume_point(path, store) == 0
    path.write_bytes(line(packet(identity, 1)))
    with pytest.raises(ValueError, match="not in this database"):
        await resume_point(path, store)
    path.write_bytes(b"something else\n")
    with pytest.raises(ValueError, match="not one of an export"):
        await resume_point(path, store)


async def test_an_export_does_not_go_on_behind_a_packet_that_was_lost_and_came_back(identity, tmp_path):
    """The log has lost its end since, and what it stored before that packet came back is not in the file."""
    path, store, later = tmp_path / "log.jsonl", MemoryStore(), MemoryStore()
    kept, lost, new = (packet(identity, number) for number in range(3))
    await bring_in(store, line(kept, NOW) + line(lost, NOW + 1))
    with path.open("wb") as file:
        await export_log(store, file)
    await bring_in(later, line(kept, NOW) + line(new, NOW + 50))
    back = msgspec.structs.replace(_new(lost), witnessed_at=NOW + 1, ingest_peer=1)
    await later.append([back], NOW + 60)
    with pytest.raises(ValueError, match="lost its end"):
        await resume_point(path, later)
    assert path.read_bytes() == line(kept, NOW) + line(lost, NOW + 1)


@pytest.mark.parametrize(
    "body",
    [
        b"no newline at all",
        b"a line\nand half a one",
        b"\xff\n\xfe",
        b"\x89PNG" + bytes(9 * 2**20),
        b'{"packet":%b}\n{"pa' % (b"[" * 100_000),
    ],
)
async def test_a_file_that_is_no_export_stays_as_it_is(tmp_path, body):
    path = tmp_path / "another"
    path.write_bytes(body)
    with pytest.raises(ValueError, match=r"not one of an export|is no export"):
        await resume_point(path, MemoryStore())
    assert path.read_bytes() == body


@pytest.mark.parametrize("torn", [b'{"pa', b'{"packet":{"id":', b'{"tomb'])
async def test_an_export_that_was_killed_in_its_first_line_begins_anew(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    path.write_bytes(torn)
    assert await resume_point(path, MemoryStore()) == 0
    assert path.read_bytes() == b""


async def test_progress_is_told(identity):
    store, seen = MemoryStore(page_rows=2), []
    await bring_in(store, exported(identity, 5), progress=lambda summary: seen.append(summary.lines))
    await export_log(store, io.BytesIO(), progress=lambda summary: seen.append(summary.packets))
    assert seen == [5, 2, 4, 5]


@pytest.mark.req("R-321")
async def test_a_file_brings_in_nothing_that_a_socket_may_not(identity):
    def of(number: int, **content: object) -> packets.Packet:
        return packets.build(identity, {"type": "POST", **content}, timestamp=NOW - 10**8 + number)

    deep: object = 0
    for _ in range(40):
        deep = [deep]
    large, many, nested = of(1, text="x" * 3000), of(2, values=[0] * 3000), of(3, deep=deep)
    manifest = of(4, type="CLIENT_MANIFEST", text="x" * 5000)
    fine = packet(identity, 5)
    data = b"".join(map(line, (large, many, nested, manifest, fine)))
    store = MemoryStore()
    settings = Settings(
        max_packet_bytes=8192, max_json_depth=32, max_json_values=1024, max_identity_bytes=4096
    )
    summary = await bring_in(store, data, settings=settings)
    assert [entry.packet.packet_id for entry in store.log] == [large.digest, fine.digest]
    assert summary.quarantined == 3
    summary = await bring_in(store, data, settings=Settings(max_packet_bytes=2048))
    assert summary.reasons["packet_too_large"] == 3
    assert summary.duplicates == 1


async def test_chains_that_have_no_room_beside_each_other_hold_up_no_import(monkeypatch):
    small = functools.partial(Identities, max_chain_bytes=1)
    monkeypatch.setattr("relayd.transfer.examiner.Identities", small)
    store = MemoryStore()
    other = Identity(bytes([22]) * 32).public_key
    events = [
        packets.build(who, add_content(method_id(who.did, "more"), other, valid_from=0), timestamp=NOW)
        for who in (AUTHOR, CLIENT)
    ]
    claim = attested(software_header(), {"type": "POST", "text": "photo"})
    async with asyncio.timeout(20):
        summary = await bring_in(store, b"".join(line(each) for each in (*events, claim)))
    assert (summary.stored, summary.quarantined) == (3, 0)
