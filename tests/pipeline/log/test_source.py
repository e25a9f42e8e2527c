"""`relay_log`: what is read, what is pushed down, and where a read ends."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import asyncpg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    StringContains,
)
from strata.protocol.sequences import Span, day_of
from strata_pipeline.errors import DatasetError, UsageError
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.audit import audit
from strata_pipeline.log.conditions import Conditions
from strata_pipeline.log.database import without_password
from strata_pipeline.log.source import LogOptions, RelayLog

from tests.support import relay_logs
from tests.support.lakes import sql

DAY = 86_400
NOON = 20_000 * DAY + DAY // 2


def read(spark: SparkSession, url: str, **options: str | int):
    reader = spark.read.format("relay_log").option("url", url)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


@pytest.fixture
def three_days(log_url: str) -> list:
    """Thirty packets on each of three days."""
    made = []
    for day in range(3):
        at = NOON + day * DAY
        made += (
            today := relay_logs.make_many(30, first=day * 30, at=at, types=("POST", "NOTE", "\u0000\u00e9'"))
        )
        relay_logs.append(log_url, today, at)
    return made


def test_every_column_of_every_packet_is_read_whatever_the_partitions(spark, log_url, three_days):
    for partitions in (1, 2, 7):
        rows = read(spark, log_url, partitions=partitions).orderBy("sequence").collect()
        assert [bytes(row.body) for row in rows] == [packet.canonical for packet in three_days]
        assert [bytes(row.packet_id) for row in rows] == [packet.digest for packet in three_days]
        assert [row.author_id for row in rows] == [packet.author_id for packet in three_days]
        assert [row.content_type for row in rows] == [packet.content_type for packet in three_days]
        assert [row.timestamp for row in rows] == [packet.timestamp for packet in three_days]
        assert [day_of(row.sequence) for row in rows] == [20_000] * 30 + [20_001] * 30 + [20_002] * 30


def test_filters_give_what_spark_alone_would(spark, log_url, three_days):
    everything = read(spark, log_url).drop("body").cache()
    middle = everything.orderBy("sequence").collect()[44]
    conditions = (
        F.col("sequence") > middle.sequence,
        (F.col("sequence") >= middle.sequence) & (F.col("sequence") < middle.sequence + 3),
        F.col("sequence") == middle.sequence,
        F.col("sequence") == 5,
        F.col("packet_id") == middle.packet_id,
        F.col("author_id") == middle.author_id,
        F.col("content_type") == "\u0000\u00e9'",
        F.col("content_type").isin("POST", "none", "\u0000\u00e9'"),
        F.col("received_at") <= middle.received_at,
        F.col("timestamp") != middle.timestamp,
        F.col("expires_at").isNull() & (F.col("author_id") > middle.author_id),
        F.col("expires_at").isNotNull(),
        F.col("content_type").contains("OS") | (F.col("sequence") < middle.sequence),
    )
    # Without pushdown, Spark judges each row by all of them at once.
    judged = everything.select("sequence", *(each.alias(f"{n}") for n, each in enumerate(conditions)))
    expected = judged.collect()
    for number, condition in enumerate(conditions):
        assert {row.sequence for row in read(spark, log_url).where(condition).collect()} == {
            row.sequence for row in expected if row[f"{number}"]
        }
    everything.unpersist()


def test_the_time_of_the_first_relay_is_read_and_is_null_in_a_log_without_it(spark, log_url, three_days):
    def times():
        return {row.sequence: row.witnessed_at for row in read(spark, log_url).collect()}

    def early():
        some = read(spark, log_url).where(f"witnessed_at < {NOON}").select("sequence")
        return [row.sequence for row in some.collect()]

    first = min(times())
    sql(log_url, f"UPDATE packets SET witnessed_at = {NOON - 60} WHERE sequence = {first}")
    assert {place: at for place, at in times().items() if at is not None} == {first: NOON - 60}
    assert early() == [first]


def test_comparisons_narrow_the_span_and_the_rest_goes_back_to_spark():
    conditions = Conditions(Span(0, 100))
    mine = [
        GreaterThan(("sequence",), 10),
        LessThanOrEqual(("sequence",), 50),
        EqualTo(("author_id",), "a'b"),
    ]
    mine += [In(("packet_id",), (b"\x01",)), IsNotNull(("sequence",)), LessThan(("timestamp",), 7)]
    theirs = [StringContains(("author_id",), "x"), IsNull(("expires_at",)), GreaterThan(("author_id",), "x")]
    assert conditions.take([*mine, *theirs]) == theirs
    assert conditions.span == Span(10, 50)
    assert conditions.sql == [
        "\"author_id\" = '\\x612762'::bytea",
        "\"packet_id\" IN ('\\x01'::bytea)",
        '"timestamp" < 7',
    ]
    assert conditions.take([GreaterThanOrEqual(("sequence",), 60)]) == [] and conditions.span == Span(59, 59)


def test_only_the_columns_asked_for_are_read(spark, log_url, three_days):
    frame = (
        spark.read.format("relay_log").schema("author_id string, sequence long").option("url", log_url).load()
    )
    assert frame.columns == ["author_id", "sequence"]
    assert sorted(row.author_id for row in frame.collect()) == sorted(p.author_id for p in three_days)


def test_strings_too_long_for_an_index_are_read_found_and_archived(spark, log_url, tmp_path):
    long = "x" * 600
    made = [relay_logs.make(1), relay_logs.make(2, type=long), relay_logs.make(3, type="x" * 601)]
    relay_logs.append(log_url, made)
    both = "author_id string, content_type string"
    for columns in ("content_type string", both, "body binary, content_type string"):
        frame = spark.read.format("relay_log").schema(columns).option("url", log_url).load()
        assert {row.content_type for row in frame.collect()} == {"POST", long, "x" * 601}
        assert frame.where(F.col("content_type") == long).count() == 1
    assert archive(spark, log_url, tmp_path).packets == 3
    assert audit(spark, tmp_path, url=log_url).holds


def test_a_read_never_passes_what_is_still_being_committed(spark, log_url):
    relay_logs.append(log_url, relay_logs.make_many(5))
    frame = read(spark, log_url, partitions=1)

    async def with_open_append() -> tuple[int, int]:
        connection = await asyncpg.connect(log_url)
        try:
            transaction = connection.transaction()
            await transaction.start()
            late = relay_logs.make(99)
            await connection.execute(
                "SELECT * FROM relay_append($1, $2, $3, $4, $5, $6, $7, $8, NULL, NULL, false,"
                " (SELECT tag FROM log_head), 0, NULL)",
                int(time.time()), [late.digest], [late.author_id.encode()], [b"POST"], [late.timestamp],
                [None], [late.canonical], None,
            )  # fmt: skip
            before = await asyncio.to_thread(frame.count)
            await transaction.commit()
            return before, await asyncio.to_thread(read(spark, log_url).count)
        finally:
            await connection.close()

    assert asyncio.run(with_open_append()) == (5, 6)


def run_stream(spark: SparkSession, url: str, folder: Path, **options: str | int) -> tuple[list[int], int]:
    """Read everything through a stream; returns the sequences in batch order, and the number of batches."""
    seen: list[int] = []
    batches: list[int] = []

    def take(frame, number: int) -> None:
        batches.append(number)
        seen.extend(sorted(row.sequence for row in frame.select("sequence").collect()))

    reader = spark.readStream.format("relay_log").option("url", url)
    for name, value in options.items():
        reader = reader.option(name, value)
    query = reader.load().writeStream.foreachBatch(take).option("checkpointLocation", str(folder))
    query.trigger(availableNow=True).start().awaitTermination(60)
    return seen, len(batches)


def test_a_stream_reads_everything_once_in_bounded_batches_and_goes_on_from_its_checkpoint(
    spark, log_url, three_days, tmp_path
):
    all_of_it = sorted(row.sequence for row in read(spark, log_url).select("sequence").collect())
    seen, batches = run_stream(spark, log_url, tmp_path / "checkpoint", max_rows=40)
    assert seen == all_of_it and batches == 3
    relay_logs.append(log_url, relay_logs.make_many(7, first=500))
    seen, batches = run_stream(spark, log_url, tmp_path / "checkpoint", max_rows=40)
    assert len(seen) == 7 and batches == 1 and min(seen) > max(all_of_it)


def test_a_checkpoint_of_another_version_is_refused_and_a_new_one_goes_on(
    spark, log_url, three_days, tmp_path
):
    first, _ = run_stream(spark, log_url, tmp_path / "checkpoint", max_rows=0)
    (offsets,) = (tmp_path / "checkpoint" / "offsets").glob("0")
    lines = offsets.read_text().splitlines()
    offsets.write_text("\n".join([*lines[:-1], json.dumps({"version": 2, "sequence": 1})]))
    (offsets.parent / ".0.crc").unlink(missing_ok=True)
    relay_logs.append(log_url, relay_logs.make_many(3, first=600))
    with pytest.raises(PySparkException, match="another version"):
        run_stream(spark, log_url, tmp_path / "checkpoint")
    rest, _ = run_stream(spark, log_url, tmp_path / "new", after=first[-1])
    assert len(rest) == 3


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, UsageError, "url"),
        ({"url": "postgresql://x", "colour": "red"}, UsageError, "colour"),
        ({"url": "postgresql://x", "partitions": "many"}, UsageError, "partitions"),
        ({"url": "postgresql://x", "after": "-1"}, UsageError, "after"),
    ],
)
def test_wrong_options_are_told(options: dict, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        LogOptions.read(options).start()


def test_wrong_columns_and_a_database_that_is_none_are_told_without_the_password(spark, log_url):
    with pytest.raises((PySparkException, DatasetError), match="no column 'colour'"):
        spark.read.format("relay_log").schema("colour string").option("url", log_url).load().collect()
    with pytest.raises(PySparkException, match="LogUnavailable") as caught:
        read(spark, "postgresql://me:hunter2@127.0.0.1:1/none").collect()
    assert "hunter2" not in str(caught.value)
    assert (
        without_password("postgresql://me:hunter2@h/d password=x") == "postgresql://me:***@h/d password=***"
    )


def test_a_stream_follows_while_packets_arrive(spark, log_url, tmp_path):
    relay_logs.append(log_url, relay_logs.make_many(3, first=900))
    seen: list[int] = []
    arrived = threading.Event()

    def take(frame, number: int) -> None:
        seen.extend(row.sequence for row in frame.select("sequence").collect())
        if len(seen) >= 40:
            arrived.set()

    stream = spark.readStream.format("relay_log").option("url", log_url).option("after", "latest").load()
    query = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path)).start()
    try:
        query.processAllAvailable()  # it has begun: `latest` is the present end
        for part in range(4):
            relay_logs.append(log_url, relay_logs.make_many(10, first=part * 10))
        assert arrived.wait(60)
    finally:
        query.stop()
    assert len(seen) == len(set(seen)) == 40
    assert RelayLog.name() == "relay_log"
