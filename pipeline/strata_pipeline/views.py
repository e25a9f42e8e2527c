"""SQL views of a lake, for DuckDB and for Spark SQL. The only I/O is a look at which folders exist.

The views of a lake on a disk name folders. Those of a lake in a bucket name the objects that count, because
its folders also hold others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from strata_pipeline.errors import UsageError
from strata_pipeline.globs import for_duckdb, for_spark
from strata_pipeline.lake.day_links import GENERATIONS

__all__ = ["VIEWS", "Dialect", "Objects", "statements", "statements_over_objects", "statements_over_tables"]

Dialect = Literal["duckdb", "spark"]

VIEWS = ("files", "packets", "quarantine", "manifests", "packets_by_day", "authors_by_day", "lag_by_day")
"""`quarantine` exists only if the lake has quarantined rows, and `files` in DuckDB for a lake on a disk."""

# The timestamp of a packet may be a time that no calendar has: that of a key event may be any number. So may
# any value that somebody has written into the log.
_COLUMNS = (
    "sequence, received_at, "
    "CASE WHEN abs(received_at) < 9223372036854 THEN to_timestamp(received_at) END AS received, {timestamp}, "
    "CASE WHEN abs({timestamp}) < 9223372036854 THEN to_timestamp({timestamp}) END AS dated, "
    "expires_at, packet_id, author_id, content_type, size, body, annotation"
)

_MANIFEST: Mapping[str, str] = {
    "format": "INT",
    **dict.fromkeys(("number", "after", "up_to", "packets", "quarantined"), "BIGINT"),
    **dict.fromkeys(("rows", "contents", "witnesses"), "STRING"),
    "body_bytes": "BIGINT",
    "kinds": "MAP",
    "last_packet_id": "STRING",
    **dict.fromkeys(("last_received_at", "written_at"), "BIGINT"),
    **dict.fromkeys(("previous", "hash"), "STRING"),
}
"""The columns of a manifest. To infer them, Spark would read all manifests, and DuckDB reads only the first
few: it would not see what later ones have, a kind of packets for example."""
_MANIFESTS = f"{'[0-9]' * 10}.json"
"""Their names, as a pattern."""

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


_NEEDED: Mapping[Dialect, str] = {
    "duckdb": "DuckDB needs its extension httpfs, and a secret of type s3.",
    "spark": "Spark needs hadoop-aws, and the keys of the bucket.",
}


def statements(lake: str | Path, dialect: Dialect = "duckdb") -> list[str]:
    """The statements that create `VIEWS`: permanent ones in DuckDB, temporary ones in Spark.

    The views name folders, so they also show what the lake gains later. A session of DuckDB that sets its
    variable `lake_files` to the list of `files` keeps to these, and can finish beside a compaction. Raises
    `UsageError` for a path that the dialect cannot name (Spark's views take a colon for the end of a scheme,
    and DuckDB a backslash for a slash), and for a lake without packets, because neither creates a view over
    no files.
    """
    root = Path(str(lake).removeprefix("file://")).absolute()
    if dialect == "spark" and ":" in str(root):
        raise UsageError(f"Spark's views cannot name {root}: give its folder a name without a colon")
    made = _made(_duckdb(root), _IN_DUCKDB) if dialect == "duckdb" else _made(_spark(root), _IN_SPARK)
    if next(root.glob("packets/day=*/batch=*/kind=*/*.parquet"), None) is None:
        raise _without_packets(root)
    return made


class Objects(NamedTuple):
    """The objects that count in a lake in a bucket."""

    place: str
    """`s3://bucket/prefix`."""
    packets: Sequence[str]
    """The names of objects below that place."""
    quarantine: Sequence[str]
    manifests: int
    """The number of manifests."""


def statements_over_objects(told: Objects, dialect: Dialect = "duckdb") -> list[str]:
    """The statements that create `VIEWS` over these objects of a lake in a bucket, as `statements` does.

    The first statement begins with a comment that says so, and what the views need. Raises `UsageError` for a
    lake without packets.
    """
    if not told.packets:
        raise _without_packets(told.place)
    if dialect == "duckdb":
        made = _made(_duckdb_of_objects(told), _IN_DUCKDB)
    else:
        made = _made(_spark_of_objects(told), _IN_SPARK)
    return [
        f"-- {told.place} as it was when this was printed, up to manifest {told.manifests - 1}: print it\n"
        "-- anew for what came since. Objects that compact and erase replace are deleted after a grace, and\n"
        f"-- a query is an error then. {_NEEDED[dialect]}\n{made[0]}",
        *made[1:],
    ]


def statements_over_tables(tables: Collection[str]) -> list[str]:
    """The statements that create temporary `VIEWS` in DuckDB over tables that a connection knows as
    `lake_packets`, `lake_manifests` and, if there are quarantined rows, `lake_quarantine`."""
    sources = [f"CREATE OR REPLACE TEMPORARY VIEW packets AS SELECT {_COLUMNS}, day, kind FROM lake_packets"]
    sources += [
        f"CREATE OR REPLACE TEMPORARY VIEW {name} AS SELECT * FROM lake_{name}"
        for name in ("quarantine", "manifests") if f"lake_{name}" in tables
    ]  # fmt: skip
    return _made(sources, _IN_DUCKDB | {"temporary": "TEMPORARY "})


def _without_packets(place: object) -> UsageError:
    return UsageError(f"{place} holds no packets yet, and views need some")


def _made(sources: list[str], words: Mapping[str, str]) -> list[str]:
    return [text.format(**words).strip() for text in (*sources, _BY_DAY, _AUTHORS, _LAG)]


def _duckdb(root: Path) -> list[str]:
    place = for_duckdb(root)
    aside = _quoted(f"{place}/quarantine/day=*/batch=*/*.parquet") if _has_quarantine(root) else ""
    current = _quoted(f"{place}/packets/day=*/batch=*/kind=*/*.parquet")
    packets = f"coalesce(getvariable('lake_files'), [{current}])"
    return [_files(root, place), *_in_duckdb(packets, aside, place)]


def _files(root: Path, place: str) -> str:
    """The view of files that stay while a session reads them: of each day, those of its newest link."""
    when, day = "split_part(file, '/', -4)", "split_part(file, '/', -5)"
    return (
        "CREATE OR REPLACE VIEW files "
        f"AS SELECT {_quoted(place)} || substr(file, {len(str(root)) + 1}) AS file FROM glob("
        f"{_quoted(f'{place}/{GENERATIONS}/day=*/*/batch=*/kind=*/*.parquet')}) "
        f"QUALIFY {when} = max({when}) OVER (PARTITION BY {day})"
    )


def _duckdb_of_objects(told: Objects) -> list[str]:
    packets, aside = (_listed(told.place, names) for names in (told.packets, told.quarantine))
    # Manifests are never replaced, but more will follow.
    return _in_duckdb(packets, aside, told.place, f" WHERE number < {told.manifests}")


def _listed(place: str, names: Sequence[str]) -> str:
    files = ",\n  ".join(_quoted(f"{place}/{name}") for name in names)
    return f"[\n  {files}\n]" if names else ""


def _in_duckdb(packets: str, aside: str, place: str, of_manifests: str = "") -> list[str]:
    """Views over these files, named as DuckDB's functions take them; `aside` is empty if there are none."""
    options = "hive_partitioning = true, hive_types_autocast = false, union_by_name = true"
    made = [
        f"CREATE OR REPLACE VIEW packets AS SELECT {_COLUMNS}, day::DATE AS day, kind "
        f"FROM read_parquet({packets}, {options})"
    ]
    if aside:
        made.append(
            "CREATE OR REPLACE VIEW quarantine AS SELECT * EXCLUDE (day, batch), day::DATE AS day "
            f"FROM read_parquet({aside}, {options})"
        )
    manifests = _quoted(f"{place}/_manifests/{_MANIFESTS}")
    columns = ", ".join(
        f"{name}: '{'MAP(VARCHAR, BIGINT)' if kind == 'MAP' else kind}'" for name, kind in _MANIFEST.items()
    )
    made.append(
        "CREATE OR REPLACE VIEW manifests AS SELECT * "
        f"FROM read_json({manifests}, format = 'auto', columns = {{{{{columns}}}}}){of_manifests}"
    )
    return made


def _spark(root: Path) -> list[str]:
    place = for_spark(root)
    aside = f"{place}/quarantine" if _has_quarantine(root) else ""
    return _in_spark(f"{place}/packets", aside, f"{place}/_manifests")


def _spark_of_objects(told: Objects) -> list[str]:
    place = told.place.replace("s3://", "s3a://", 1)
    packets, aside = (_alternatives(place, names) for names in (told.packets, told.quarantine))
    folders = {"packets": f"{place}/packets", "quarantine": f"{place}/quarantine"}
    return _in_spark(packets, aside, f"{place}/_manifests", folders, f" WHERE number < {told.manifests}")


def _alternatives(place: str, names: Sequence[str]) -> str:
    """A pattern that matches these objects and no others."""
    return f"{place}/{{{','.join(names)}}}" if names else ""


def _in_spark(
    packets: str, aside: str, manifests: str, folders: Mapping[str, str] | None = None, of_manifests: str = ""
) -> list[str]:
    """Views over these paths, which are patterns; `aside` is empty if there are none. `folders` are given if
    the paths name files: the folders of these."""

    def source(name: str, kind: str, path: str, columns: str = "", **options: str) -> str:
        told = ", ".join(
            f"{key} {_in_spark_quoted(value)}" for key, value in {"path": path, **options}.items()
        )
        return f"CREATE OR REPLACE TEMPORARY VIEW {name}{columns} USING {kind} OPTIONS ({told})"

    def below(name: str) -> dict[str, str]:
        return {} if folders is None else {"basePath": folders[name]}

    columns = _COLUMNS.replace("to_timestamp(", "timestamp_seconds(")
    made = [
        source("lake_packets", "parquet", packets, **below("packets")),
        f"CREATE OR REPLACE TEMPORARY VIEW packets AS SELECT {columns}, CAST(day AS DATE) AS day, kind "
        "FROM lake_packets",
    ]
    if aside:
        made.append(source("quarantine", "parquet", aside, **below("quarantine")))
    told = ", ".join(
        f"`{name}` {'MAP<STRING, BIGINT>' if kind == 'MAP' else kind}" for name, kind in _MANIFEST.items()
    )
    options = {"multiLine": "true", "pathGlobFilter": _MANIFESTS}
    name = "lake_manifests" if of_manifests else "manifests"
    made.append(source(name, "json", manifests, f" ({told})", **options))
    if of_manifests:
        made.append(
            f"CREATE OR REPLACE TEMPORARY VIEW manifests AS SELECT * FROM lake_manifests{of_manifests}"
        )
    return made


def _in_spark_quoted(text: str) -> str:
    # To Spark SQL a backslash escapes what follows.
    return _quoted(text.replace("\\", "\\\\"), "\\'")


def _has_quarantine(root: Path) -> bool:
    return next((root / "quarantine").glob("day=*/batch=*/*.parquet"), None) is not None


def _quoted(text: str, quote: str = "''") -> str:
    # A single brace would be a field for `str.format`, which is applied later.
    return "'" + text.replace("'", quote).replace("{", "{{").replace("}", "}}") + "'"
