"""Days that may be dropped only if a lake's manifests prove that it holds them."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import shutil
from pathlib import Path

import asyncpg
import msgspec
import pytest
import structlog
from strata.protocol.ids import Identity
from strata.protocol.sequences import DAY_SECONDS, day_of, first_of_day
from strata_pipeline.lake_format import (
    GENESIS,
    RECORD_BYTES,
    Manifest,
    RowsDigest,
    decode,
    encode,
    encode_summary,
    manifests_of_day,
    seal,
    summarise,
)
from strata_pipeline.lake_format.sealing import with_hash

from relayd.metrics import RETENTION_REASONS
from relayd.moderation import SubjectKind
from relayd.store import Appended, Store, archived
from relayd.store.erasing import Eraser
from relayd.store.retention import Swept
from relayd.store.types import Unproven

NOW = 1_790_000_000
TODAY = NOW // DAY_SECONDS
LATER = NOW + 3 * DAY_SECONDS
"""The time at which the first two of the four days of `keeper` are past its retention."""
HOUR = 3600


@dataclasses.dataclass
class Lake:
    """The manifests of a lake, made from the log as the archive makes them."""

    folder: Path
    sql: asyncpg.Connection

    async def rows(self):
        """The rows of the log."""
        rows = await self.sql.fetch("SELECT sequence, received_at, packet_id FROM packets ORDER BY sequence")
        return [tuple(row) for row in rows]

    async def archive(self, up_to=None, *, batch_rows=4):
        """Continue after the last manifest, in batches of one day each."""
        rows = [row for row in await self.rows() if up_to is None or row[0] <= up_to]
        while rows := [row for row in rows if row[0] > self.reached]:
            batch = [row for row in rows if day_of(row[0]) == day_of(rows[0][0])][:batch_rows]
            self.write(self.of(batch, quarantined=len(batch) // 3))

    def of(self, rows, *, quarantined=0):
        """The next manifest, for these rows."""
        digest = RowsDigest()
        digest.update(rows)
        return Manifest(
            contents="ab" * 32,
            witnesses="cd" * 32 if len(rows) % 2 else "",
            number=len(self.manifests),
            after=self.reached,
            up_to=rows[-1][0],
            packets=len(rows) - quarantined,
            quarantined=quarantined,
            rows=digest.hexdigest(),
            body_bytes=40 * len(rows),
            kinds={"TEXT": len(rows) - quarantined},
            last_packet_id=rows[-1][2].hex(),
            last_received_at=rows[-1][1],
            written_at=NOW,
            previous=self.manifests[-1].hash if self.manifests else GENESIS,
        )

    def write(self, manifest):
        self.folder.mkdir(exist_ok=True)
        self.path(manifest.number).write_bytes(encode(seal(manifest)))

    def path(self, number):
        return self.folder / f"{number:010}.json"

    @property
    def manifests(self):
        paths = sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []
        return [msgspec.json.decode(path.read_bytes(), type=Manifest) for path in paths]

    @property
    def reached(self):
        return self.manifests[-1].up_to if self.manifests else 0

    def forge(self, number, **changes):
        """Replace a manifest, and the later ones so that the chain is consistent."""
        chain = self.manifests
        chain[number] = msgspec.structs.replace(chain[number], **changes)
        previous = chain[number].previous
        for manifest in chain[number:]:
            sealed = seal(msgspec.structs.replace(manifest, previous=previous))
            self.path(manifest.number).write_bytes(encode(sealed))
            previous = sealed.hash


@pytest.fixture
def lake(tmp_path, sql):
    return Lake(tmp_path / "_manifests", sql)


@pytest.fixture
def told():
    """The arguments of the calls of `on_retention_waiting`, in order."""
    return []


@pytest.fixture
async def keeper(database, packet, lake, told):
    """A store with packets on four days; it retains one, and drops only what `lake` has."""
    async with await Store.open(
        database,
        retention_days=1,
        dedup_window_seconds=DAY_SECONDS,
        archive_manifests=lake.folder,
        on_retention_waiting=lambda days, reason: told.append((days, reason)),
    ) as store:
        await store.maintain(NOW)
        told.clear()
        for day in range(4):
            batch = [packet(10 * day + n, type="KEY_EVENT" if n == 3 else "TEXT") for n in range(9)]
            await store.append(batch, NOW + day * DAY_SECONDS)
        yield store


async def day_partitions(sql):
    rows = await sql.fetch("SELECT relname FROM pg_class WHERE relname ~ '^packets_d[0-9]+$' ORDER BY 1")
    return [int(row[0].removeprefix("packets_d")) - TODAY for row in rows]


async def test_days_that_the_lake_has_go_as_ever(keeper, lake, sql, told):
    await lake.archive()
    assert len(lake.manifests) > 8  # several for each day
    assert (await keeper.maintain(LATER)).days == 2
    assert await day_partitions(sql) == [2, 3, 4]
    assert told == [(0, None)]
    kept = await sql.fetch("SELECT sequence FROM packets_kept ORDER BY 1")
    assert [row[0] for row in kept] == [first_of_day(TODAY + day) + 4 for day in range(2)]
    # Packets that retention has spared no longer belong to the day: they do not block the next one.
    assert (await keeper.maintain(LATER + DAY_SECONDS)).days == 1


@pytest.mark.parametrize("first", ["archived", "erased"])
async def test_days_with_erased_packets_are_proven_all_the_same(keeper, lake, sql, told, first):
    """A manifest binds places, times and ids, which an erasure leaves unchanged."""
    eraser = Eraser(keeper.url, Identity(bytes(32)), batch=5)
    erase = functools.partial(
        eraser.erase,
        SubjectKind.AUTHOR,
        ["did:strata:alice"],
        reason="asked for",
        actor="ann",
        via="command",
        now=NOW,
    )
    if first == "erased":
        await erase()
    await lake.archive()
    if first == "archived":
        assert (await erase()).packets == 4 * 8
    assert (await keeper.maintain(LATER)).days == 2
    assert told == [(0, None)]


async def test_ids_follow_their_packets_and_not_before(keeper, lake, sql):
    await keeper.maintain(LATER + 5 * DAY_SECONDS)
    before = await sql.fetchval("SELECT count(*) FROM packet_ids")
    assert before == 36
    await lake.archive()
    swept = await keeper.maintain(LATER + 5 * DAY_SECONDS)
    assert swept.days == 3
    assert swept.generations > 0
    # Those of the last day, which is the head's, and of the three spared packets.
    assert await sql.fetchval("SELECT count(*) FROM packet_ids") == 9 + 3


async def test_what_the_lake_has_not_yet_stays_until_it_has(keeper, lake, sql, told):
    lake.folder.mkdir()
    assert await keeper.maintain(LATER) == Swept(0, 0)
    first_day = first_of_day(TODAY)
    await lake.archive(first_day + 8)  # all but its last packet
    assert await keeper.maintain(LATER) == Swept(0, 0)
    assert told == [(2, "behind")] * 2
    assert await day_partitions(sql) == [0, 1, 2, 3, 4]
    await lake.archive(first_of_day(TODAY + 1) + 5)
    assert (await keeper.maintain(LATER)).days == 1
    assert told[-1] == (1, "behind")
    await lake.archive()
    assert (await keeper.maintain(LATER)).days == 1
    assert told[-1] == (0, None)


async def test_the_log_says_once_a_round_what_is_wrong_and_what_to_do(keeper, lake):
    with structlog.testing.capture_logs() as lines:
        await keeper.maintain(LATER)
        await lake.archive()
        await keeper.maintain(LATER)
    (line,) = lines
    assert line["event"] == "retention_waits_for_archive"
    assert (line["days"], line["oldest"], line["reason"]) == (2, "2026-09-21", "unreadable")
    assert str(lake.folder) in line["problem"]
    assert line["action"] == "make the folder of archive_manifests readable for the relay"


async def test_maintenance_goes_on_while_days_wait(keeper, sql, packet):
    """Tomorrow is prepared, and a partition detached by an earlier round is dropped."""
    name = f"packets_d{TODAY}"
    await sql.execute(f"ALTER TABLE packets DETACH PARTITION {name}")
    await keeper.maintain(LATER)
    assert await sql.fetchval("SELECT to_regclass($1)", name) is None
    assert await sql.fetchval("SELECT to_regclass($1)", f"packets_d{TODAY + 4}") is not None


async def missing(lake):
    shutil.move(lake.folder, lake.folder.with_name("away"))
    return lambda: shutil.move(lake.folder.with_name("away"), lake.folder)


async def no_folder_but_a_lake(lake):
    """The setting names the lake itself, where no manifests would be found."""
    inner = lake.folder / "_manifests"
    inner.mkdir()
    for path in lake.folder.glob("*.json"):
        path.rename(inner / path.name)

    def mend():
        for path in inner.glob("*.json"):
            path.rename(lake.folder / path.name)

    return mend


async def unreadable_manifest(lake):
    path = lake.path(3)
    aside = path.rename(lake.folder.with_name("aside"))
    path.mkdir()

    def mend():
        path.rmdir()
        aside.rename(path)

    return mend


def rewritten(number, change):
    async def damage(lake):
        path = lake.path(number)
        before = path.read_bytes()
        path.write_bytes(change(before))
        assert path.read_bytes() != before
        return lambda: path.write_bytes(before)

    damage.__name__ = change.__name__
    return damage


def altered(text):
    return text.replace(b'"quarantined": 1', b'"quarantined": 0')


def truncated(text):
    return text[:-20]


def of_another_format(text):
    return text.replace(b'"format": 3', b'"format": 2')


def too_long(text):
    """The same JSON, behind more white space than any writer leaves."""
    return b" " * RECORD_BYTES + text


def beyond_every_number(text):
    return text.replace(b'"body_bytes": 160', b'"body_bytes": 1600000000000000000')


async def one_missing_from_the_chain(lake):
    path = lake.path(2)
    aside = path.rename(lake.folder.with_name("aside"))
    return lambda: aside.rename(path)


async def one_replaced(lake):
    """It matches its own hash, but the later ones refer to another."""
    before = lake.path(1).read_bytes()
    lake.path(1).write_bytes(encode(seal(msgspec.structs.replace(lake.manifests[1], written_at=NOW + 1))))
    return lambda: lake.path(1).write_bytes(before)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (missing, Unproven.UNREADABLE),
        (no_folder_but_a_lake, Unproven.UNREADABLE),
        (unreadable_manifest, Unproven.UNREADABLE),
        (rewritten(0, altered), Unproven.INVALID),
        (rewritten(9, truncated), Unproven.INVALID),
        (rewritten(5, of_another_format), Unproven.INVALID),
        (rewritten(4, beyond_every_number), Unproven.INVALID),
        (rewritten(3, too_long), Unproven.INVALID),
        (one_missing_from_the_chain, Unproven.INVALID),
        (one_replaced, Unproven.INVALID),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_lake_that_cannot_be_believed_keeps_every_day(keeper, lake, sql, told, damage, reason):
    await lake.archive()
    mend = await damage(lake)
    for _ in range(2):  # a finding holds while nothing changes
        assert await keeper.maintain(LATER) == Swept(0, 0)
    assert told == [(2, reason)] * 2
    assert await day_partitions(sql) == [0, 1, 2, 3, 4]
    mend()
    assert (await keeper.maintain(LATER)).days == 2
    assert told[-1] == (0, None)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
async def test_a_folder_that_may_not_be_read(keeper, lake, told):
    await lake.archive()
    lake.folder.chmod(0)
    assert await keeper.maintain(LATER) == Swept(0, 0)
    lake.folder.chmod(0o755)
    assert (await keeper.maintain(LATER)).days == 2
    assert told == [(2, "unreadable"), (0, None)]


@pytest.mark.parametrize("forgery", [{"rows": RowsDigest().hexdigest()}, {"packets": 4}, {"quarantined": 0}])
async def test_a_whole_chain_about_another_log_proves_nothing(keeper, lake, told, forgery):
    await lake.archive()
    before = {path: path.read_bytes() for path in lake.folder.iterdir()}
    lake.forge(1, **forgery)
    assert await keeper.maintain(LATER) == Swept(0, 0)
    assert told == [(2, "differs")]
    for path, content in before.items():
        path.write_bytes(content)
    assert (await keeper.maintain(LATER)).days == 2


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM packets WHERE sequence = $1",
        "UPDATE packets SET received_at = received_at + 1 WHERE sequence = $1",
        "UPDATE packets SET packet_id = sha256(packet_id) WHERE sequence = $1",
        "UPDATE packets SET packet_id = '\\x00' WHERE sequence = $1",
        "UPDATE packets SET packet_id = '\\x00', received_at = -1 WHERE sequence = $1",
    ],
)
@pytest.mark.parametrize("ordinal", [1, 9])
async def test_a_row_of_ours_that_was_altered_keeps_its_day(keeper, lake, sql, told, change, ordinal):
    await lake.archive()
    day = f"packets_d{TODAY + 1}"
    await sql.execute(f"CREATE TABLE whole AS TABLE {day}")
    await sql.execute(change, first_of_day(TODAY + 1) + ordinal)
    assert (await keeper.maintain(LATER)).days == 1
    assert told == [(1, "differs")]
    await sql.execute(f"DELETE FROM {day}")
    await sql.execute(f"INSERT INTO {day} TABLE whole")
    # It is not hashed again every few minutes, but not left for ever either.
    assert await keeper.maintain(LATER + HOUR - 1) == Swept(0, 0)
    assert (await keeper.maintain(LATER + HOUR)).days == 1
    assert told == [(1, "differs"), (1, "differs"), (0, None)]


async def test_a_row_that_nobody_archived_keeps_its_day(keeper, lake, sql, told):
    """After the last batch of the day, so no later batch will include it."""
    await lake.archive()
    await sql.execute(
        "INSERT INTO packets SELECT sequence + 20000, received_at, timestamp, expires_at, packet_id,"
        f" author_id, content_type, body FROM packets_d{TODAY} ORDER BY sequence LIMIT 1"
    )
    assert await keeper.maintain(LATER) == Swept(0, 0)
    assert told == [(2, "differs")]


async def test_a_lake_that_passes_over_a_day_does_not_hold_it(keeper, lake, told):
    lake.folder.mkdir()
    lake.write(lake.of([row for row in await lake.rows() if day_of(row[0]) == TODAY + 2]))
    assert await keeper.maintain(LATER) == Swept(0, 0)
    assert told == [(2, "differs")]


async def test_a_batch_may_begin_in_an_earlier_day_that_holds_nothing_more(keeper, lake):
    """As the archive writes them: the first batch of a day begins where the day before ended."""
    await lake.archive()
    firsts = [manifest for manifest in lake.manifests if day_of(manifest.after) < day_of(manifest.up_to)]
    assert len(firsts) == 4
    assert (await keeper.maintain(LATER)).days == 2


async def test_a_damaged_id_is_no_hindrance_once_it_is_archived(keeper, lake, sql):
    await sql.execute("UPDATE packets SET packet_id = '\\x0011' WHERE sequence = $1", first_of_day(TODAY) + 5)
    await lake.archive()
    assert (await keeper.maintain(LATER)).days == 2


async def test_an_empty_day_needs_no_proof_but_the_lake_s_own(keeper, lake, sql, told):
    await sql.execute(f"TRUNCATE packets_d{TODAY}")
    lake.folder.mkdir()
    assert (await keeper.maintain(LATER)).days == 1
    assert told == [(1, "behind")]


async def test_a_day_emptied_after_it_was_archived_differs(keeper, lake, sql, told):
    await lake.archive()
    await sql.execute(f"TRUNCATE packets_d{TODAY}")
    assert await keeper.maintain(LATER) == Swept(0, 0)
    assert told == [(2, "differs")]


async def test_pages_join_to_the_same_digest(keeper, lake, monkeypatch):
    monkeypatch.setattr(archived, "_PAGE_SEQUENCES", 2)
    await lake.archive(batch_rows=5)
    assert (await keeper.maintain(LATER)).days == 2


async def test_manifests_are_read_again_only_when_the_folder_has_changed(keeper, lake, monkeypatch):
    read: list[str] = []

    def recorded(text: bytes, name: str) -> Manifest:
        read.append(name)
        return decode(text, name)

    monkeypatch.setattr(archived, "decode", recorded)
    await keeper.maintain(NOW + DAY_SECONDS)  # nothing is past retention: the lake is not read
    assert not read
    await lake.archive(first_of_day(TODAY) + 6)
    await keeper.maintain(LATER)
    await keeper.maintain(LATER)
    assert len(read) == len(lake.manifests)
    read.clear()
    await lake.archive()
    await keeper.maintain(LATER)
    assert len(read) == len(lake.manifests)


async def test_storage_that_hangs_holds_up_one_thread_and_nothing_else(keeper, lake, told, monkeypatch):
    await lake.archive()
    inside = asyncio.Event()
    begun = []
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    read_lake = archived._read_lake

    def hangs(*arguments):
        begun.append(arguments)
        loop.call_soon_threadsafe(inside.set)
        asyncio.run_coroutine_threadsafe(asyncio.wait_for(answer, 30), loop).result()
        return read_lake(*arguments)

    monkeypatch.setattr(archived, "_read_lake", hangs)
    monkeypatch.setattr(archived, "_READ_TIMEOUT", 0.01)
    assert await keeper.maintain(LATER) == Swept(0, 0)
    assert await keeper.maintain(LATER) == Swept(0, 0)
    assert told == [(2, "unreadable")] * 2
    assert len(begun) == 1
    monkeypatch.setattr(archived, "_READ_TIMEOUT", 30)
    await inside.wait()
    answer.set_result(None)
    # Its final answer counts.
    assert (await keeper.maintain(LATER)).days == 2


async def test_a_reading_that_was_begun_for_fewer_days_is_followed_by_another(keeper, lake, monkeypatch):
    await lake.archive()
    monkeypatch.setattr(archived, "_READ_TIMEOUT", 0.0)
    await keeper.maintain(LATER - DAY_SECONDS)
    monkeypatch.setattr(archived, "_READ_TIMEOUT", 30)
    assert (await keeper.maintain(LATER)).days == 2


async def test_without_the_setting_nobody_asks_for_a_lake(database, packet, told):
    async with await Store.open(
        database, retention_days=1, on_retention_waiting=lambda *what: told.append(what)
    ) as store:
        for day in range(4):
            await store.append([packet(day)], NOW + day * DAY_SECONDS)
        assert (await store.maintain(LATER)).days == 2
    assert told == []


async def test_the_log_takes_packets_while_a_day_is_compared(keeper, lake, packet, monkeypatch):
    """Nothing is locked meanwhile."""
    await lake.archive()
    digest_of = archived._digest
    appended: list[Appended] = []

    async def meanwhile(*arguments):
        if not appended:
            appended.append(await keeper.append([packet(1000)], LATER))
        return await digest_of(*arguments)

    monkeypatch.setattr(archived, "_digest", meanwhile)
    assert (await asyncio.wait_for(keeper.maintain(LATER), 30)).days == 2
    assert appended


def test_metrics_know_every_reason():
    assert tuple(reason.value for reason in Unproven) == RETENTION_REASONS


def seal_days(lake, days):
    """Write the summaries of the lake's first days, as a compaction does."""
    folder = lake.folder / "days"
    folder.mkdir(exist_ok=True)
    previous = GENESIS
    for day in sorted({day_of(manifest.up_to) for manifest in lake.manifests})[:days]:
        summary = summarise(manifests_of_day(lake.manifests, day), previous)
        (folder / summary.name).write_bytes(encode_summary(summary))
        previous = summary.hash


async def test_summaries_spare_the_manifests_of_days_that_nobody_asks_about(keeper, lake, told, monkeypatch):
    read: list[str] = []

    def recorded(text: bytes, name: str) -> Manifest:
        read.append(name)
        return decode(text, name)

    monkeypatch.setattr(archived, "decode", recorded)
    await lake.archive()
    days = sorted({day_of(manifest.up_to) for manifest in lake.manifests})
    seal_days(lake, len(days) - 1)
    assert (await keeper.maintain(LATER)).days == 2 and told[-1] == (0, None)
    gone = days[:2]
    opened = [one for one in lake.manifests if day_of(one.up_to) in {*gone, days[-1]}]
    assert sorted(read) == [lake.path(one.number).name for one in opened] and len(opened) < len(
        lake.manifests
    )


@pytest.mark.parametrize("harm", ["a summary", "a manifest of a day that is asked for", "the end"])
async def test_summaries_make_nobody_believe_a_chain_that_does_not_hold(keeper, lake, told, harm):
    await lake.archive()
    days = sorted({day_of(manifest.up_to) for manifest in lake.manifests})
    seal_days(lake, len(days) - 1)
    summary = sorted((lake.folder / "days").iterdir())[0]
    if harm == "a summary":  # the manifests count
        summary.write_bytes(summary.read_bytes().replace(b'"batches": ', b'"batches": 1'))
        assert (await keeper.maintain(LATER)).days == 2
        return
    if harm == "the end":
        for manifest in lake.manifests[3:]:
            lake.path(manifest.number).unlink()
        expected = Unproven.BEHIND
    else:
        lake.path(1).write_bytes(encode(seal(msgspec.structs.replace(lake.manifests[1], written_at=NOW + 1))))
        expected = Unproven.INVALID
    assert (await keeper.maintain(LATER)).days < 2
    assert told[-1][1] == expected


@pytest.mark.parametrize("harm", ["too long", "more manifests than there are"])
async def test_a_summary_costs_no_more_than_the_files_that_are_there(keeper, lake, told, harm):
    """Then the manifests count."""
    await lake.archive()
    days = sorted({day_of(manifest.up_to) for manifest in lake.manifests})
    seal_days(lake, 1)
    (path,) = (lake.folder / "days").iterdir()
    summary = summarise(manifests_of_day(lake.manifests, days[0]), GENESIS)
    if harm == "too long":
        path.write_bytes(b" " * RECORD_BYTES + encode_summary(summary))
    else:
        many = msgspec.structs.replace(summary, batches=10**9)
        path.write_bytes(encode_summary(with_hash(many)))
        shutil.copy(lake.path(0), lake.path(summary.first + many.batches - 1))
        lake.path(1).rename(aside := lake.folder.with_name("aside"))
        archived._read_lake(lake.folder, frozenset(days), None)  # takes a moment, and not all memory
        aside.rename(lake.path(1))
        lake.path(summary.first + many.batches - 1).unlink()
    assert (await keeper.maintain(LATER)).days == 2
