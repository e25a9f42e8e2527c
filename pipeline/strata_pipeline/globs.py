"""Paths escaped for Spark and DuckDB, both of which read a path as a pattern. No I/O."""

from __future__ import annotations

import re
from pathlib import Path

from strata_pipeline.errors import UsageError

__all__ = ["for_duckdb", "for_spark"]

_OF_HADOOP = re.compile(r"[\\{}\[\]*?]")
_OF_DUCKDB = re.compile(r"[\[*?]")


def for_spark(path: Path) -> str:
    """A pattern that matches only this path, for Spark's readers. Its writers do not read patterns.

    Raises `UsageError` for a colon in a path that needs escaping: Spark takes it for the end of a scheme.
    """
    text = str(path)
    if ":" in text and _OF_HADOOP.search(text):
        raise UsageError(
            f"Spark cannot read {text}: there is a colon in it beside one of \\{{}}[]*?. Rename the folder"
        )
    return _OF_HADOOP.sub(r"\\\g<0>", text)


def for_duckdb(path: Path) -> str:
    """A pattern that matches only this path, for DuckDB's functions.

    Raises `UsageError` for a backslash, which DuckDB takes for a slash.
    """
    text = str(path)
    if "\\" in text:
        raise UsageError(f"DuckDB cannot read {text}: there is a backslash in it. Rename the folder")
    return _OF_DUCKDB.sub(r"[\g<0>]", text)
