"""The start of a relay whose log has a million identities: how soon it serves, and how well meanwhile.

The identities are rows that SQL makes: they are not signed, and nobody asks for them. A start reads their
names as it reads those of real identities.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import asyncpg

from benches.bare import round_trips
from benches.daemon import RelayProcess
from benches.load import Load, make_load
from benches.measures import Measure, Plan, Progress, percentile
from benches.peer import BenchError, Publisher, connect_peers
from relayd.postgres import EmbeddedPostgres
from relayd.store.migrate import migrate

__all__ = ["measure"]

_READY_TARGET: Final = 60.0
_ROWS: Final = 100_000
"""Rows made by one statement."""
_PUBLISHES: Final = 200
"""Publishes in a row while names are being read, and again afterwards."""
_LOOK_SECONDS: Final = 0.05
_DID: Final = "did:strata:z6Mk0000000000000000000000000000000000000000{:08}"

_MAKE: Final = """
WITH made AS (
    SELECT ($1::bigint << 32) + n AS sequence, sha256(int8send(n)) AS packet_id,
           convert_to('did:strata:z6Mk' || lpad(n::text, 44, '0'), 'UTF8') AS author_id
    FROM generate_series($2::bigint, $3::bigint) AS n
), ids AS (
    INSERT INTO packet_ids SELECT packet_id, sequence, $1 * 86400 FROM made
)
INSERT INTO packets (sequence, received_at, "timestamp", packet_id, author_id, content_type, body)
SELECT sequence, $1 * 86400, $1 * 86400, packet_id, author_id, 'KEY_EVENT'::bytea,
       convert_to('{"author_id":"', 'UTF8') || author_id || convert_to('"}' || repeat(' ', 400), 'UTF8')
FROM made
"""
_HEAD: Final = """
UPDATE log_head SET last_sequence = ($1::bigint << 32) + $2, last_received_at = $1 * 86400,
                    last_identity_sequence = ($1::bigint << 32) + $2
"""


async def measure(plan: Plan, progress: Progress, serve: str | None) -> list[Measure]:
    """One start on an empty log, and one on a log of `plan.opening_identities`."""
    count = plan.opening_identities
    load = make_load(3 * _PUBLISHES, progress)
    async with _server() as url:
        started = time.perf_counter()
        with RelayProcess(serve, {"database_url": url}) as relay:
            empty_ready = time.perf_counter() - started
            await _publish(relay, load.take(0, _PUBLISHES))
            empty_bytes = relay.resident_bytes()
    async with _server() as url:
        await _fill(url, count, progress)
        started = time.perf_counter()
        with RelayProcess(serve, {"database_url": url}) as relay:
            ready = time.perf_counter() - started
            knowing = asyncio.create_task(_until_known(relay, 6 * plan.timeout))
            meanwhile = await _publish(relay, load.take(_PUBLISHES, _PUBLISHES))
            was_meanwhile = not knowing.done()
            progress(f"opening: ready after {ready:.1f} s, p50 {percentile(meanwhile, 0.5) * 1e3:.2f} ms")
            known = await knowing - started
            afterwards = await _publish(relay, load.take(2 * _PUBLISHES, _PUBLISHES))
            grown_bytes = relay.resident_bytes() - empty_bytes
    progress(f"opening: all known after {known:.1f} s")
    return [
        Measure(
            "opening",
            "ready line",
            ready,
            "s",
            _READY_TARGET,
            at_most=True,
            limit=empty_ready,
            limit_name="an empty log",
            details={"identities": count},
        ),
        Measure(
            "opening",
            "all identities known",
            known,
            "s",
            limit=ready,
            limit_name="the ready line",
            details={"names/s": count / known},
        ),
        Measure(
            "opening",
            "PUBLISH to OK right after the ready line, p50",
            percentile(meanwhile, 0.5) * 1e3,
            "ms",
            limit=percentile(afterwards, 0.5) * 1e3,
            limit_name="with all of them known",
            details={"while they were read": was_meanwhile, "worst ms": meanwhile[-1] * 1e3},
        ),
        Measure(
            "opening",
            "memory of an identity",
            max(grown_bytes, 1) / count,
            "bytes",
            limit=float(len(_DID.format(0))),
            limit_name="its DID",
        ),
    ]


@contextlib.asynccontextmanager
async def _server() -> AsyncIterator[str]:
    """The URL of a migrated database on a fresh server, which is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="relayd-bench-"))
    try:
        async with EmbeddedPostgres(folder) as server:
            await migrate(server.url)
            yield server.url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _fill(url: str, count: int, progress: Progress) -> None:
    """Give the log `count` authors with a KEY_EVENT each, all of one day."""
    session = await asyncpg.connect(url)
    try:
        day = int(time.time()) // 86_400 - 1
        await session.execute("SELECT relay_add_day($1)", day)
        for first in range(1, count + 1, _ROWS):
            last = min(first + _ROWS - 1, count)
            await session.execute(_MAKE, day, first, last)
            if last % (10 * _ROWS) == 0:
                progress(f"opening: {last:,} identities made")
        await session.execute(_HEAD, day, count)
        await session.execute("VACUUM ANALYZE")
    finally:
        await session.close()


async def _publish(relay: RelayProcess, load: Load) -> list[float]:
    """Publish one packet after another; return the seconds of each, sorted."""
    [peer] = await connect_peers(relay.ws_url, 1, Publisher)
    times = await round_trips(peer, load.frames)
    peer.close()
    return times


async def _until_known(relay: RelayProcess, timeout: float) -> float:
    """Wait until the relay has read all names; return the time. Raises `BenchError` after `timeout`."""
    deadline = time.monotonic() + timeout
    while not relay.has_logged("identities_known"):
        if time.monotonic() > deadline:
            raise BenchError("the relay did not learn its identities")
        await asyncio.sleep(_LOOK_SECONDS)
    return time.perf_counter()
