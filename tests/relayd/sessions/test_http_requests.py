"""Plain HTTP on the relay's port."""

from __future__ import annotations

import asyncio
import json
from typing import cast

import pytest

from relayd.http.api import HttpApi
from relayd.sessions.connection import Connection
from relayd.store.types import StoredPacket
from tests.relayd.sessions.connection_rig import (
    NOW,
    FakeTransport,
)


@pytest.mark.req("R-288", "R-292", "R-317")
@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({}, [b"200", b"200"]),
        ({"require_auth": ("subscribe",)}, [b"401", b"401"]),
        ({"require_auth": ("publish",)}, [b"200", b"200"]),
        ({"anonymous_subscribe_limit": 1}, [b"200", b"429"]),
        ({"anonymous_backfill_limit_bytes": 1}, [b"200", b"429"]),
    ],
)
async def test_a_packet_by_its_id_is_a_read_like_any_other(rigs, settings, statuses):
    rig = rigs(**settings)

    async def by_id(packet_id: bytes, now: int) -> StoredPacket:
        return StoredPacket(1, NOW, b"{}")

    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=by_id)
    for expected in statuses:
        asking, transport = Connection(rig.relay, api, "/strata"), FakeTransport()
        asking.socket.connection_made(cast(asyncio.Transport, transport))
        asking.socket.data_received(f"GET /packets/0x{'ab' * 32} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert asking._http_task is not None
        await asking._http_task
        assert transport.said_all
        assert transport.written.split()[1] == expected
        body = json.loads(transport.written.partition(b"\r\n\r\n")[2])
        assert ("packet" in body) is (expected == b"200")
        asking.socket.connection_lost(None)
