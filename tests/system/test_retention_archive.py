"""A relay that keeps its days until they are archived, as an operator sees it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from strata_pipeline.lake_format import GENESIS, Manifest, RowsDigest, encode, seal

from relayd.store import Store, migrate
from tests.support.made_packets import make, new_identity
from tests.support.relay_process import PostgresHost, RelayProcess, running
from tests.support.stored_packets import as_stored
from tests.support.waiting import wait_until

DAY = 86_400


def waiting(relay: RelayProcess) -> dict[str, float]:
    """The number of waiting days, by reason."""
    body = relay.get("/metrics")[2].decode()
    found = re.findall(r'^relayd_retention_waiting_days{reason="(.*)"} (.*)$', body, re.M)
    return {reason: float(days) for reason, days in found if float(days)}


async def manifest_of(url: str, up_to: int) -> bytes:
    """The manifest that the archive would have written for the first day."""
    connection = await asyncpg.connect(url)
    rows = await connection.fetch(
        "SELECT sequence, received_at, packet_id FROM packets WHERE sequence <= $1 ORDER BY sequence", up_to
    )
    await connection.close()
    digest = RowsDigest()
    digest.update(tuple(row) for row in rows)
    sequence, received_at, packet_id = rows[-1]
    return encode(
        seal(
            Manifest(
                number=0,
                after=0,
                up_to=sequence,
                packets=len(rows),
                quarantined=0,
                rows=digest.hexdigest(),
                contents="",
                body_bytes=0,
                kinds={},
                last_packet_id=packet_id.hex(),
                last_received_at=received_at,
                written_at=received_at,
                previous=GENESIS,
            )
        )
    )


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_day_goes_once_the_archive_has_it(tmp_path: Path, workers: int):
    host = PostgresHost(tmp_path / "postgres")
    manifests = tmp_path / "lake" / "_manifests"
    settings: dict[str, Any] = {
        "database_url": host.url,
        "workers": workers,
        "retention_days": 1,
        "retention_requires_archive": "true",
        "archive_manifests": manifests,
    }
    try:
        identity = new_identity()
        old, later = make(identity, "old"), make(identity, "later")
        await migrate(host.url)
        async with await Store.open(host.url) as store:
            places = await store.append([as_stored(old)], int(time.time()) - 3 * DAY)
            await store.append([as_stored(later)], int(time.time()))
        with running(RelayProcess(tmp_path, **settings)) as relay:
            wait_until(lambda: waiting(relay), "a day waits", 30.0)
            assert waiting(relay) == {"unreadable": 1}
            assert relay.get(f"/packets/{old.packet_id}")[0] == 200
            assert relay.stop() == 0
        said = [json.loads(line) for line in relay.log.read_text().splitlines()]
        warnings = [line for line in said if line["event"] == "retention_waits_for_archive"]
        assert warnings
        assert str(manifests) in warnings[0]["problem"]
        manifests.mkdir(parents=True)
        manifest = await manifest_of(host.url, places.dispositions[0].sequence)
        (manifests / f"{0:010}.json").write_bytes(manifest)
        with running(RelayProcess(tmp_path, **settings)) as relay:
            wait_until(lambda: relay.get(f"/packets/{old.packet_id}")[0] == 410, "the day goes", 30.0)
            assert relay.get(f"/packets/{later.packet_id}")[0] == 200
            assert waiting(relay) == {}
            assert relay.stop() == 0
    finally:
        host.close()
