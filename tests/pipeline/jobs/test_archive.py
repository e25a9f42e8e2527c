"""The log into the lake: each packet once, whatever happens."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from strata_pipeline.errors import LakeBusy, LogError, LogUnavailable
from strata_pipeline.jobs import archive as archiving
from strata_pipeline.jobs.archive import archive
from strata_pipeline.lake import files
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake_format import LakeError, read_witnesses
from strata_pipeline.schemas import schema

from relayd.store import Store
from tests.support import relay_logs
from tests.support.lakes import DAY, NOON, bodies, plain, sql

Begun = tuple[str, Path, list]
"""A log, a lake that holds its first twenty packets in one batch, and the packets of the log."""


@pytest.fixture(scope="module")
def begun(spark, new_log: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Begun:
    url, folder, made = new_log(), tmp_path_factory.mktemp("begun"), relay_logs.make_many(60)
    relay_logs.append(url, made)
    archive(spark, url, folder, batch_rows=20, stopped=lambda: True)
    return url, folder, made


@pytest.fixture
def lake(begun: Begun, tmp_path: Path) -> Path:
    """A copy of that lake."""
    return shutil.copytree(begun[1], tmp_path / "lake")


def test_the_lake_holds_the_log_exactly(spark, log_url, tmp_path):
    made = relay_logs.make_many(500, types=("POST", "/chat/1/room/proto", "x/../y"))
    relay_logs.append(log_url, made)
    done = archive(spark, log_url, tmp_path / "lake", batch_rows=200)
    assert (done.batches, done.packets, done.quarantined, done.behind) == (3, 500, 0, 0)
    rows = plain(tmp_path / "lake")
    assert rows["packet_id"].to_pylist() == [packet.digest for packet in made]
    assert rows["body"].to_pylist() == [packet.canonical for packet in made]
    assert rows["content_type"].to_pylist() == [packet.content_type for packet in made]
    assert rows["size"].to_pylist() == [len(packet.canonical) for packet in made]
    assert set(rows["kind"].to_pylist()) == {"POST", "channel", "other"}
    assert spark.read.parquet(str(tmp_path / "lake" / "packets")).count() == 500
    again = archive(spark, log_url, tmp_path / "lake")
    assert (again.batches, again.reached, again.tip) == (0, done.reached, done.tip)


def test_days_have_batches_of_their_own_and_an_empty_log_makes_no_lake(spark, log_url, tmp_path):
    assert archive(spark, log_url, tmp_path).batches == 0
    for day in (0, 1, 5):
        relay_logs.append(
            log_url, relay_logs.make_many(10, first=day * 10, at=NOON + day * DAY), NOON + day * DAY
        )
    done = archive(spark, log_url, tmp_path)
    assert (done.batches, done.packets) == (3, 30)
    assert [folder.name for folder in sorted((tmp_path / "packets").iterdir())] == [
        "day=2024-10-04", "day=2024-10-05", "day=2024-10-09",
    ]  # fmt: skip


def test_what_retention_spared_is_archived_though_days_are_gone(spark, log_url, tmp_path):
    kept = [relay_logs.make(n, who=n, type="CLIENT_MANIFEST", at=NOON) for n in range(3)]  # one each counts
    gone = relay_logs.make_many(5, first=100, at=NOON)
    relay_logs.append(log_url, [kept[0], *gone, *kept[1:]], NOON)
    relay_logs.append(log_url, late := relay_logs.make_many(4, first=200, at=NOON + 9 * DAY), NOON + 9 * DAY)

    async def sweep() -> None:
        async with await Store.open(log_url, retention_days=2) as store:
            assert (await store.maintain(NOON + 9 * DAY)).days == 1

    asyncio.run(sweep())
    # The spared packets are farther apart than a batch has rows.
    done = archive(spark, log_url, tmp_path, batch_rows=1)
    assert (done.batches, done.packets) == (7, 7)
    assert bodies(tmp_path) == [packet.canonical for packet in [*kept, *late]]


def test_rows_that_are_not_what_they_must_be_are_put_aside_with_the_reason(spark, log_url, tmp_path):
    made = relay_logs.make_many(8)
    relay_logs.append(log_url, made)

    def where(n: int) -> str:
        return f"WHERE packet_id = '\\x{made[n].digest.hex()}'"

    sql(
        log_url,
        f"UPDATE packets SET body = substring(body FOR 50) {where(1)}",
        f"UPDATE packets SET author_id = '\\xff00'::bytea {where(2)}",
        f"UPDATE packets SET body = '\\x{made[0].canonical.hex()}' {where(3)}",
        f"UPDATE packets SET packet_id = '\\x1234' {where(4)}",
    )
    done = archive(spark, log_url, tmp_path)
    assert (done.packets, done.quarantined) == (4, 4)
    aside = pads.dataset(tmp_path / "quarantine", partitioning="hive").to_table().sort_by("sequence")
    assert aside["reason"].to_pylist() == [
        "malformed_json", "columns_differ", "packet_id_mismatch", "packet_id_mismatch",
    ]  # fmt: skip
    assert aside["body"].to_pylist()[1] == made[2].canonical and all(aside["detail"].to_pylist())
    assert aside["author_id"].to_pylist()[1] == "\\xff\x00"
    assert bodies(tmp_path) == [made[n].canonical for n in (0, 5, 6, 7)]
    relay_logs.append(log_url, relay_logs.make_many(2, first=50))
    assert archive(spark, log_url, tmp_path).packets == 2


def test_a_lake_keeps_when_the_first_relay_received_a_packet(spark, log_url, tmp_path):
    now = int(time.time())
    relay_logs.append(log_url, relay_logs.make_many(20), now)
    archive(spark, log_url, tmp_path, batch_rows=20)
    theirs = relay_logs.make_many(20, first=20)
    for number, packet in enumerate(theirs):  # of two partitions; half of them from a peer
        relay_logs.append(log_url, [packet], now, witnessed_at=now - number if number % 2 else None)
    relay_logs.append(log_url, relay_logs.make_many(5, first=40), now)
    broken = theirs[1].digest.hex()
    sql(log_url, f"UPDATE packets SET body = '{{' WHERE packet_id = '\\x{broken}'")
    done = archive(spark, log_url, tmp_path, batch_rows=20, partitions=2)
    assert (done.packets, done.quarantined) == (24, 1)
    lake = Lake.open(tmp_path)
    assert [bool(manifest.witnesses) for manifest in lake.manifests] == [False, True, False]
    told = read_witnesses(lake.witnesses.text_of(lake.manifests[1]), lake.manifests[1])
    first = lake.manifests[1].after + 1
    assert told == [(first + number, now - number) for number in range(1, 20, 2)]
    # Plain readers find files of one schema.
    found = {tuple(pq.read_schema(path).names) for path in (tmp_path / "packets").rglob("*.parquet")}
    assert found == {tuple(schema("packets").names)}


def test_a_damaged_last_row_blocks_nothing(spark, log_url, tmp_path):
    made = relay_logs.make_many(6)
    relay_logs.append(log_url, made)

    def damaged(packet_id: str, n: int) -> str:
        there = "SELECT sequence FROM packets ORDER BY sequence OFFSET"
        return f"UPDATE packets SET packet_id = '\\x{packet_id}' WHERE sequence = ({there} {n} LIMIT 1)"

    late = "UPDATE packets SET received_at = 1::bigint << 60 WHERE packet_id = '\\x5678'"
    sql(log_url, damaged("1234", 4), damaged("5678", 5), late)
    assert archive(spark, log_url, tmp_path).quarantined == 2
    assert archive(spark, log_url, tmp_path).batches == 0
    # Repaired since, by hand or from a backup: the last valid packet identifies the log.
    sql(log_url, damaged(made[5].digest.hex(), 5))
    relay_logs.append(log_url, relay_logs.make_many(2, first=50))
    assert archive(spark, log_url, tmp_path).packets == 2
    sql(log_url, "TRUNCATE packets, packet_ids", "UPDATE log_head SET last_sequence = 0")
    relay_logs.append(log_url, relay_logs.make_many(9, first=100))
    with pytest.raises(LogError, match="the log of another relay"):
        archive(spark, log_url, tmp_path)


def test_a_row_missing_in_the_log_is_an_error_and_nothing_is_written(spark, log_url, tmp_path):
    made = relay_logs.make_many(20)
    relay_logs.append(log_url, made)
    sql(log_url, f"DELETE FROM packets WHERE packet_id = '\\x{made[7].digest.hex()}'")
    with pytest.raises(LogError, match=r"must have 20 packets .* 19 were found"):
        archive(spark, log_url, tmp_path)
    assert Lake.open(tmp_path).manifests == [] if (tmp_path / "_manifests").exists() else True
    assert not (tmp_path / "packets").exists()


def test_the_log_of_another_relay_or_an_older_backup_is_refused(spark, log_url, lake):
    with pytest.raises(LogError, match="the log of another relay"):
        archive(spark, log_url, lake)
    relay_logs.append(log_url, relay_logs.make_many(30, first=100))
    with pytest.raises(LogError, match="another relay"):
        archive(spark, log_url, lake)


@pytest.mark.parametrize("step", ["make_durable", "place", "write_new", "remove"])
def test_cut_off_at_any_step_the_lake_is_exact_and_the_next_run_completes_it(
    spark, begun, lake, monkeypatch, step
):
    log_url, _, made = begun

    class Killed(BaseException):
        pass

    real, calls = getattr(files, step), []

    def dies(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:  # in the middle of a batch, and after a whole one
            raise Killed
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(files, step, dies)
        with pytest.raises(Killed):
            archive(spark, log_url, lake, batch_rows=20)
    seen = bodies(lake)
    assert seen == [packet.canonical for packet in made[: len(seen)]]
    archive(spark, log_url, lake, batch_rows=20)
    assert bodies(lake) == [packet.canonical for packet in made]
    assert not (lake / "_staging").exists()


def test_only_one_process_writes(spark, log_url, tmp_path):
    with Lake.write(tmp_path), pytest.raises(LakeBusy, match="another process"):
        archive(spark, log_url, tmp_path)


def test_a_folder_that_no_manifest_knows_is_not_deleted_but_refused(spark, begun, lake):
    (lake / "packets" / "day=2024-10-04" / "batch=1-77").mkdir(parents=True)
    with pytest.raises(LakeError, match="none of the lake's batches"):
        archive(spark, begun[0], lake)


def test_a_batch_in_sight_without_proof_is_moved_aside_and_archived_again(spark, begun, lake):
    # As left by an earlier version that was killed before it wrote the manifest.
    [manifest] = (lake / "_manifests").iterdir()
    manifest.unlink()
    with pytest.raises(LakeError, match="no manifests"):
        archive(spark, begun[0], lake)
    [batch] = (lake / "packets").glob("day=*/batch=*")
    (lake / "_staging" / batch.name).mkdir(parents=True)
    done = archive(spark, begun[0], lake, batch_rows=20, stopped=lambda: True)
    assert done.packets == 20 and len(done.moved_aside) == 1
    assert len(bodies(lake)) == 20


def test_a_database_that_vanishes_amid_a_batch_is_told_and_a_rerun_completes(spark, log_url, tmp_path):
    made = relay_logs.make_many(30)
    relay_logs.append(log_url, made)
    postgres, name = log_url.replace(urlsplit(log_url).path, "/postgres"), urlsplit(log_url).path[1:]

    def nobody_else(done: archiving.Archived) -> None:
        # The driver keeps its connection and continues planning; the tasks cannot connect.
        sql(postgres, f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')

    with pytest.raises(LogUnavailable):
        archive(spark, log_url, tmp_path, batch_rows=10, progress=nobody_else)
    assert bodies(tmp_path) == [packet.canonical for packet in made[:10]]
    sql(postgres, f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    assert archive(spark, log_url, tmp_path).packets == 20
    assert bodies(tmp_path) == [packet.canonical for packet in made]
