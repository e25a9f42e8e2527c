"""`python -m tests.support.postgres_program FOLDER`: an embedded PostgreSQL, until standard input ends."""

from __future__ import annotations

import asyncio
import sys

from relayd.postgres import EmbeddedPostgres

__all__ = ["main"]


async def main() -> None:
    """Print its URL, and wait."""
    async with EmbeddedPostgres(sys.argv[1]) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
