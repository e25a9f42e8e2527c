"""Fixtures that several folders share."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relayd.store import NewPacket

NOW = 1_790_000_000


@pytest.fixture(scope="session")
def packet() -> Callable[..., NewPacket]:
    """Make a packet; `packet(7)` is always the same one."""

    def make(
        number: int,
        *,
        author: str = "did:strata:alice",
        type: str = "TEXT",
        timestamp: int = NOW,
        expires_at: int | None = None,
        size: int = 40,
    ) -> NewPacket:
        packet_id = hashlib.sha256(b"%d" % number).digest()
        body = (b"%d:" % number).ljust(size, b".")
        return NewPacket(packet_id, author, type, timestamp, expires_at, body)

    return make


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Wait for something that another process or the server does; the test fails if it never happens."""

    async def wait(condition: Callable[[], Any], timeout: float = 20.0) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return result
            assert time.monotonic() < deadline, "it never happened"
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], Path]:
    """Write a settings file."""

    def write(text: str) -> Path:
        path = tmp_path / "relayd.toml"
        path.write_text(text)
        return path

    return write
