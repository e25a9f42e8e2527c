"""`strata-pipeline views`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from strata_pipeline.cli.app import Json, LakePlace, failures_told, say
from strata_pipeline.errors import UsageError
from strata_pipeline.lake.stores.schemes import is_object_place

__all__ = ["views_command"]


class _Dialect(StrEnum):
    DUCKDB = "duckdb"
    SPARK = "spark"


def views_command(
    lake: LakePlace,
    dialect: Annotated[
        _Dialect, typer.Option("--dialect", help="Whose SQL: that of DuckDB, or of Spark.")
    ] = _Dialect.DUCKDB,
    database: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Make the views in this database of DuckDB, instead of printing them.",
            dir_okay=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print the SQL of a lake's views, or make them in DuckDB.

    The views are packets, quarantine, manifests, packets_by_day, authors_by_day and lag_by_day, and in DuckDB
    files. They name the lake's folders and copy nothing. For Spark, write the output to a file and run
    spark-sql -i. The views of a bucket name the objects that are valid when they are printed.
    """
    with failures_told():
        if database is not None and dialect is not _Dialect.DUCKDB:
            raise UsageError("--database is a file of DuckDB: leave --dialect out")
        if database is not None and is_object_place(lake):
            raise UsageError(
                f"--database: views of {lake} take DuckDB's extension httpfs. Print them, and give them to a "
                "DuckDB that has it (docs/guides/pipeline.md)"
            )
        made = _statements(lake, dialect)
        if database is None:
            say("\n\n".join(f"{text};" for text in made), json, event="views", statements=made)
            return
        _make(made, database)
    say(f"made {len(made)} views in {database}", json, event="views", database=str(database), views=len(made))


def _statements(place: str, dialect: _Dialect) -> list[str]:
    from strata_pipeline.lake.object_lake import ObjectLake
    from strata_pipeline.lake.places import open_lake
    from strata_pipeline.views import Objects, statements, statements_over_objects

    lake = open_lake(place)
    if isinstance(lake, ObjectLake):
        packets, quarantine = (
            [one.name for day in lake.days() for one in lake.objects_of_day(day, root)]
            for root in ("packets", "quarantine")
        )
        told = Objects(lake.place, packets, quarantine, lake.chain.end.number)
        return statements_over_objects(told, dialect.value)
    if not lake.chain.end.number:
        raise UsageError(f"{place} holds no lake yet: begin with strata-pipeline archive")
    return statements(place, dialect.value)


def _make(made: list[str], database: Path) -> None:
    try:
        import duckdb
    except ModuleNotFoundError:
        raise UsageError("--database needs DuckDB: pip install duckdb") from None
    try:
        with duckdb.connect(database) as connection:
            for text in made:
                connection.execute(text)
    except duckdb.Error as error:
        raise UsageError(f"{database}: {error}") from None
