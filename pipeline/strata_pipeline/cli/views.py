"""`strata-pipeline views`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from strata_pipeline.cli.app import Json, LakeFolder, failures_told, say
from strata_pipeline.errors import UsageError

__all__ = ["views_command"]


class _Dialect(StrEnum):
    DUCKDB = "duckdb"
    SPARK = "spark"


def views_command(
    lake: LakeFolder,
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

    The views are packets, quarantine, manifests, packets_by_day, authors_by_day and lag_by_day. They name the
    lake's folders and copy nothing. For Spark: spark-sql -i with the output in a file.
    """
    from strata_pipeline.lake.lake import Lake
    from strata_pipeline.views import statements

    with failures_told():
        if database is not None and dialect is not _Dialect.DUCKDB:
            raise UsageError("--database is a file of DuckDB: leave --dialect out")
        if not Lake.open(lake).chain.end.number:
            raise UsageError(f"{lake} holds no lake yet: begin with strata-pipeline archive")
        made = statements(lake, dialect.value)
        if database is None:
            say("\n\n".join(f"{text};" for text in made), json, event="views", statements=made)
            return
        _make(made, database)
    say(f"made {len(made)} views in {database}", json, event="views", database=str(database), views=len(made))


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
