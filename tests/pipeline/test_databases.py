"""A lake as a database, from a bucket as from a folder: exactly what counts."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from strata.protocol.lake import LakeError
from strata_pipeline.databases import database_of
from strata_pipeline.errors import UsageError
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake

from tests.support.object_lakes import NO_GRACE, compacted, drafted, erased, put_batch, rows_apart
from tests.support.toy_lakes import DAY, write_batch
from tests.support.toy_lakes import place as sequence

BATCHES = (((1, 2, 3), (4,), DAY), ((5, 6), (), DAY), ((1, 2), (3,), DAY + 1))
QUESTIONS = (
    "SELECT * FROM packets ORDER BY sequence",
    "SELECT * FROM packets_by_day ORDER BY ALL",
    "SELECT * FROM authors_by_day ORDER BY ALL",
    "SELECT * FROM lag_by_day ORDER BY ALL",
    "SELECT * FROM quarantine ORDER BY sequence",
    "SELECT number, packets, quarantined, up_to FROM manifests ORDER BY number",
    "SELECT sequence FROM packets WHERE day = DATE '2024-10-05' AND kind = 'POST'",
    "SELECT reason, day FROM quarantine WHERE day > DATE '2024-10-04'",
)


def answers(database: duckdb.DuckDBPyConnection) -> list[list[tuple[object, ...]]]:
    return [database.sql(question).fetchall() for question in QUESTIONS]


def columns(database: duckdb.DuckDBPyConnection, view: str) -> list[tuple[str, str]]:
    found = database.sql(f"SELECT * FROM {view} LIMIT 0")
    return list(zip(found.columns, map(str, found.types), strict=True))


def sequences(database: duckdb.DuckDBPyConnection, view: str) -> list[int]:
    return [row[0] for row in database.sql(f"SELECT sequence FROM {view} ORDER BY 1").fetchall()]


def test_a_bucket_answers_as_a_folder_does_and_shows_only_what_counts(place, tmp_path):
    for sound, aside, day in BATCHES:
        write_batch(tmp_path / "lake", sound, aside, day=day)
        put_batch(place, sound, aside, day=day)
    with ObjectLake.write(place) as lake:
        drafted(lake, [3, 4], day=DAY + 1)  # then it is killed: objects that no manifest names
    on_disk, database = database_of(tmp_path / "lake"), database_of(place)
    expected = answers(on_disk)
    assert answers(database) == expected and all(expected)
    for view in ("packets", "quarantine", "lag_by_day"):
        assert columns(database, view) == columns(on_disk, view)
    [kinds] = database.sql("SELECT kinds FROM manifests WHERE number = 0").fetchall()[0]
    assert kinds == ObjectLake.open(place).manifests[0].kinds

    # Rewritten days: no row is there twice, and erased ones are not there at all.
    assert compacted(place)
    assert sequences(database_of(place), "packets") == sequences(on_disk, "packets")
    assert erased(place, sequence(2)) == 1
    now = database_of(place)
    assert (sequences(now, "packets"), sequences(now, "quarantine")) == rows_apart(place)
    assert sequence(2) not in sequences(now, "packets")

    # An earlier reader continues with the replaced objects, and gets an error once they are deleted.
    assert sequences(database, "packets") == sequences(on_disk, "packets")
    put_batch(place, [4], day=DAY + 1)
    assert len(sequences(database, "packets")) == 7 and len(sequences(database_of(place), "packets")) == 7
    with ObjectLake.replace(place, NO_GRACE):
        pass
    with pytest.raises(duckdb.Error):
        sequences(database, "packets")
    assert len(sequences(now, "packets")) == 6


def test_a_lake_with_nothing_put_aside_has_no_view_of_it(place):
    put_batch(place, [1, 2])
    with pytest.raises(duckdb.Error, match="quarantine"):
        database_of(place).sql("SELECT * FROM quarantine")


def test_a_place_without_a_lake_says_so(place, tmp_path: Path):
    with pytest.raises(LakeError, match="there is no lake"):
        database_of(place)
    with pytest.raises(LakeError, match="there is no lake"):
        database_of(tmp_path)
    with Lake.write(tmp_path):
        pass
    (tmp_path / "_manifests").mkdir(exist_ok=True)
    with pytest.raises(UsageError, match="holds no lake yet"):
        database_of(tmp_path)
