"""Counters of Tx and Rx for Prometheus, for programs that want them (T-100).

    from strata.txrx.metrics import TxRxMetrics
    metrics = TxRxMetrics()            # on prometheus-client's own registry
    metrics.watch(tx)
    metrics.watch(rx)

The collector reads the counters at each scrape, so watching costs an end nothing. It needs prometheus-client
(`pip install "strata-sdk[metrics]"`).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from strata.txrx.ends import Rx, Tx

__all__ = ["TxRxMetrics"]

M = TypeVar("M")

_TX_COUNTERS = {
    "messages_posted": "Messages that a Tx took.",
    "messages_delivered": "Messages that the receiver's queue has.",
    "messages_returned": "Messages that came back undelivered.",
    "messages_refused": "Messages that were not taken: closed, too large, of a wrong type, or no room.",
    "frames_sent": "Frames written, again too.",
    "bytes_sent": "Bytes of frames written.",
    "retransmits": "Frames written again after a reconnection.",
    "connections": "Connections made.",
    "acks_received": "Acknowledgements received.",
    "ack_delay_seconds": "Age of the oldest message at each acknowledgement, summed up.",
}
_RX_COUNTERS = {
    "connections": "Connections accepted.",
    "sessions": "Sessions begun.",
    "frames_received": "Frames read.",
    "bytes_received": "Bytes read.",
    "messages_accepted": "Messages put into the queue.",
    "duplicates": "Messages that came again, and were left out.",
    "acks_sent": "Acknowledgements sent.",
    "rejects_sent": "Sessions ended by us.",
    "broken_connections": "Connections lost within a frame, or given up.",
    "queue_full": "How often a connection waited for room.",
}
_TX_GAUGES: dict[str, tuple[str, Callable[[Tx[Any]], float]]] = {
    "outbox": ("Messages that wait to be written.", lambda tx: tx.outbox_size),
    "unacked": ("Messages written and not acknowledged.", lambda tx: tx.unacked_size),
    "closed": ("Ends that are closed.", lambda tx: tx.status().value.closed),
}
_RX_GAUGES: dict[str, tuple[str, Callable[[Rx[Any]], float]]] = {
    "unread": ("Messages that wait to be received.", lambda rx: rx.unread),
}


class TxRxMetrics(Collector):
    """A collector of the watched ends, by address; the counters of ends with the same address are added up.

    A deleted end is removed from the sums. Prometheus treats the smaller sum as a restart of the counter.
    """

    def __init__(self, registry: CollectorRegistry | None = REGISTRY) -> None:
        self._tx: weakref.WeakSet[Tx[Any]] = weakref.WeakSet()
        self._rx: weakref.WeakSet[Rx[Any]] = weakref.WeakSet()
        if registry is not None:
            registry.register(self)

    def watch(self, end: Tx[M] | Rx[M]) -> None:
        """Include this end for as long as it exists."""
        if isinstance(end, Tx):
            self._tx.add(end)
        else:
            self._rx.add(end)

    def collect(self) -> Iterator[Metric]:
        """The metrics that Prometheus reads."""
        yield from _families("strata_channel_tx", self._tx, _TX_COUNTERS, _TX_GAUGES)
        yield from _families("strata_channel_rx", self._rx, _RX_COUNTERS, _RX_GAUGES)


def _families(
    prefix: str,
    ends: weakref.WeakSet[Any],
    counters: dict[str, str],
    gauges: dict[str, tuple[str, Callable[[Any], float]]],
) -> Iterator[Metric]:
    by_address: dict[str, list[Any]] = defaultdict(list)
    for end in ends:
        by_address[str(end.addr())].append(end)
    for name, told in counters.items():
        counter = CounterMetricFamily(f"{prefix}_{name}", told, labels=["address"])
        for address, those in sorted(by_address.items()):
            counter.add_metric([address], sum(getattr(end.statistics(), name) for end in those))
        yield counter
    for name, (told, read) in gauges.items():
        gauge = GaugeMetricFamily(f"{prefix}_{name}", told, labels=["address"])
        for address, those in sorted(by_address.items()):
            gauge.add_metric([address], sum(map(read, those)))
        yield gauge
