"""SQL views of a lake, for DuckDB and for Spark SQL. No I/O but a look which folders are there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from strata_pipeline.errors import UsageError
from strata_pipeline.globs import for_duckdb, for_spark

__all__ = ["VIEWS", "Dialect", "statements", "statements_over_tables"]

Dialect = Literal["duckdb", "spark"]

VIEWS = ("packets", "quarantine", "manifests", "packets_by_day", "authors_by_day", "lag_by_day")
"""`quarantine` is there when the lake has such rows."""

# What an author dates may be a time that no calendar has: a keys' packet is of any.
_COLUMNS = (
    "sequence, received_at, to_timestamp(received_at) AS received, {timestamp}, "
    "CASE WHEN abs({timestamp}) < 9223372036854 THEN to_timestamp({timestamp}) END AS dated, "
    "expires_at, packet_id, author_id, content_type, size, body, annotation"
)

_MANIFEST = (
    "format INT, number BIGINT, `after` BIGINT, up_to BIGINT, packets BIGINT, quarantined BIGINT, "
    "rows STRING, contents STRING, body_bytes BIGINT, kinds MAP<STRING, BIGINT>, last_packet_id STRING, "
    "last_received_at BIGINT, written_at BIGINT, previous STRING, hash STRING"
)

_BY_DAY = """
CREATE OR REPLACE {temporary}VIEW packets_by_day AS
SELECT day, kind, count(*) AS packets, sum(size) AS bytes, count(DISTINCT author_id) AS authors
FROM packets GROUP BY day, kind
"""

_AUTHORS = """
CREATE OR REPLACE {temporary}VIEW authors_by_day AS
SELECT day, author_id, count(*) AS packets, sum(size) AS bytes, min(received_at - {timestamp}) AS least_lag
FROM packets GROUP BY day, author_id
"""

_LAG = """
CREATE OR REPLACE {temporary}VIEW lag_by_day AS
SELECT day, count(*) AS packets, {median} AS median, {p99} AS p99,
  sum(CASE WHEN received_at < {timestamp} THEN 1 ELSE 0 END) AS from_the_future
FROM packets GROUP BY day
"""

_IN_DUCKDB = {
    "timestamp": '"timestamp"',
    "temporary": "",
    "median": 'quantile_disc(received_at - "timestamp", 0.5)',
    "p99": 'quantile_disc(received_at - "timestamp", 0.99)',
}
_IN_SPARK = {
    "timestamp": "`timestamp`",
    "temporary": "TEMPORARY ",
    "median": "percentile_disc(0.5) WITHIN GROUP (ORDER BY received_at - `timestamp`)",
    "p99": "percentile_disc(0.99) WITHIN GROUP (ORDER BY received_at - `timestamp`)",
}


def statements(lake: str | Path, dialect: Dialect = "duckdb") -> list[str]:
    """The statements that make `VIEWS`: lasting ones in DuckDB, temporary ones in Spark.

    The views name folders, so they show what the lake gains later too. Raises `UsageError` for a path that
    the dialect cannot name: to Spark's views a colon ends a scheme, and to DuckDB a backslash is a slash.
    """
    root = Path(str(lake).removeprefix("file://")).absolute()
    if dialect == "spark" and ":" in str(root):
        raise UsageError(f"Spark's views cannot name {root}: give its folder a name without a colon")
    if dialect == "duckdb":
        return _made(_duckdb(root), _IN_DUCKDB)
    return _made(_spark(root), _IN_SPARK)


def statements_over_tables(tables: Collection[str]) -> list[str]:
    """The statements that make `VIEWS` in DuckDB, temporary ones, over what a connection knows by the names
    `lake_packets`, `lake_manifests` and, where there are such rows, `lake_quarantine`."""
    sources = [f"CREATE OR REPLACE TEMPORARY VIEW packets AS SELECT {_COLUMNS}, day, kind FROM lake_packets"]
    sources += [
        f"CREATE OR REPLACE TEMPORARY VIEW {name} AS SELECT * FROM lake_{name}"
        for name in ("quarantine", "manifests") if f"lake_{name}" in tables
    ]  # fmt: skip
    return _made(sources, _IN_DUCKDB | {"temporary": "TEMPORARY "})


def _made(sources: list[str], words: Mapping[str, str]) -> list[str]:
    return [text.format(**words).strip() for text in (*sources, _BY_DAY, _AUTHORS, _LAG)]


def _duckdb(root: Path) -> list[str]:
    place = for_duckdb(root)

    def read(folder: str, depth: str) -> str:
        files = _quoted(f"{place}/{folder}/{depth}/*.parquet")
        options = "hive_partitioning = true, hive_types_autocast = false, union_by_name = true"
        return f"read_parquet({files}, {options})"

    made = [
        f"CREATE OR REPLACE VIEW packets AS SELECT {_COLUMNS}, day::DATE AS day, kind "
        f"FROM {read('packets', 'day=*/batch=*/kind=*')}"
    ]
    if _has_quarantine(root):
        made.append(
            "CREATE OR REPLACE VIEW quarantine AS SELECT * EXCLUDE (day, batch), day::DATE AS day "
            f"FROM {read('quarantine', 'day=*/batch=*')}"
        )
    manifests = _quoted(f"{place}/_manifests/*.json")
    made.append(f"CREATE OR REPLACE VIEW manifests AS SELECT * FROM read_json({manifests}, format = 'auto')")
    return made


def _spark(root: Path) -> list[str]:
    def source(name: str, kind: str, path: str, options: str = "", columns: str = "") -> str:
        # To Spark SQL a backslash escapes what follows.
        where = _quoted(f"{for_spark(root)}/{path}".replace("\\", "\\\\"), "\\'")
        return (
            f"CREATE OR REPLACE TEMPORARY VIEW {name}{columns} USING {kind} OPTIONS (path {where}{options})"
        )

    columns = _COLUMNS.replace("to_timestamp(", "timestamp_seconds(")
    made = [
        source("lake_packets", "parquet", "packets"),
        f"CREATE OR REPLACE TEMPORARY VIEW packets AS SELECT {columns}, CAST(day AS DATE) AS day, kind "
        "FROM lake_packets",
    ]
    if _has_quarantine(root):
        made.append(source("quarantine", "parquet", "quarantine"))
    # Where Spark finds the columns by itself it reads all manifests, and takes their names for patterns.
    options = ", multiLine 'true', pathGlobFilter '0*.json'"
    made.append(source("manifests", "json", "_manifests", options, f" ({_MANIFEST})"))
    return made


def _has_quarantine(root: Path) -> bool:
    return next((root / "quarantine").glob("day=*/batch=*/*.parquet"), None) is not None


def _quoted(text: str, quote: str = "''") -> str:
    # A brace would be a field of the text that is filled in later.
    return "'" + text.replace("'", quote).replace("{", "{{").replace("}", "}}") + "'"
