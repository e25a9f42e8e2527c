"""A lake as a database, from a bucket as from a folder: exactly what counts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import duckdb
import pytest
from strata_pipeline.cli import app
from strata_pipeline.databases import database_of
from strata_pipeline.errors import UsageError
from strata_pipeline.jobs.copy import copy_lake
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake_format import LakeError
from typer.testing import CliRunner

from tests.support.object_lakes import NO_GRACE, compacted, drafted, erased, put_batch, rows_apart
from tests.support.toy_lakes import DAY, write_batch
from tests.support.toy_lakes import compacted as compacted_on_disk
from tests.support.toy_lakes import place as sequence

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "pipeline.md"
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


def in_many_states(place: str) -> None:
    """Make a lake in a bucket with rewritten days, an erased packet, and objects that do not count."""
    for sound, aside, day in BATCHES:
        put_batch(place, sound, aside, day=day)
    assert compacted(place) and erased(place, sequence(2)) == 1
    with ObjectLake.write(place) as lake:
        drafted(lake, [3, 4], day=DAY + 1)


@pytest.mark.parametrize("where", ["on a disk", "in a bucket"])
def test_the_lines_of_the_guide_read_what_counts_with_polars_pyarrow_and_duckdb(place, tmp_path, where):
    in_many_states(place)
    text = GUIDE.read_text()
    of_disk, of_bucket = (
        block for block in re.findall(r"(?:^(?:    .*)?\n)+", text, re.M) if "in_polars" in block
    )
    lines = of_bucket.replace("s3://bucket/prefix", place)
    if where == "on a disk":
        copy_lake(place, tmp_path)
        with Lake.replace(tmp_path) as lake:
            target = staged_day(lake, DAY)
            compacted_on_disk(lake, DAY, target)
            replace_day(lake, DAY, target, 0)
        lines = of_disk.replace("/srv/lake", str(tmp_path))
    found: dict[str, Any] = {}
    exec(textwrap.dedent(lines), found)
    counting = "SELECT day::VARCHAR, kind, count(*), sum(sequence) FROM rows GROUP BY ALL ORDER BY ALL"
    expected = database_of(place).sql(counting.replace("rows", "packets")).fetchall()
    assert sum(row[2] for row in expected) == 6
    columns = ["day", "kind", "sequence"]
    read = [
        found["in_polars"].select(columns).collect().to_arrow(),
        found["in_pyarrow"].to_table(columns=columns),
        found["in_duckdb"].to_arrow_table(),
    ]
    for rows in read:
        with duckdb.connect() as database:
            database.register("rows", rows)
            assert database.sql(counting).fetchall() == expected


@pytest.mark.skipif(
    "STRATA_HTTPFS_PYTHON" not in os.environ,
    reason="STRATA_HTTPFS_PYTHON names no Python with duckdb and its extension httpfs",
)
def test_the_printed_views_are_read_with_httpfs(place, object_server):
    in_many_states(place)
    told = database_of(place)
    expected = [[list(map(str, row)) for row in told.sql(question).fetchall()] for question in QUESTIONS]
    asked = {
        "views": CliRunner().invoke(app, ["views", "--lake", place]).stdout,
        "questions": QUESTIONS,
        **object_server.environment,
    }
    command = [os.environ["STRATA_HTTPFS_PYTHON"], "-c", _WITH_HTTPFS, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


_WITH_HTTPFS = """
import duckdb, json, pathlib, sys
import duckdb_extension_httpfs
asked = json.loads(sys.argv[1])
folder = pathlib.Path(duckdb_extension_httpfs.__file__).parent / "extensions" / f"v{duckdb.__version__}"
database = duckdb.connect()
database.execute(f"LOAD '{folder}/httpfs.duckdb_extension'")
options = {
    "KEY_ID": asked["AWS_ACCESS_KEY_ID"],
    "SECRET": asked["AWS_SECRET_ACCESS_KEY"],
    "REGION": asked["AWS_REGION"],
    "ENDPOINT": asked["AWS_ENDPOINT_URL"].removeprefix("http://"),
    "URL_STYLE": "path",
}
told = "".join(f", {name} '{value}'" for name, value in options.items())
database.execute(f"CREATE SECRET (TYPE s3, USE_SSL false{told})")
database.execute(asked["views"])
rows = [database.sql(question).fetchall() for question in asked["questions"]]
print(json.dumps([[list(map(str, row)) for row in some] for some in rows]))
"""


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
