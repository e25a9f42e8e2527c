"""A writer killed at any point: what it confirmed is stored, and nothing is stored in part (C-255, C-257)."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from strata.channels.persistence import ParticipantKey, SqlitePersistence, StoredState

from tests.support.short_lives import ShortLife, short_lives

ALICE = ParticipantKey("room", "alice")

# Batch n puts parts n.0 … n.4, removes those of batch n-3, and raises the clock to n. The writer prints
# what is confirmed and starts the next batches without waiting, so the kill interrupts some of them.
WRITER = """
import asyncio
from strata.channels.persistence import ParticipantKey, Put, Raise, Remove, SqlitePersistence

ALICE = ParticipantKey("room", "alice")

async def write(store, n):
    changes = [Put("log", f"{n}.{part}", str(n).encode() * 500) for part in range(5)]
    changes += [Remove("log", f"{n - 3}.{part}") for part in range(5)]
    await store.apply(ALICE, [*changes, Raise("lamport", n)])
    print(n, flush=True)

async def write_all(path, n):
    store = await SqlitePersistence.open(path)
    while True:
        await asyncio.gather(*(write(store, n + ahead) for ahead in range(4)))
        n += 4

def main(path, first):
    asyncio.run(write_all(path, first))
"""


def run_and_kill(start: Callable[..., ShortLife], path: Path, first: int, confirmations: int) -> int:
    """Start a writer, kill it after this many confirmed batches, and return the last batch confirmed."""
    writer = start(str(path), first)
    confirmed = [int(writer.line()) for _ in range(confirmations)]
    confirmed += map(int, writer.kill())
    assert writer.code == -signal.SIGKILL
    return max(confirmed)


def assert_whole(state: StoredState, confirmed: int) -> int:
    """Check that the state is that after the last confirmed batch or a later one, and return that batch."""
    last = state.counters["lamport"]
    assert last >= confirmed
    expected = {f"{n}.{part}" for n in range(last - 2, last + 1) for part in range(5) if n >= 0}
    assert set(state.records["log"]) == expected
    assert all(value == key.partition(".")[0].encode() * 500 for key, value in state.records["log"].items())
    return last


@pytest.mark.req("C-255", "C-257")
async def test_kill_at_any_point(tmp_path: Path) -> None:
    moments = random.Random(4)
    path = tmp_path / "channels.db"
    last = -1
    with short_lives(WRITER) as start:
        for _ in range(20):
            confirmed = run_and_kill(start, path, last + 1, moments.randrange(1, 60))
            # Opened at once: a killed process holds no lock.
            store = await SqlitePersistence.open(path)
            last = assert_whole(await store.load(ALICE), confirmed)
            await store.close()
    assert last > 20
