"""SQL views of a lake, and the notebook that queries them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from strata_pipeline.cli import app
from strata_pipeline.databases import database_of
from strata_pipeline.errors import UsageError
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake_format import Manifest, encode
from strata_pipeline.views import VIEWS, statements
from typer.testing import CliRunner

from tests.support.object_lakes import compacted, drafted, erased, put_batch
from tests.support.toy_lakes import DAY, write_batch
from tests.support.toy_lakes import place as sequence

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "lake_questions.ipynb"
QUESTIONS = (
    "SELECT count(*), sum(size), min(sequence) FROM packets",
    "SELECT CAST(day AS STRING), kind, packets, bytes, authors FROM packets_by_day ORDER BY day, kind",
    "SELECT CAST(day AS STRING), author_id, packets, least_lag FROM authors_by_day ORDER BY day",
    "SELECT CAST(day AS STRING), packets, median, p99, from_the_future FROM lag_by_day ORDER BY day",
    "SELECT number, packets, quarantined, witnesses FROM manifests ORDER BY number",
    "SELECT sequence, reason FROM quarantine",
    "SELECT sequence, dated IS NULL, received IS NULL FROM packets ORDER BY sequence",
)
UNDATED = (-(10**15), 10**15)
"""Times that an author may write, but that no calendar has."""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of two days, in a folder whose name must be quoted."""
    near = tmp_path_factory.mktemp("lake's own")
    folder = near / "{a,b} [c]*?" / "lake"
    # As a pattern, that name matches this one too: its rows are of another lake.
    write_batch(near / "a c!!" / "lake", range(1, 9))
    write_batch(near / "{a,b} [c]!!" / "lake", range(1, 9))
    write_batch(folder, [1, 2, 3], [4])
    write_batch(folder, [5, 6])
    write_batch(folder, [1, 2], day=DAY + 1)
    for timestamp, file in zip(UNDATED, sorted(folder.glob("packets/**/*.parquet")), strict=False):
        rows = pq.ParquetFile(file).read()
        written = pa.array([timestamp] * len(rows), pa.int64())
        for name in ("timestamp", "received_at"):
            rows = rows.set_column(rows.schema.get_field_index(name), name, written)
        pq.write_table(rows, file)
    return folder


def made(lake: Path) -> duckdb.DuckDBPyConnection:
    database = duckdb.connect()
    for text in statements(lake):
        database.execute(text)
    return database


def test_views_tell_what_the_lake_holds_now(lake, tmp_path):
    file = tmp_path / "lake.duckdb"
    done = CliRunner().invoke(app, ["views", "--lake", str(lake), "--database", str(file)])
    assert (done.exit_code, done.stdout) == (0, f"made {len(VIEWS)} views in {file}\n")
    with duckdb.connect(file, read_only=True) as database:
        assert database.sql("SELECT count(*), min(sequence) FROM packets").fetchall() == [(7, sequence(1))]
        rows = database.sql("SELECT day::VARCHAR, kind, packets FROM packets_by_day ORDER BY ALL").fetchall()
        assert rows == [
            ("2024-10-04", "NOTE", 2), ("2024-10-04", "POST", 3),
            ("2024-10-05", "NOTE", 1), ("2024-10-05", "POST", 1),
        ]  # fmt: skip
        assert database.sql("SELECT reason FROM quarantine").fetchall() == [("malformed_json",)]
        dates = database.sql('SELECT "timestamp", dated::VARCHAR FROM packets').fetchall()
        assert {told for told, dated in dates if dated is None} == set(UNDATED) and len(set(dates)) > 3


def test_the_view_of_manifests_has_what_only_later_ones_have_and_nothing_else(tmp_path):
    write_batch(tmp_path, [1])
    [first] = Lake.open(tmp_path).manifests
    written = [
        replace(first, number=number, kinds={"NOTE" if number == 50 else "POST": 7})
        for number in range(1, 60)
    ]
    written.append(replace(first, number=60, witnesses="cd"))
    for one in written:
        (tmp_path / "_manifests" / f"{one.number:010}.json").write_bytes(encode(one))
    for stranger in ("99.json", "0000000000.copy.json", "00000000061.json"):
        (tmp_path / "_manifests" / stranger).write_bytes(encode(first))
    database = made(tmp_path)
    assert database.sql("SELECT * FROM manifests").columns == list(Manifest.__struct_fields__)
    assert database.sql("SELECT count(*) FROM manifests").fetchall() == [(61,)]
    kinds = "SELECT number, kinds['NOTE'] FROM manifests WHERE kinds['NOTE'] > 0"
    assert database.sql(kinds).fetchall() == [(50, 7)]
    witnesses = "SELECT number, witnesses FROM manifests WHERE number IN (0, 60) ORDER BY number"
    assert database.sql(witnesses).fetchall() == [(0, ""), (60, "cd")]


def test_a_lake_with_nothing_put_aside_has_no_view_of_it(tmp_path):
    write_batch(tmp_path / "lake", [1])
    assert made(tmp_path / "lake").sql("SELECT count(*) FROM lag_by_day").fetchall() == [(1,)]
    printed = (
        CliRunner().invoke(app, ["views", "--lake", str(tmp_path / "lake"), "--dialect", "spark"]).stdout
    )
    assert "VIEW quarantine" not in printed and printed.count(";\n") == 6
    wrong = ["views", "--lake", str(tmp_path / "lake"), "--dialect", "spark", "--database", "x"]
    assert CliRunner().invoke(app, wrong).exit_code == 2


def test_the_notebook_answers_its_ten_questions(lake, monkeypatch, capsys):
    monkeypatch.setenv("STRATA_LAKE", str(lake))
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    questions = [cell for cell in cells if "".join(cell["source"]).startswith("## ")]
    assert len(questions) == 10
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            # Stored without outputs, which would contain a lake's data.
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    told = capsys.readouterr().out
    assert "3 manifests" in told and "malformed_json" in told and "did:key:somebody" in told
    assert re.search(r"day=2024-10-04 4 files", told)


@pytest.mark.timeout(600)
def test_spark_and_duckdb_answer_alike(spark, lake):
    for text in statements(lake, "spark"):
        spark.sql(text)
    database = made(lake)
    for question in QUESTIONS:
        assert [tuple(row) for row in spark.sql(question).collect()] == database.sql(question).fetchall()


@pytest.mark.timeout(600)
def test_views_of_a_bucket_name_what_counted_when_they_were_printed(spark, place, tmp_path):
    put_batch(place, (1, 2, 3), (4,))
    put_batch(place, (5, 6))
    put_batch(place, (1, 2), day=DAY + 1)
    assert compacted(place) and erased(place, sequence(2)) == 1
    with ObjectLake.write(place) as lake:
        drafted(lake, [3, 4], day=DAY + 1)  # then it is killed: objects that no manifest names
    told = database_of(place)
    expected = [told.sql(question).fetchall() for question in QUESTIONS]
    printed = [
        CliRunner().invoke(app, ["views", "--lake", place, "--dialect", dialect]).stdout
        for dialect in ("duckdb", "spark")
    ]
    put_batch(place, [3], day=DAY + 1)
    names = list(lake.store.keys(""))
    for name, content in zip(names, lake.store.get_all(names), strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)

    # With a folder in place of the bucket: neither httpfs nor s3a is here.
    in_duckdb, in_spark = printed
    assert in_duckdb.startswith(f"-- {place} as it was when this was printed, up to manifest 2:")
    database = duckdb.connect()
    database.execute(in_duckdb.replace(f"'{place}/", f"'{tmp_path}/"))
    assert [database.sql(question).fetchall() for question in QUESTIONS] == expected
    for text in filter(str.strip, in_spark.split(";\n")):
        spark.sql(text.replace(f"'s3a{place.removeprefix('s3')}/", f"'{tmp_path}/"))
    assert [[tuple(row) for row in spark.sql(question).collect()] for question in QUESTIONS] == expected


def test_a_lake_of_quarantined_rows_alone_has_no_views(tmp_path):
    write_batch(tmp_path, [], [1])
    for dialect in ("duckdb", "spark"):
        refused = CliRunner().invoke(app, ["views", "--lake", str(tmp_path), "--dialect", dialect])
        assert refused.exit_code == 2 and "holds no packets yet" in refused.output
    with pytest.raises(UsageError, match="holds no packets yet"):
        database_of(tmp_path)


def test_views_of_a_bucket_are_printed_and_made_in_no_file(place, tmp_path):
    put_batch(place, (), (1,))
    made = ["views", "--lake", place, "--database", str(tmp_path / "lake.duckdb")]
    refused = CliRunner().invoke(app, made)
    assert refused.exit_code == 2 and "httpfs" in refused.output
    refused = CliRunner().invoke(app, made[:3])
    assert refused.exit_code == 2 and "holds no packets yet" in refused.output
