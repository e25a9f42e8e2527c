"""A lake as a plain reader of Parquet sees it, and SQL without the relay's knowledge."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import asyncpg
import pyarrow as pa
import pyarrow.dataset as pads

__all__ = ["DAY", "NOON", "bodies", "plain", "sql"]

DAY = 86_400
NOON = 20_000 * DAY + DAY // 2


def sql(url: str, *statements: str) -> None:
    """Run statements in a database."""

    async def run() -> None:
        connection = await asyncpg.connect(url)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(run())


def plain(lake: Path) -> pa.Table:
    """The lake as seen by a reader of Parquet that knows nothing of manifests."""
    return pads.dataset(lake / "packets", partitioning="hive").to_table().sort_by("sequence")


def bodies(lake: Path) -> list[bytes]:
    """The packets' bytes, in log order."""
    return cast("list[bytes]", plain(lake)["body"].to_pylist())
