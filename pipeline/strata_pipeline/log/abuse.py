"""Updates of the relay's abuse table: the only place where a report writes to the database.

    GRANT SELECT, INSERT, UPDATE, DELETE ON abuse TO …

The rows of the pipeline are those whose reason begins with its prefix. All other rows belong to the operator
and are never changed or removed, not even expired ones. So an operator who wants the pipeline to leave an
author alone writes an expired row with any other reason.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from adbc_driver_postgresql import dbapi as adbc

from strata_pipeline.datasets.traffic import REASON_PREFIX
from strata_pipeline.errors import LogError
from strata_pipeline.log.database import connect, translate_errors

__all__ = ["load_abuse"]

# One statement, for all or nothing. JSON, because the driver cannot send arrays of text.
_LOAD = """
INSERT INTO abuse AS old (author_id, verdict, reason, expires_at)
SELECT author_id, verdict, reason, expires_at
FROM jsonb_to_recordset($1::jsonb) AS new (author_id text, verdict text, reason text, expires_at bigint)
ON CONFLICT (author_id) DO UPDATE SET verdict = excluded.verdict, reason = excluded.reason,
    expires_at = excluded.expires_at, created_at = excluded.created_at
WHERE starts_with(old.reason, $2)
"""
_REMOVE = "DELETE FROM abuse WHERE starts_with(reason, $1) AND expires_at < $2"


def load_abuse(url: str, rows: Sequence[Mapping[str, Any]], now: int) -> None:
    """Write the rows, and remove the pipeline's older rows that had expired by `now`. Idempotent.

    Raises `LogUnavailable`, and `LogError` if the role may not write or there is no such table.
    """
    # PostgreSQL's text cannot hold U+0000, and no valid DID contains it.
    kept = [dict(row) for row in rows if "\0" not in row["author_id"]]
    with contextlib.closing(connect(url)) as connection, translate_errors(), connection.cursor() as cursor:
        try:
            cursor.execute("SET default_transaction_read_only = off")
            if kept:
                cursor.execute(_LOAD, (json.dumps(kept), REASON_PREFIX))
            cursor.execute(_REMOVE, (REASON_PREFIX, now))
        except adbc.ProgrammingError as error:
            if getattr(error, "sqlstate", None) in ("42501", "42P01", "25006"):
                raise LogError(
                    "the abuse table cannot be written: it takes the relay's primary database, and a role "
                    "with GRANT SELECT, INSERT, UPDATE, DELETE ON abuse"
                ) from error
            raise
