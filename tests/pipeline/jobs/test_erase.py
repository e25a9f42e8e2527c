"""Packets erased from a relay are removed from its lake, and everything else is proven as before."""

from __future__ import annotations

import asyncio
import json
import shutil

import asyncpg
import pyarrow.parquet as pq
import pytest
from strata_pipeline.cli.app import app
from strata_pipeline.errors import LogError
from strata_pipeline.jobs import erase as job
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.audit import audit
from strata_pipeline.jobs.audit_erasures import check_erasures
from strata_pipeline.jobs.audit_result import Audited
from strata_pipeline.jobs.compact import compact
from strata_pipeline.jobs.copy import copy_lake
from strata_pipeline.jobs.erase import ErasedFrom, erase
from strata_pipeline.jobs.parts import packets_there
from strata_pipeline.jobs.restore import restore
from strata_pipeline.lake import erasure_commit, files
from strata_pipeline.lake.delta import publish, published_files
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake_format import GENESIS, ErasedBatch, LakeError
from typer.testing import CliRunner

from tests.support import relay_logs
from tests.support.lakes import DAY, NOON, bodies, sql
from tests.support.toy_lakes import DAY as TOY_DAY
from tests.support.toy_lakes import write_batch

ERASED = (3, 8, 9, 10, 25, 41)
"""From both finished days: one inside a batch, all of one batch but two, the last of a batch."""
WAITING = 70
"""In the day that is not over."""


@pytest.fixture(scope="module")
def original(spark, new_log, tmp_path_factory):
    """A log of three days, with erasures after it was archived in small batches; and its lake. The packets of
    the first day came from a peer."""
    url, lake, packets = new_log(), tmp_path_factory.mktemp("lake"), []
    for day in range(3):
        packets += (today := relay_logs.make_many(30, first=day * 30, at=NOON + day * DAY))
        witnessed_at = NOON - 60 if day == 0 else None
        relay_logs.append(url, today, NOON + day * DAY, witnessed_at=witnessed_at)
    archive(spark, url, lake, batch_rows=7)
    relay_logs.erase(url, *(packets[number].packet_id for number in (*ERASED, WAITING)))
    return url, lake, packets


@pytest.fixture
def made(original, tmp_path):
    """The packets of a copy of that lake."""
    shutil.copytree(original[1], tmp_path, dirs_exist_ok=True)
    return original[2]


async def rows_of(url: str) -> list[list[tuple[object, ...]]]:
    connection = await asyncpg.connect(url)
    try:
        tables = {"packets": "sequence", "packet_ids": "sequence, packet_id", "tombstones": "sequence"}
        found = [
            await connection.fetch(f"SELECT * FROM {name} ORDER BY {order}") for name, order in tables.items()
        ]
    finally:
        await connection.close()
    return [[tuple(row) for row in rows] for rows in found]


def kept(packets) -> list[bytes]:
    return [packet.canonical for number, packet in enumerate(packets) if number not in ERASED]


def test_the_lake_holds_all_but_what_was_erased_and_proves_it(spark, original, new_log, tmp_path, made):
    url, tip = new_log(original[0]), Lake.open(tmp_path).tip  # a copy, which continues
    publish(Lake.open(tmp_path))
    assert audit(spark, tmp_path, url=url).counts == {"log: altered": len(ERASED) + 1}
    done = erase(spark, url, tmp_path)
    assert (done.tombstones, done.days, done.packets, done.waiting) == (7, 2, len(ERASED), 1)
    assert bodies(tmp_path) == kept(made)
    assert {one.resolve() for one in published_files(tmp_path)} == set(
        (tmp_path / "packets").rglob("*.parquet")
    )
    assert not list(tmp_path.glob("_retired/*")) and not (tmp_path / "_staging").exists()
    # Manifests, and so every recorded tip, are unchanged.
    assert Lake.open(tmp_path).tip == tip
    audited = audit(spark, tmp_path, url=url)
    assert audited.counts == {"log: altered": 1} and audited.erased == len(ERASED)  # today's
    assert audited.packets == 90 - len(ERASED) and audited.quarantined == len(ERASED)
    assert audit(spark, tmp_path, since="2").holds
    assert erase(spark, url, tmp_path).packets == 0
    # It continues: the next day ends today's, compaction and a second erasure change nothing else.
    relay_logs.append(url, more := relay_logs.make_many(5, first=500, at=NOON + 3 * DAY), NOON + 3 * DAY)
    archive(spark, url, tmp_path)
    assert compact(spark, tmp_path, grace=0).days == 1  # each erasure has left one batch of a day
    relay_logs.erase(url, made[30].packet_id)
    assert erase(spark, url, tmp_path).packets == 2
    now = [packet for number, packet in enumerate(made) if number not in {*ERASED, WAITING, 30}]
    assert bodies(tmp_path) == [packet.canonical for packet in (*now, *more)]
    assert not list(tmp_path.glob("_retired/*"))
    audited = audit(spark, tmp_path, url=url)
    assert audited.holds and audited.erased == len(ERASED) + 2
    # A restore brings back the empty rows and the tombstones, as the relay has them.
    restored = new_log()
    back = restore(spark, restored, tmp_path, chunk_rows=11)
    assert (back.packets, back.erased) == (len(now) + len(more), len(ERASED) + 2)
    assert asyncio.run(rows_of(restored)) == asyncio.run(rows_of(url))
    again = restore(spark, restored, tmp_path)
    assert (again.packets, again.erased) == (0, 0)


@pytest.mark.parametrize("since", [GENESIS, "0"], ids=["whole", "since"])
def test_an_audit_that_has_begun_as_the_lake_is_erased_from_counts_what_is_left(
    spark, original, tmp_path, made, monkeypatch, since
):
    real, done = Lake.held, list[ErasedFrom]()

    def held(lake):
        if not done:  # just before the audit takes its lock
            done.append(ErasedFrom())
            done[0] = erase(spark, original[0], tmp_path)
        return real(lake)

    monkeypatch.setattr(Lake, "held", held)
    audited = audit(spark, tmp_path, since=since)
    assert done[0].packets == len(ERASED)
    assert (audited.holds, audited.erased) == (True, len(ERASED)), audited.counts


@pytest.mark.parametrize(
    ("module", "step", "call"),
    [(files, "make_durable", 1), (files, "write_new", 1), (files, "exchange", 1), (files, "place", 1),
     (files, "write_new", 2), (files, "write_new", 3), (erasure_commit, "mark", 2)],
)  # fmt: skip
def test_cut_off_at_any_step_a_day_has_all_or_nothing_erased(
    spark, original, tmp_path, made, monkeypatch, module, step, call
):
    real, calls = getattr(module, step), []

    class Killed(BaseException):
        pass

    def dies(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == call:
            raise Killed
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, step, dies)
        patch.setattr("strata_pipeline.jobs.erase.mark", erasure_commit.mark)
        with pytest.raises(Killed):
            erase(spark, original[0], tmp_path)
    if is_complete := (tmp_path / "_staging" / "erasure" / "record.json").exists():
        with pytest.raises(LakeError, match="was cut off: strata-pipeline erase, or compact"):
            audit(spark, tmp_path)
        with Lake.replace(tmp_path):
            pass  # the next writer finishes it
    audited = audit(spark, tmp_path)
    assert audited.holds and (audited.erased > 0 or not is_complete)
    erase(spark, original[0], tmp_path)
    assert bodies(tmp_path) == kept(made)
    assert audit(spark, tmp_path).holds and not (tmp_path / "_staging").exists()


def test_a_day_of_which_nothing_stays_is_a_day_of_the_lake_like_any_other(spark, new_log, tmp_path):
    url, lake = new_log(), tmp_path / "lake"
    relay_logs.append(url, gone := relay_logs.make_many(6, at=NOON), NOON)
    relay_logs.append(url, left := relay_logs.make_many(3, first=10, at=NOON + DAY), NOON + DAY)
    archive(spark, url, lake, batch_rows=4)
    publish(Lake.open(lake))
    relay_logs.erase(url, *(packet.packet_id for packet in gone))
    assert erase(spark, url, lake).packets == 6
    assert erase(spark, url, lake).packets == 0 and compact(spark, lake).days == 0
    copy_lake(lake, tmp_path / "copy")
    for place in (lake, tmp_path / "copy"):
        audited = audit(spark, place, url=url)
        assert (audited.counts, audited.packets, audited.erased) == ({}, 3, 6)
        assert bodies(place) == [packet.canonical for packet in left]
    restored = new_log()
    assert restore(spark, restored, lake).erased == 6
    assert asyncio.run(rows_of(restored)) == asyncio.run(rows_of(url))


def test_of_a_damaged_row_that_was_erased_nothing_is_left_but_its_place(spark, new_log, tmp_path):
    url, lake, copy = new_log(), tmp_path / "lake", tmp_path / "copy"
    relay_logs.append(url, made := relay_logs.make_many(8, authors=8, at=NOON), NOON)
    relay_logs.append(url, late := relay_logs.make_many(2, first=9, at=NOON + DAY), NOON + DAY)
    ids = [f"packet_id = '\\x{packet.digest.hex()}'" for packet in (*made, *late)]
    sql(
        url,
        f"UPDATE packets SET body = body || ' ' WHERE {ids[1]} OR {ids[2]} OR {ids[8]}",
        f"UPDATE packets SET content_type = 'SECRET', received_at = {2**60} WHERE {ids[3]}",
        f"UPDATE packets SET packet_id = substring(packet_id FOR 31) WHERE {ids[4]}",
        f"UPDATE packets SET received_at = {-(2**63)} WHERE {ids[5]}",
    )
    relay_logs.erase(url, made[2].packet_id)  # before it is archived: the lake has nothing of it
    archive(spark, url, lake, batch_rows=3)
    copy_lake(lake, copy)
    tip = Lake.open(lake).tip
    gone = [made[number] for number in (0, 1, 3, 4, 5)]
    relay_logs.erase_authors(url, *(packet.author_id for packet in (*gone, late[0])))
    done = erase(spark, url, lake)
    assert (done.packets, done.emptied, done.aside, done.days) == (2, 3, 0, 1)
    assert done.waiting == 1  # today's
    copy_lake(lake, copy)
    for place in (lake, copy):
        there = b"".join(path.read_bytes() for path in place.rglob("*.parquet"))
        rows = [row for path in place.rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
        for packet in gone:
            assert not any(packet.packet_id[2:12] in str(row["body"]) for row in rows)
            assert packet.author_id.encode() not in there
        assert b"SECRET" not in there
        audited = audit(spark, place, url=url)
        assert (audited.counts, audited.erased) == ({"log: altered": 1}, 5)
        assert Lake.open(place).tip == tip
    done = erase(spark, url, lake)
    assert (done.packets, done.emptied, done.aside, done.days) == (0, 0, 0, 0)
    restored = new_log()
    back = restore(spark, restored, lake)
    assert (back.erased, back.damaged) == (6, 1)
    stones, known = (asyncio.run(rows_of(one))[2] for one in (restored, url))
    assert len(stones) == 5 and set(stones) <= set(known)


def test_a_day_from_which_all_is_erased_is_not_read_again(
    spark, original, new_log, tmp_path, made, monkeypatch
):
    url, real, asked = new_log(original[0]), packets_there, []

    def there(folders, tombstones):
        asked.append([one.sequence & 0xFFFF for one in tombstones])
        return real(folders, tombstones)

    monkeypatch.setattr(job, "packets_there", there)
    erase(spark, url, tmp_path)
    assert asked == [[4, 9, 10, 11, 26], [12], [11]]
    relay_logs.erase(url, made[30].packet_id)
    asked.clear()
    assert erase(spark, url, tmp_path).packets == 1
    assert asked == [[1], [11]]  # new ones, and the day that is not over


def test_readers_keep_their_files_and_the_day_waits(spark, original, tmp_path, made):
    with Lake.open(tmp_path).held():
        done = erase(spark, original[0], tmp_path, patience=0)
    assert (done.packets, done.waiting) == (0, len(ERASED) + 1)
    assert bodies(tmp_path) == [packet.canonical for packet in made]
    assert audit(spark, tmp_path).holds and not (tmp_path / "_staging").exists()


def test_what_the_tombstones_do_not_prove_is_found(spark, original, tmp_path, made):
    erase(spark, original[0], tmp_path)
    lake = Lake.open(tmp_path)
    # Anyone who may write to the lake can sign some: an auditor who knows the relay names whose count.
    relay = relay_logs.RELAY.did
    for relays, counts in (
        ((), {}),
        ([relay, "did:strata:b"], {}),
        (["did:strata:b"], {"erasure: foreign": 6}),
    ):
        check_erasures(lake, relays, found := Audited())
        assert found.counts == counts and found.erased_by == {relay: len(ERASED)}
    first = tmp_path / "_erased" / "0000000000.jsonl"
    text = first.read_bytes()
    first.write_bytes(text.replace(b'"erased_at":1', b'"erased_at":2', 1))
    assert audit(spark, tmp_path).counts == {"erasure: tombstones": 1}
    first.write_bytes(text)
    # A record that is missing, or was changed, is no record.
    record = first.with_suffix(".json")
    whole = record.read_text()
    record.write_text(whole.replace('"erased": ', '"erased": 1'))
    with pytest.raises(LakeError, match="its hash does not recompute"):
        Lake.open(tmp_path)
    record.unlink()
    with pytest.raises(LakeError, match="erasure 0 cannot be used"):
        Lake.open(tmp_path)
    record.write_text(whole)
    # Missing empty rows are reported by the batch and by the tombstone.
    folder = lake.folders_of_day(lake.quarantine, lake.days()[0])[0]
    next(folder.glob("*.parquet")).unlink()
    found = audit(spark, tmp_path)
    assert found.counts["erasure: row"] == 5 and any(name.startswith("batch: ") for name in found.counts)
    assert lake.erasures.records[0].previous == GENESIS


def test_a_record_tells_of_batches_of_its_own_day_alone(tmp_path):
    write_batch(tmp_path, [1, 2, 3])
    write_batch(tmp_path, [1], day=TOY_DAY + 1)
    lake = Lake.open(tmp_path)
    first, second = lake.manifests
    told = [
        ErasedBatch(
            manifest=one.hash, packets=0, quarantined=one.packets, contents="ab", body_bytes=0, kinds={}
        )
        for one in (first, second)
    ]
    erasure_commit.put_record(lake, lake.erasures.next(TOY_DAY, 0, told, b""), b"")
    now = Lake.open(tmp_path).erasures.told([first, second])
    assert [one.packets for one in now] == [0, 1]


@pytest.mark.parametrize("after", [0, 1])
def test_a_record_that_takes_nothing_out_of_a_batch_proves_nothing_of_it(tmp_path, after):
    write_batch(tmp_path, [1, 2, 3])
    write_batch(tmp_path, [4])
    write_batch(tmp_path, [1], day=TOY_DAY + 1)
    lake = Lake.open(tmp_path)
    [first, _] = lake.chain.of_day(TOY_DAY)
    told = ErasedBatch(
        manifest=first.hash, packets=3, quarantined=0, contents="ab" * 32, body_bytes=100, kinds={}
    )
    erasure_commit.put_record(lake, lake.erasures.next(TOY_DAY, 0, [told], b""), b"")
    check_erasures(Lake.open(tmp_path), (), audited := Audited(after=after))
    assert audited.counts == {"erasure: count": 1} and "takes nothing out" in str(audited.findings)


def test_a_lake_of_another_log_or_a_damaged_one_is_left_alone(spark, original, new_log, tmp_path, made):
    other = new_log()
    relay_logs.append(other, packets := relay_logs.make_many(6, first=900, at=NOON), NOON)
    relay_logs.erase(other, packets[0].packet_id)
    with pytest.raises(LogError, match="this is the log of another relay"):
        erase(spark, other, tmp_path)
    assert bodies(tmp_path) == [packet.canonical for packet in made]
    next((tmp_path / "packets" / "day=2024-10-04").rglob("*.parquet")).unlink()
    before = bodies(tmp_path)
    with pytest.raises(LakeError, match=r"the day stays as it is\. Run audit.* from 1 days"):
        erase(spark, original[0], tmp_path)
    # An erasure that must be done does not wait for a damaged file of another day.
    other = made[41].canonical
    assert other in before and bodies(tmp_path) == [body for body in before if body != other]
    torn = next((tmp_path / "packets" / "day=2024-10-04").rglob("*.parquet"))
    torn.write_bytes(b"torn")
    with pytest.raises(LakeError, match=r"2024-10-04 has a file that cannot be read: .*\. Run audit"):
        erase(spark, original[0], tmp_path)


def test_a_packet_that_the_log_has_twice_is_erased_at_both_places(spark, new_log, tmp_path):
    url, lake, copy = new_log(), tmp_path / "lake", tmp_path / "copy"
    relay_logs.append(url, packets := relay_logs.make_many(4, at=NOON), NOON)
    sql(url, "DELETE FROM packet_ids")  # as the relay forgets ids, so that an import stores a packet again
    relay_logs.append(url, [packets[1], *relay_logs.make_many(2, first=9, at=NOON + DAY)], NOON + DAY)
    relay_logs.append(url, relay_logs.make_many(1, first=20, at=NOON + 2 * DAY), NOON + 2 * DAY)
    archive(spark, url, lake)
    copy_lake(lake, copy)
    relay_logs.erase_authors(url, packets[1].author_id)  # two rows, and one tombstone for their id
    assert erase(spark, url, lake, everywhere=False).packets == 1
    assert audit(spark, lake, url=url).counts == {"erasure: held": 1, "log: altered": 1}
    done = erase(spark, url, lake)
    assert (done.packets, done.searched) == (1, 3)
    assert packets[1].canonical not in bodies(lake)
    audited = audit(spark, lake, url=url)
    assert (audited.holds, audited.erased) == (True, 2), audited.counts
    for days in (1, 0):  # the day that was written anew is searched once more
        done = erase(spark, url, lake)
        assert (done.packets, done.searched) == (0, days)
    copy_lake(lake, copy)
    assert bodies(copy) == bodies(lake)


def test_a_database_of_before_has_no_tombstones_and_a_forged_one_is_refused(spark, new_log, tmp_path):
    url = new_log()
    relay_logs.append(url, packets := relay_logs.make_many(4, at=NOON), NOON)
    relay_logs.append(url, relay_logs.make_many(2, first=9, at=NOON + DAY), NOON + DAY)
    archive(spark, url, tmp_path)
    relay_logs.erase(url, packets[1].packet_id)
    sql(
        url,
        "INSERT INTO tombstones (packet_id, sequence, erased_at, body)"
        " SELECT p.packet_id, p.sequence, 1, replace(encode(t.body, 'escape'), 'TOMB', 'GRAVE')::bytea"
        " FROM tombstones AS t, packets AS p"
        " WHERE p.sequence = t.sequence - 1",
    )
    with pytest.raises(LogError, match="a tombstone that does not hold"):
        erase(spark, url, tmp_path)


def test_the_command(spark, original, tmp_path, made):
    told = CliRunner().invoke(
        app, ["erase", "--lake", str(tmp_path), "--database-url", original[0], "--json"]
    )
    assert told.exit_code == 0, told.output
    said = json.loads(told.stdout.splitlines()[-1])
    assert (said["event"], said["packets"], said["waiting"]) == ("erased", len(ERASED), 1)
