"""A lake back into a relay's database: the same packets at the same places, whenever it is interrupted."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import itertools
import json
import shutil
import time

import asyncpg
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from strata.protocol import packets
from strata.protocol.keys import add_content
from strata_pipeline.cli.restore import restore_command
from strata_pipeline.errors import LakeError, LogError, LogUnavailable
from strata_pipeline.jobs import restore as job
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.erase import erase
from strata_pipeline.jobs.restore import restore
from strata_pipeline.lake import checking
from strata_pipeline.lake.erasures import Erasures
from strata_pipeline.log import restoring
from typer.testing import CliRunner

from relayd.admission.checks import to_store
from relayd.store import AppendOutcome, LogQuery, Store
from tests.support import relay_logs

DAY = 86_400
TODAY = int(time.time()) // DAY * DAY
_numbers = itertools.count(1)

TABLES = {
    "packets": "SELECT * FROM packets ORDER BY sequence",
    "packet_ids": "SELECT * FROM packet_ids ORDER BY sequence, packet_id",
    "head": "SELECT last_sequence, last_received_at, last_identity_sequence FROM log_head",
    "days": "SELECT relname FROM pg_class WHERE relname ~ '^packets_d[0-9]+$' ORDER BY 1",
    "staging": "SELECT relname FROM pg_class WHERE relname LIKE 'restore_staging%'",
}


def attestation(number, who=0):
    target = "0x" + f"{number:064x}"
    inner = {"attestation_id": f"0x{number:02x}", "target_packet": target, "confidence": 0.5}
    return relay_logs.make(
        number, who=who, at=TODAY, type="ATTESTATION", target_packet=target, attestation=inner
    )


def identity(number):
    who = relay_logs.author(number)
    content = add_content(f"{who.did}#key-1", who.public_key, valid_from=0)
    return packets.build(who, content, timestamp=TODAY, nonce="identity")


def rows_of(made):
    """The rows as relayd stores them: every seventh has a finding about its origin, and every fifth came from
    a peer, whose relay had received it before."""
    rows = [
        to_store(packet, None, witness=TODAY - 5 * DAY + n if n % 5 == 2 else None)
        for n, packet in enumerate(made)
    ]
    return [
        msgspec.structs.replace(row, annotation=b'{"found":%d}' % n) if n % 7 == 0 else row
        for n, row in enumerate(rows)
    ]


def make(number, **more):
    return relay_logs.make(number, at=TODAY, **more)


def make_many(count, first=0):
    return relay_logs.make_many(count, first=first, at=TODAY)


DAYS = [
    # Three days, with a missing day between them: the times of receipt, and the packets.
    (TODAY - 4 * DAY + 60, [*make_many(40), attestation(1), attestation(2, who=1), identity(0)]),
    (TODAY - 2 * DAY + 9, [*make_many(30, first=40), attestation(3)]),
    (TODAY - 2 * DAY + 900, [make(99, type="a/../b"), *make_many(5, first=70)]),
    (TODAY + 5, [*make_many(25, first=80), identity(1)]),
]


async def fill(url, batches):
    async with await Store.open(url, retention_days=0) as store:
        for now, made in batches:
            await store.append(rows_of(made), now)


async def tables_of(url, names=tuple(TABLES)):
    connection = await asyncpg.connect(url)
    try:
        return {name: [tuple(row) for row in await connection.fetch(TABLES[name])] for name in names}
    finally:
        await connection.close()


async def epoch_of(url):
    [[row]] = await run_sql(url, "SELECT epoch FROM log_head")
    return row["epoch"]


async def run_sql(url, *statements):
    connection = await asyncpg.connect(url)
    try:
        return [await connection.fetch(statement) for statement in statements]
    finally:
        await connection.close()


class Killed(BaseException):
    """Nothing in the product catches this, as nothing catches SIGKILL."""


@pytest.fixture
def empty_url(new_log):
    """The URL of an empty, migrated relay database, beside `log_url`."""
    return new_log()


@pytest.fixture(scope="module")
def archived(spark, new_log, tmp_path_factory):
    """A log of three days and its lake, in batches that end within days, for all tests to read."""
    url, folder = new_log(), tmp_path_factory.mktemp("archived") / "lake"
    asyncio.run(fill(url, DAYS))
    archive(spark, url, folder, batch_rows=30)
    return asyncio.run(tables_of(url)), folder


@pytest.fixture
def original(archived):
    """The tables of that log."""
    return archived[0]


@pytest.fixture
def lake(archived, tmp_path):
    """A copy of that lake."""
    return shutil.copytree(archived[1], tmp_path / "lake")


def test_a_restored_database_is_the_one_that_was_archived(spark, original, empty_url, lake):
    steps = []
    done = restore(spark, empty_url, lake, progress=lambda at: steps.append(dataclasses.astuple(at)))
    restored = asyncio.run(tables_of(empty_url))
    assert restored == original
    assert sum(row[9] is not None for row in restored["packets"]) == 21
    assert len(restored["packets"]) == done.packets == 106
    assert len(restored["packet_ids"]) == 109  # three of them also have an equivalence key
    assert (done.left, done.reached) == (0, original["head"][0][0])
    assert steps[0][0] == 0 and steps[0][2] == 106 and steps[-1][0] == 106

    again = restore(spark, empty_url, lake)
    assert (again.packets, again.left, again.reached) == (0, 0, done.reached)
    assert asyncio.run(tables_of(empty_url)) == original

    # A relay continues where the old one stopped.
    asyncio.run(_go_on(empty_url))
    # And rows that its retention has removed are not restored.
    before = asyncio.run(tables_of(empty_url))
    assert restore(spark, empty_url, lake).packets == 0
    assert asyncio.run(tables_of(empty_url)) == before


async def _go_on(url):
    async with await Store.open(url, retention_days=1) as store:
        head = await store.head()
        fresh, known = make(500), DAYS[1][1][3]
        repeated = packets.build(
            relay_logs.author(0), {**attestation(1).content, "note": "again"}, timestamp=TODAY, nonce="again"
        )
        appended = await store.append(rows_of([known, repeated, fresh]), TODAY + 60)
        assert [place.outcome for place in appended.dispositions] == [
            AppendOutcome.DUPLICATE,
            AppendOutcome.DUPLICATE,
            AppendOutcome.STORED,
        ]
        assert appended.dispositions[1].duplicate_of == attestation(1).digest
        assert appended.dispositions[2].sequence == head + 1 == await store.head()
        swept = await store.maintain(TODAY + 60)
        assert swept.days == 2
        kept = await run_sql(url, "SELECT packet_id FROM packets_kept")
        assert [row["packet_id"] for row in kept[0]] == [identity(0).digest]


def test_a_key_that_was_taken_over_is_restored_with_the_packet_that_has_it(
    spark, log_url, empty_url, tmp_path
):
    """Within a batch, and from one day to the next."""

    def stating(number: int, expires_at: int | None) -> packets.Packet:
        return packets.build(
            relay_logs.author(0),
            attestation(1).content,
            timestamp=TODAY,
            nonce=str(number),
            expires_at=expires_at,
        )

    asyncio.run(
        fill(
            log_url,
            [
                (TODAY - 2 * DAY, [stating(1, TODAY - 2 * DAY + 1), make(1)]),
                (TODAY - 2 * DAY + 9, [stating(2, TODAY - DAY), make(2)]),
                (TODAY + 5, [stating(3, None)]),
            ],
        )
    )
    original = asyncio.run(tables_of(log_url))
    assert len(original["packets"]) == 5 and len(original["packet_ids"]) == 6
    archive(spark, log_url, tmp_path / "lake")
    restore(spark, empty_url, tmp_path / "lake")
    assert asyncio.run(tables_of(empty_url)) == original


@pytest.mark.parametrize("step", ["staged", "after the log"])
def test_whatever_was_cut_off_a_rerun_completes_it(spark, original, empty_url, lake, monkeypatch, step):
    monkeypatch.setattr(checking, "_CHUNK_ROWS", 1)  # so that each batch is staged separately
    runs = 0
    while True:
        runs += 1
        with monkeypatch.context() as patch:
            _kill_at(patch, step)
            try:
                restore(spark, empty_url, lake, chunk_rows=10)
                break
            except Killed:
                pass
        now = asyncio.run(tables_of(empty_url))
        head = now["head"][0][0]
        for table, column in (("packets", 0), ("packet_ids", 1)):
            assert now[table] == [row for row in original[table] if row[column] <= head], table
    assert asyncio.run(tables_of(empty_url)) == original
    assert runs >= 3


def _kill_at(patch, step):
    """Kill a run when it reaches a step for the third time."""
    times = itertools.count(1)

    def dying(real):
        def run(*args):
            result = real(*args)
            if next(times) == 3:
                raise Killed
            return result

        return run

    if step == "staged":
        patch.setattr(job, "_stage", dying(job._stage))
    else:
        patch.setattr(restoring, "move", dying(restoring.move))


def test_what_a_killed_run_has_staged_is_dropped(spark, empty_url, lake):
    asyncio.run(run_sql(empty_url, "CREATE UNLOGGED TABLE restore_staging_0123456789abcdef (batch bigint)"))
    restore(spark, empty_url, lake)
    assert asyncio.run(tables_of(empty_url, ["staging"])) == {"staging": []}


def test_a_restore_that_was_killed_before_its_epoch_began_has_one_by_the_next(
    spark, empty_url, lake, monkeypatch
):
    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(restoring, "begin_epoch", killed)
        with pytest.raises(Killed):
            restore(spark, empty_url, lake)
    asyncio.run(run_sql(empty_url, "CREATE UNLOGGED TABLE restore_staging_0123456789abcdef (batch bigint)"))
    assert asyncio.run(epoch_of(empty_url)) == 1
    done = restore(spark, empty_url, lake)
    assert (done.packets, done.epoch) == (0, 2) and asyncio.run(epoch_of(empty_url)) == 2
    assert restore(spark, empty_url, lake).epoch == 0 and asyncio.run(epoch_of(empty_url)) == 2


def test_an_older_backup_is_completed(spark, original, empty_url, lake):
    first, *_ = DAYS
    asyncio.run(fill(empty_url, [(first[0], first[1][:21])]))  # ends within a batch
    done = restore(spark, empty_url, lake, chunk_rows=7)
    assert done.packets == 106 - 21
    assert asyncio.run(tables_of(empty_url)) == original


def test_a_log_that_has_gone_on_is_left_as_it_is(spark, empty_url, lake):
    asyncio.run(fill(empty_url, DAYS))
    asyncio.run(fill(empty_url, [(TODAY + 77, [make(1000)])]))
    before = asyncio.run(tables_of(empty_url))
    done = restore(spark, empty_url, lake)
    assert (done.packets, done.left, done.reached) == (0, 0, before["head"][0][0])
    assert asyncio.run(tables_of(empty_url)) == before


def _other_packets(made):
    return [(at, [make(n + 5000) for n, _ in enumerate(batch)]) for at, batch in made]


@pytest.mark.parametrize(
    ("contents", "damage", "told"),
    [
        # Another relay's packets at the very same places, whole batches and a part of one.
        (lambda made: _other_packets(made), None, "and the lake 0x"),
        (lambda made: [(made[0][0], [make(7000 + n) for n in range(9)])], None, "and the lake 0x"),
        # A log that continues after the first day, where the lake has nothing.
        (lambda made: [made[0], (made[0][0] + DAY, [make(1)])], None, "has no packet"),
        # A day longer than in the lake.
        (lambda made: [(made[0][0], [*made[0][1], make(7000)])], None, "has no packet"),
        # A lost row, neither the last of a batch nor of all.
        (lambda made: made, "DELETE FROM packets WHERE packet_id = '\\x{0}'", "105 rows up to"),
    ],
)
def test_a_log_that_is_no_beginning_of_the_lake_is_refused(spark, empty_url, lake, contents, damage, told):
    asyncio.run(fill(empty_url, contents(DAYS)))
    if damage is not None:
        asyncio.run(run_sql(empty_url, damage.format(make(4, who=4).digest.hex())))
    before = asyncio.run(tables_of(empty_url))
    with pytest.raises(LogError, match=f"not the beginning of what the lake holds: .*{told}"):
        restore(spark, empty_url, lake)
    assert asyncio.run(tables_of(empty_url)) == before


def test_a_relay_that_appends_meanwhile_ends_the_restore(spark, original, empty_url, lake):
    def meddle(done):
        if done.packets > 20:
            asyncio.run(fill(empty_url, [(TODAY, [make(3000)])]))

    with pytest.raises(LogError, match=r"the log ends at \d+ now, .* something else writes into it"):
        restore(spark, empty_url, lake, progress=meddle)
    now = asyncio.run(tables_of(empty_url))
    assert now["packets"][-1][4] == make(3000).digest  # it was acknowledged, so it stays


def test_there_is_one_restore_at_a_time(spark, empty_url, lake, monkeypatch):
    monkeypatch.setattr(restoring, "_PATIENCE", "10ms")
    with (
        restoring.writing(empty_url),
        pytest.raises(LogError, match="another restore into this database is running"),
    ):
        restore(spark, empty_url, lake)


def test_a_database_that_is_no_relays_is_refused(spark, postgres, lake):
    with pytest.raises(LogError, match="run relayd migrate"):
        restore(spark, postgres, lake)


def rewrite(path, column, change):
    table = pq.ParquetFile(path).read()
    values = table[column].to_pylist()
    values[-1] = change(values[-1])
    place, new = table.schema.get_field_index(column), pa.array(values, table[column].type)
    pq.write_table(table.set_column(place, table.schema.field(place), new), path)


@pytest.mark.parametrize(
    ("column", "change", "told"),
    [
        ("packet_id", lambda old: bytes(32), "its rows have other ids"),
        ("body", lambda old: old.replace(b"lorem", b"Lorem", 1), "packet_id_mismatch"),
        ("author_id", lambda old: old + "x", "columns_differ: author_id"),
        ("annotation", lambda old: b"{}", "a body, an annotation or a quarantined row was altered"),
    ],
)
def test_a_damaged_batch_is_refused_by_name_and_nothing_of_it_goes_in(
    spark, original, empty_url, archived, lake, column, change, told
):
    second_day = sorted((lake / "packets").iterdir())[1]
    rewrite(min(second_day.rglob("*.parquet")), column, change)
    with pytest.raises(LakeError, match=rf"batch \d+-\d+ \(manifest 2\) is damaged: .*{told}"):
        restore(spark, empty_url, lake)
    now = asyncio.run(tables_of(empty_url))
    assert now["staging"] == []
    assert len(now["packets"]) == 43
    assert asyncio.run(epoch_of(empty_url)) == 2  # a relay may continue from here
    done = restore(spark, empty_url, archived[1])
    assert done.packets == 106 - 43
    assert asyncio.run(tables_of(empty_url)) == original


def test_a_broken_chain_is_refused_before_anything_is_written(spark, empty_url, lake):
    before = asyncio.run(tables_of(empty_url))
    (lake / "_manifests" / "0000000001.json").unlink()
    with pytest.raises(LakeError, match="manifest 1 cannot be used: it is missing"):
        restore(spark, empty_url, lake)
    assert asyncio.run(tables_of(empty_url)) == before


def test_of_damaged_rows_the_places_alone_come_back_and_no_relay_serves_them(
    spark, log_url, empty_url, new_log, tmp_path
):
    asyncio.run(fill(log_url, DAYS))
    # The third row, and the last of the log.
    damage = "UPDATE packets SET body = body || ' ' WHERE sequence IN ({0}, {1})"
    rows = asyncio.run(tables_of(log_url, ["packets"]))["packets"]
    asyncio.run(run_sql(log_url, damage.format(rows[2][0], rows[-1][0])))
    # One erased before it was archived: the lake has its place and no tombstone.
    [[erased]] = asyncio.run(run_sql(log_url, f"SELECT packet_id FROM packets WHERE sequence = {rows[7][0]}"))
    relay_logs.erase(log_url, f"0x{erased['packet_id'].hex()}")
    rows = asyncio.run(tables_of(log_url, ["packets"]))["packets"]
    archive(spark, log_url, tmp_path / "lake")

    done = restore(spark, empty_url, tmp_path / "lake")
    assert (done.packets, done.erased, done.damaged) == (103, 1, 2)
    assert done.reached == rows[-1][0]
    now = asyncio.run(tables_of(empty_url))
    empty = [(at, received, 0, 0, told, b"", b"", b"", b'{"restored":"damaged"}', first, None)
             for at, received, _, _, told, _, _, _, _, first, _ in (rows[2], rows[-1])]  # fmt: skip
    assert now["packets"] == [*rows[:2], empty[0], *rows[3:-1], empty[1]]
    known = {row[0] for row in now["packet_ids"]}
    assert erased["packet_id"] in known and not known & {rows[2][4], rows[-1][4]}
    assert now["head"][0][:2] == (rows[-1][0], rows[-1][1])
    again = restore(spark, empty_url, tmp_path / "lake")
    assert (again.packets, again.erased, again.damaged) == (0, 0, 0)
    # The log from which it was archived has those rows, and is still the beginning of the lake.
    assert restore(spark, log_url, tmp_path / "lake").packets == 0
    # The mark is carried through another lake.
    archive(spark, empty_url, tmp_path / "next")
    done = restore(spark, next_url := new_log(), tmp_path / "next")
    assert (done.packets, done.erased, done.damaged) == (103, 1, 2)
    assert asyncio.run(tables_of(next_url)) == now
    asyncio.run(_serve(empty_url, tmp_path / "lake" / "_manifests", now["packets"]))


async def _serve(url, manifests, rows):
    """Check that a relay serves no empty row, accepts a damaged packet again, and finds the days archived."""
    async with await Store.open(url, retention_days=1, archive_manifests=manifests) as store:
        page = await store.page(LogQuery(), 1000, TODAY)
        assert [row.sequence for row in page.rows] == [row[0] for row in rows if row[7]]
        appended = await store.append(rows_of([DAYS[0][1][2]]), TODAY + 60)
        assert appended.dispositions[0].outcome is AppendOutcome.STORED
        assert (await store.maintain(TODAY + 60)).days == 2


def test_the_tombstones_of_a_day_are_checked_once(spark, log_url, empty_url, tmp_path, monkeypatch):
    relay_logs.append(log_url, made := make_many(20), TODAY - DAY)
    relay_logs.append(log_url, make_many(1, first=50), TODAY)
    archive(spark, log_url, tmp_path, batch_rows=5)
    relay_logs.erase(log_url, *(made[number].packet_id for number in (2, 9, 17)))
    erase(spark, log_url, tmp_path)
    read, real = [], Erasures.signed_tombstones

    def counted(self, record):
        for one in real(self, record):
            read.append(one)
            yield one

    monkeypatch.setattr(Erasures, "signed_tombstones", counted)
    monkeypatch.setattr(checking, "_CHUNK_ROWS", 1)  # so that each batch is staged separately
    assert restore(spark, empty_url, tmp_path).erased == len(read) == 3


def test_until_a_day_and_then_the_rest(spark, original, empty_url, lake):
    done = restore(spark, empty_url, lake, until=TODAY // DAY - 3)
    assert (done.packets, done.left) == (43, 0)
    assert restore(spark, empty_url, lake, until=TODAY // DAY - 3).packets == 0
    assert restore(spark, empty_url, lake).packets == 106 - 43
    assert asyncio.run(tables_of(empty_url)) == original
    with pytest.raises(LakeError, match="nothing to restore"):
        restore(spark, empty_url, lake, until=1)


def test_what_retention_had_spared_stays_where_retention_puts_it(spark, log_url, empty_url, tmp_path):
    asyncio.run(fill(log_url, DAYS))

    async def sweep(url):
        async with await Store.open(url, retention_days=1, dedup_window_seconds=DAY) as store:
            return await store.maintain(TODAY + 60)

    assert asyncio.run(sweep(log_url)).days == 2
    archive(spark, log_url, tmp_path / "lake")
    done = restore(spark, empty_url, tmp_path / "lake")
    names = ["packets", "head"]
    assert asyncio.run(tables_of(empty_url, names)) == asyncio.run(tables_of(log_url, names))
    kept = "SELECT packet_id FROM packets_kept"
    assert [row[0] for row in asyncio.run(run_sql(empty_url, kept))[0]] == [identity(0).digest]
    assert asyncio.run(sweep(empty_url)).days == 0
    assert restore(spark, empty_url, tmp_path / "lake").packets == 0
    assert done.packets == 27


def test_the_command_tells_how_far_it_has_come(spark, original, empty_url, lake):
    app = typer.Typer()
    app.command()(restore_command)
    there = ["--database-url", empty_url, "--lake", str(lake)]
    first_day = (datetime.date.today() - datetime.timedelta(days=400)).isoformat()
    none = CliRunner().invoke(app, [*there, "--until", first_day])
    assert none.exit_code == 1 and "nothing to restore" in none.stderr
    wrong = CliRunner().invoke(app, [*there, "--until", "yesterday"])
    assert wrong.exit_code == 2 and "2026-11-21" in wrong.stderr

    told = CliRunner().invoke(app, [*there, "--json"])
    assert told.exit_code == 0, told.output
    *steps, done = map(json.loads, told.stdout.splitlines())
    assert {step["event"] for step in steps} == {"progress"}
    head = original["head"][0][0]
    counts = {
        "packets": 106,
        "erased": 0,
        "damaged": 0,
        "reached": head,
        "left": 0,
        "epoch": 2,
    }
    assert done == {"event": "done", **counts}
    assert CliRunner().invoke(app, there).stdout == f"nothing to restore: the log ends at {head}\n"


def test_a_task_that_was_repeated_changes_nothing(spark, original, empty_url, lake, monkeypatch):
    real = job._stage

    def twice(*args):
        real(*args)
        real(*args)

    monkeypatch.setattr(job, "_stage", twice)
    restore(spark, empty_url, lake)
    assert asyncio.run(tables_of(empty_url)) == original


def test_a_packet_that_came_again_after_its_id_was_forgotten_is_known_by_its_first_place(
    spark, log_url, empty_url, tmp_path
):
    asyncio.run(fill(log_url, DAYS[:1]))
    asyncio.run(run_sql(log_url, "DELETE FROM packet_ids"))
    asyncio.run(fill(log_url, [(TODAY, DAYS[0][1][40:42])]))
    archive(spark, log_url, tmp_path / "lake")
    # So the two places lie in different partitions of packet_ids.
    asyncio.run(run_sql(empty_url, "UPDATE log_head SET generation_days = 1"))
    restore(spark, empty_url, tmp_path / "lake")
    now = asyncio.run(tables_of(empty_url))
    assert now["packets"] == asyncio.run(tables_of(log_url, ["packets"]))["packets"]
    assert len(now["packets"]) == 45
    first_day, today = (
        [row for row in now["packets"] if (row[1] < TODAY) is is_first] for is_first in (True, False)
    )
    ids = {row[4] for row in now["packets"]}
    assert {row[0] for row in now["packet_ids"]} >= ids
    assert {row[1] for row in now["packet_ids"] if row[0] in ids} == {row[0] for row in first_day}
    # Its equivalence key goes with the last packet that has it, as in the log.
    assert {row[1] for row in now["packet_ids"] if row[0] not in ids} == {row[0] for row in today}
    assert len(now["packet_ids"]) == 45  # 43 ids and the keys of two attestations


def test_a_database_that_vanishes_is_said_and_a_rerun_completes_it(spark, original, empty_url, lake):
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'strata-pipeline-restore' AND datname = current_database()"
    )

    def vanish(done):
        if done.packets >= 40:
            asyncio.run(run_sql(empty_url, cut))

    with pytest.raises(LogUnavailable):
        restore(spark, empty_url, lake, progress=vanish)
    left = asyncio.run(tables_of(empty_url, ["packets"]))["packets"]
    assert left == original["packets"][: len(left)] and 40 <= len(left) < 106
    assert restore(spark, empty_url, lake).packets == 106 - len(left)
    assert asyncio.run(tables_of(empty_url)) == original


def test_a_role_that_only_reads_is_told_which_one_to_use(spark, empty_url, lake):
    role = f"reader_{next(_numbers)}"
    asyncio.run(
        run_sql(
            empty_url, f"CREATE ROLE {role} LOGIN", f"GRANT SELECT ON packets, packet_ids, log_head TO {role}"
        )
    )
    with pytest.raises(LogError, match="use relayd's own, which owns the tables"):
        restore(spark, empty_url.replace("relayd@", f"{role}@", 1), lake)
