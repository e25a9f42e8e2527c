"""What Prometheus reads about channels, when metrics are requested."""

from __future__ import annotations

import gc

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from strata.txrx import dial, serve
from strata.txrx.metrics import TxRxMetrics


@pytest.mark.req("T-100")
async def test_the_figures_of_watched_ends_are_scraped() -> None:
    registry = CollectorRegistry()
    metrics = TxRxMetrics(registry)
    address, rx = await serve("tcp:127.0.0.1:0", bytes)
    async with rx, await dial(address, bytes) as tx, await dial(address, bytes) as other:
        for end in (tx, other, rx):
            metrics.watch(end)
        for _ in range(3):
            await tx.send(b"message")
        await other.send(b"message")
        await rx.recv()

        def value(name: str) -> float | None:
            return registry.get_sample_value(f"strata_channel_{name}", {"address": str(address)})

        assert value("tx_messages_posted_total") == value("tx_messages_delivered_total") == 4
        assert value("tx_frames_sent_total") == value("rx_frames_received_total") == 4
        assert value("rx_bytes_received_total") == 2 * 13 + 4 * 31
        assert value("tx_bytes_sent_total") == 4 * 31
        assert value("rx_messages_accepted_total") == 4 and value("rx_unread") == 3
        assert (
            value("tx_retransmits_total") == value("rx_duplicates_total") == value("rx_queue_full_total") == 0
        )
        assert (
            value("tx_connections_total") == value("rx_connections_total") == value("rx_sessions_total") == 2
        )
        assert value("tx_outbox") == value("tx_unacked") == value("tx_closed") == 0
        await other.close()
        assert value("tx_closed") == 1
        assert b"# HELP strata_channel_rx_queue_full_total" in generate_latest(registry)


async def test_watching_keeps_no_end_alive() -> None:
    registry = CollectorRegistry()
    metrics = TxRxMetrics(registry)
    address, rx = await serve("local:0", bytes)
    tx = await dial(address, bytes)
    metrics.watch(tx)
    await tx.close()
    del tx
    gc.collect()
    assert registry.get_sample_value("strata_channel_tx_closed", {"address": str(address)}) is None
    rx.close()
