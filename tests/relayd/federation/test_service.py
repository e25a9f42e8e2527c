"""What reading from peers reports before it has read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from strata.protocol.ids import Identity

from relayd.federation.mesh import Mesh
from relayd.federation.peers_file import Upstream
from relayd.federation.service import Federation
from relayd.metrics import Metrics
from relayd.store.peers import PeerComparison, PeerRow
from relayd.store.types import StoreUnavailable

PEER = Upstream("wss://peer", "did:strata:zPeer")


def federation(metrics: Metrics) -> Federation:
    nothing: Any = None
    return Federation(
        [PEER],
        {PEER.relay_id: 1},
        url="postgresql://",
        identity=Identity.generate(),
        store=nothing,
        admission=nothing,
        metrics=metrics,
        faults=nothing,
        clock=lambda: 0,
        max_backfill_seconds=0,
        reconcile_interval=0,
        reconcile_max_items=1,
    )


def test_what_comparisons_find_is_counted_from_zero():
    """The first packets that a peer withholds are an increase to the alert RelayPeerWithholds."""
    metrics = Metrics()
    federation(metrics)
    line = b'relayd_peer_differences_total{kind="withheld",peer="did:strata:zPeer"} 0.0'
    assert line in metrics.render()[1]


class Table:
    """Stores refusals, except the first time, when the database is away."""

    def __init__(self) -> None:
        self.skipped: list[tuple[bytes, int, str]] = []
        self.is_away = True
        self.meanwhile: Callable[[], None] = lambda: None
        self.looks = asyncio.Event()
        self.is_slow = False
        """The next write does not finish by itself."""
        self.states: list[str] = []

    async def take_lead(self) -> bool:
        return True

    async def rows(self) -> list[PeerRow]:
        self.looks.set()
        return []

    async def comparisons(self) -> dict[int, PeerComparison]:
        return {}

    async def close(self) -> None:
        pass

    async def conduct(self, peer_id: int) -> str | None:
        return None

    async def report(self, peer_id: int, state: str, problem: str | None, now: int) -> None:
        self.states.append(state)

    async def skip(self, peer_id: int, skips: Sequence[tuple[bytes, int, str]], most: int) -> None:
        self.meanwhile()
        if self.is_slow:
            self.is_slow = False
            await asyncio.Event().wait()
        if self.is_away:
            raise StoreUnavailable("the connection for peers was lost")
        self.skipped += skips


async def test_refusals_outlast_a_database_that_is_away():
    """They are behind the cursor: a comparison would request forgotten ones from the peer again."""
    reading, table = federation(Metrics()), Table()
    reading._table = cast(Any, table)
    refused = reading._reports(PEER, 1).skipped
    for number in range(20_000):
        refused(number.to_bytes(32), number, "policy_rejected")
    table.meanwhile = lambda: refused(b"m" * 32, 20_000, "policy_rejected")
    with pytest.raises(StoreUnavailable):
        await reading._write_down()
    table.is_away, table.meanwhile = False, lambda: None
    await reading._write_down()
    assert [at for _, at, _ in table.skipped] == [*range(19_999), 20_000]
    await reading._write_down()
    assert len(table.skipped) == 20_000


async def test_a_peer_may_begin_to_be_read_while_refusals_of_another_are_written_down():
    reading, table = federation(Metrics()), Table()
    reading._table = cast(Any, table)
    table.is_away = False
    other = Upstream("wss://other", "did:strata:zOther")
    table.meanwhile = lambda: cast(None, reading._reports(other, 2))
    reading._reports(PEER, 1).skipped(b"l" * 32, 7, "policy_rejected")
    await reading._write_down()
    assert table.skipped == [(b"l" * 32, 7, "policy_rejected")]


@pytest.mark.parametrize("amid_a_write", [False, True])
async def test_refusals_of_the_last_moment_are_written_down_at_a_stop(amid_a_write):
    reading, table = federation(Metrics()), Table()
    reading._table = cast(Any, table)
    table.is_away, table.is_slow = False, amid_a_write
    refused = reading._reports(PEER, 1).skipped
    if amid_a_write:
        refused(b"l" * 32, 7, "policy_rejected")
    running = asyncio.create_task(reading.run())
    await table.looks.wait()
    await asyncio.sleep(0)
    if not amid_a_write:
        refused(b"l" * 32, 7, "policy_rejected")
    assert table.skipped == []
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert table.skipped == [(b"l" * 32, 7, "policy_rejected")]


@pytest.mark.parametrize(
    ("changes", "state"),
    [({"fence": 2}, "reset"), ({"paused": True}, "paused"), ({"barred_until": 100}, "barred")],
)
async def test_why_a_link_was_stopped_is_told(monkeypatch, changes, state):
    """A link that must read its peer's log again is not barred."""
    reading, table = federation(Metrics()), Table()
    reading._table = cast(Any, table)

    async def keep(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(reading, "_keep", keep)
    reading._links[1] = cast(Any, SimpleNamespace(fence=1))
    reading._tasks[1] = asyncio.create_task(keep())
    row = PeerRow(1, PEER.relay_id, PEER.url, False, 1, 0, 0, 0, "connected", 0, None, None, 0, False)
    await reading._look_after(
        PEER, row._replace(**changes), Mesh("did:strata:zOwn", {PEER.relay_id: ""}, 0.0)
    )
    assert table.states == [state]
    await reading._stop_all()
