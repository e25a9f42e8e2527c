"""The relay's metrics, for Prometheus.

One `Metrics` object holds every instrument in its own registry, so that tests and several relays in one
process do not interfere. Labels are bounded: each labelled counter is a mapping whose children exist from
the start, and an unknown value counts as `other`. So a peer can never create a series, and hot code pays one
dictionary lookup and one addition:

    metrics.publishes["accepted"].inc()
    metrics.messages_received[message_type].inc()

With several worker processes, every worker writes to files in one directory, and the worker that answers a
scrape adds them up. `share_between_processes` must then have run in the parent before any process makes its
`Metrics`. Counters outlive a worker that died, gauges do not. The counters of all dead workers are kept in
one file per kind, however many there were.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    multiprocess,
    values,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.registry import Collector
from strata.protocol.errors import ErrorCode

from relayd.faults import FAULT_PLACES
from relayd.version import VERSION

__all__ = [
    "AUTH_OUTCOMES",
    "CLOSE_REASONS",
    "MESSAGE_TYPES",
    "OTHER",
    "PUBLISH_OUTCOMES",
    "RATE_LIMITS",
    "READ_OUTCOMES",
    "RETENTION_REASONS",
    "WORKER_RESTARTS",
    "Counters",
    "LatencyHistogram",
    "Metrics",
    "SupervisorMetrics",
    "Tally",
    "forget_process",
    "share_between_processes",
]

OTHER = "other"
"""The label under which every unknown value is counted."""

MESSAGE_TYPES = ("SUBSCRIBE", "UNSUBSCRIBE", "PUBLISH", "AUTH", "MODERATE", "RECONCILE")
PUBLISH_OUTCOMES = ("accepted", "duplicate", *(code.value for code in ErrorCode))
READ_OUTCOMES = ("ok", "timeout", "unavailable", "cancelled")
RETENTION_REASONS = ("unreadable", "invalid", "behind", "differs")
"""Why retention waits for the archive: manifests unreadable, no valid chain, day not archived yet, or
archived rows that differ from the log."""
LOOP_PAUSES = ("collection", "reload")
"""What holds up the event loop besides work that peers cause."""
AUTH_OUTCOMES = ("ok", *(code.value for code in ErrorCode))
RATE_LIMITS = (
    "publish",
    "subscribe",
    "backfill",
    "auth",
    "connect",
    "memory",
    "pacing",
    "loop",
    "reconcile",
)
"""The limits that refuse requests, including those over plain HTTP. `connect` is only for plain HTTP: a
WebSocket that is turned away counts as a closed connection (`connection_rate`). `pacing` counts pages of
history that were sent later instead of refused, and `loop` counts messages that were read later; over plain
HTTP both count what was refused."""
CLOSE_REASONS = (
    "client",
    "going_away",
    "handshake",
    "too_many_connections",
    "address_limit",
    "connection_rate",
    "origin",
    "banned",
    "auth_failures",
    "withdrawn",
    "operator",
    "protocol_error",
    "too_large",
    "malformed",
    "refused",
    "control_frames",
    "memory",
    "ping_timeout",
    "slow_consumer",
    "lost",
    "internal_error",
)
"""Why a connection ended: from the peer closing it and the relay stopping, down to our own faults."""

WORKER_RESTARTS = ("died", "hung", "renewed")
"""Why a worker was restarted: it ended by itself, it no longer answered, or it was replaced on request."""

_DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_COUNTED = ("counter", "histogram")
_ENDED = "ended"
"""Replaces the process id in the names of the files that hold the counts of ended processes."""
_TRIES = 5
_LATENCY_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_STEP_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class LatencyHistogram(Histogram):
    """A histogram that takes several observations of one bucket at once."""

    def observe_counts(self, counts: Sequence[int], total: float) -> None:
        """Add `counts[i]` observations to bucket i, the last being +Inf, and `total` to the sum."""
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(total)


class Tally:
    """The counts of the hottest paths, as plain numbers, until `count` moves them into the metrics.

    An instrument costs a lock and a call, which is noticeable at a hundred thousand additions a second.
    """

    __slots__ = (
        "_latencies",
        "_seconds",
        "accepted",
        "bytes_received",
        "bytes_sent",
        "duplicates",
        "live_events",
        "publishes",
    )

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.publishes = self.accepted = self.duplicates = self.live_events = 0
        self.bytes_received = self.bytes_sent = 0
        self._seconds = 0.0
        self._latencies = [0] * (len(_LATENCY_BUCKETS) + 1)

    def answered(self, seconds: float, *, duplicate: bool) -> None:
        """Count a PUBLISH that was answered OK after this time."""
        if duplicate:
            self.duplicates += 1
        else:
            self.accepted += 1
        self._latencies[bisect_left(_LATENCY_BUCKETS, seconds)] += 1
        self._seconds += seconds

    def count(self, metrics: Metrics) -> None:
        """Move everything into the metrics and begin again from zero."""
        metrics.messages_received["PUBLISH"].inc(self.publishes)
        metrics.publishes["accepted"].inc(self.accepted)
        metrics.publishes["duplicate"].inc(self.duplicates)
        metrics.publish_seconds.observe_counts(self._latencies, self._seconds)
        metrics.events_sent["live"].inc(self.live_events)
        metrics.bytes_received.inc(self.bytes_received)
        metrics.bytes_sent.inc(self.bytes_sent)
        self._reset()


class Counters(dict[str, Counter]):
    """The children of one counter by the value of its only label; `OTHER` stands in for unknown values."""

    def __init__(
        self, registry: CollectorRegistry, name: str, doc: str, label: str, children: Iterable[str]
    ) -> None:
        family = Counter(name, doc, [label], registry=registry)
        super().__init__({value: family.labels(value) for value in (*children, OTHER)})

    def __missing__(self, value: str) -> Counter:
        return self[OTHER]


class Metrics:
    """Every instrument of one relay process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._directory = os.environ.get(_DIRECTORY_VARIABLE)
        self._processor: Counter | None = None
        self._processor_seconds = 0.0
        if self._directory is None:
            ProcessCollector(registry=registry)
        else:
            name = "process_cpu_seconds_total"
            self._processor = Counter(
                name, "Total user and system CPU time spent in seconds.", registry=registry
            )
        build_info = Gauge(
            "relayd_build_info",
            "The running version; always 1.",
            ["version"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        build_info.labels(VERSION).set(1)
        self.faults = Counters(
            registry,
            "relayd_faults_total",
            "Faults of the relay itself, by where they were caught; the log names each.",
            "place",
            FAULT_PLACES,
        )
        self.log_lines_dropped = _log_lines_dropped(registry)
        self.loop_lag_seconds = Histogram(
            "relayd_loop_lag_seconds",
            "How late the event loop ran, sampled a hundred times a second.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.loop_longest_step_seconds = _gauge(
            registry,
            "relayd_loop_longest_step_seconds",
            "Longest processor time of a step of the loop that kept everybody waiting, since the start.",
            "livemax",
        )
        self.open_files_share = _gauge(
            registry,
            "relayd_open_files_share",
            "Open files as a fraction of the limit, of the process closest to its limit.",
            "livemax",
        )
        self.loop_step_seconds = Histogram(
            "relayd_loop_step_seconds",
            "Processor time of the steps that kept everybody waiting.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        pauses = Gauge(
            "relayd_loop_longest_pause_seconds",
            "Longest pause of the loop that no peer caused, by cause: the cycle collector, a reload.",
            ["cause"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.loop_longest_pause_seconds = {cause: pauses.labels(cause) for cause in LOOP_PAUSES}
        self._add_connections(registry)
        self._add_publishing(registry)
        self._add_delivery(registry)
        self._add_store(registry)
        self._add_federation(registry)

    def _add_connections(self, registry: CollectorRegistry) -> None:
        self.connections = _gauge(registry, "relayd_connections", "WebSocket connections open now.")
        # Not `relayd_connections_total`: the gauge above and a counter may not share their stem.
        self.connections_total = Counter(
            "relayd_connections_opened_total", "WebSocket connections opened.", registry=registry
        )
        self.connections_closed = Counters(
            registry, "relayd_connections_closed_total", "Connections ended.", "reason", CLOSE_REASONS
        )
        self.slow_consumers_closed = Counter(
            "relayd_slow_consumers_closed_total",
            "Connections closed because the peer accepted no bytes for too long.",
            registry=registry,
        )
        self.memory_pressure = _gauge(
            registry,
            "relayd_memory_pressure",
            "0: fine; 1: the largest users may not publish; 2: nobody may connect; 3: many are closed.",
            "livemax",
        )
        self.tasks = _gauge(registry, "relayd_tasks", "Tasks of the event loop.", "livesum")
        self.address_share = _gauge(
            registry,
            "relayd_address_share",
            "Fraction of the open sessions that come from one address; 0 below 16 sessions.",
            "livemax",
        )
        self.tls_not_after = _gauge(
            registry,
            "relayd_tls_not_after_timestamp_seconds",
            "When the certificate in use expires, in Unix seconds; 0 without TLS.",
            "livemin",
        )
        self.bytes_received = Counter(
            "relayd_received_bytes_total", "Bytes read from connections.", registry=registry
        )
        self.bytes_sent = Counter(
            "relayd_sent_bytes_total", "Bytes written to connections.", registry=registry
        )
        self.messages_received = Counters(
            registry,
            "relayd_messages_received_total",
            "Messages by type, including refused ones; those of no known type or shape are other.",
            "type",
            MESSAGE_TYPES,
        )
        self.auths = Counters(
            registry,
            "relayd_auths_total",
            "AUTH messages answered; malformed ones are messages of type other.",
            "outcome",
            AUTH_OUTCOMES,
        )
        self.rate_limited = Counters(
            registry, "relayd_rate_limited_total", "Requests over a limit.", "limit", RATE_LIMITS
        )
        self.errors_sent = Counters(
            registry,
            "relayd_errors_sent_total",
            "ERROR messages sent, by code.",
            "code",
            [code.value for code in ErrorCode],
        )

    def _add_publishing(self, registry: CollectorRegistry) -> None:
        self.publishes = Counters(
            registry,
            "relayd_publishes_total",
            "PUBLISH messages answered; malformed ones are messages of type other.",
            "outcome",
            PUBLISH_OUTCOMES,
        )
        self.publish_seconds = LatencyHistogram(
            "relayd_publish_seconds",
            "From reading a PUBLISH to its OK.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.publish_queue = _gauge(registry, "relayd_publish_queue", "Packets waiting for the database.")
        self.verify_seconds = Histogram(
            "relayd_verify_seconds",
            "Checking the ids and signatures of one batch.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.plugin_verdicts = Counter(
            "relayd_policy_plugin_verdicts_total",
            "Verdicts of policy plug-ins; the names are those in the settings.",
            ["plugin", "verdict"],
            registry=registry,
        )
        self.commit_packets = Histogram(
            "relayd_commit_packets", "Packets of one commit.", buckets=_BATCH_BUCKETS, registry=registry
        )
        self.commit_seconds = Histogram(
            "relayd_commit_seconds",
            "One commit, from sending it to the database's answer.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )

    def _add_delivery(self, registry: CollectorRegistry) -> None:
        self.subscriptions = _gauge(registry, "relayd_subscriptions", "Subscriptions open now.")
        self.subscriptions_behind = _gauge(
            registry, "relayd_subscriptions_behind", "Subscriptions that read the store, not the live feed."
        )
        self.events_sent = Counters(
            registry,
            "relayd_events_sent_total",
            "EVENT messages written, by where they came from.",
            "source",
            ("live", "store"),
        )
        self.fanout_lag_seconds = _gauge(
            registry,
            "relayd_fanout_lag_seconds",
            "How long the oldest packet that is in the log has waited to be handed to subscribers.",
            "livemax",
        )
        # The furthest worker; its subscriptions show how far another worker is behind.
        self.log_sequence = _gauge(
            registry, "relayd_log_sequence", "The last position of the log handed to subscribers.", "livemax"
        )

    def _add_store(self, registry: CollectorRegistry) -> None:
        self.log_epoch = _gauge(
            registry,
            "relayd_log_epoch",
            "Epoch of the log: 1 plus the number of times it may have lost its end.",
            "livemax",
        )
        self.lost_cursors = Counter(
            "relayd_lost_cursors_total",
            "SUBSCRIBEs with a cursor for a place that the log has lost.",
            registry=registry,
        )
        self.store_reads = Counters(
            registry, "relayd_store_reads_total", "Pages read from the store.", "outcome", READ_OUTCOMES
        )
        self.store_read_seconds = Histogram(
            "relayd_store_read_seconds",
            "Reading one page from the store.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.database_up = _gauge(
            registry,
            "relayd_database_up",
            "1 while every process can read and write in the database, else 0.",
            "livemin",
        )
        self.replica_reads = Counters(
            registry,
            "relayd_replica_reads_total",
            "Pages requested from the replica, by outcome; the primary served the rest.",
            "outcome",
            ("served", "behind", "unavailable"),
        )
        # Without a bus there is no such series, because there is nothing to lose.
        self.bus_connected = Gauge(
            "relayd_bus_connected",
            "1 while every process can reach the bus, else 0.",
            ["bus"],
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.bus_failures = Counter(
            "relayd_bus_failures_total",
            "Connections to the bus that were lost, or could not be made.",
            registry=registry,
        )
        self.bus_wakeups = Counters(
            registry,
            "relayd_bus_wakeups_total",
            "Wake-ups over the bus: sent, heard, of another term; and refused ones: unsealed, or old.",
            "outcome",
            ("sent", "heard", "doubted", "refused"),
        )
        self.trace_spans = Counters(
            registry,
            "relayd_trace_spans_total",
            "Spans of traces; those made but neither sent nor lost are waiting, or found the queue full.",
            "outcome",
            ("made", "sent", "lost"),
        )
        self.log_bytes = _gauge(
            registry, "relayd_log_bytes", "Packets in the database, with their indexes.", "livemax"
        )
        self.database_bytes = _gauge(
            registry, "relayd_database_bytes", "Size of the whole database on disk.", "livemax"
        )
        self.database_connections = _gauge(
            registry,
            "relayd_database_connections",
            "Connections to the database, including those of other programs.",
            "livemax",
        )
        self.database_max_connections = _gauge(
            registry, "relayd_database_max_connections", "Connections that the database allows.", "livemax"
        )
        self.log_ahead_seconds = _gauge(
            registry,
            "relayd_log_ahead_seconds",
            "How far in the future packets of the log are told as received: a clock was ahead.",
            "livemax",
        )
        self.disk_free_bytes = _gauge(
            registry, "relayd_disk_free_bytes", "Free space on the disk of `data_dir`.", "livemin"
        )
        # One process at a time maintains the log, not always the same one: the last value counts.
        waiting = Gauge(
            "relayd_retention_waiting_days",
            "Days past retention that are kept until they are archived, by what keeps the oldest.",
            ["reason"],
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.retention_waiting = {reason: waiting.labels(reason) for reason in (*RETENTION_REASONS, OTHER)}

    def _add_federation(self, registry: CollectorRegistry) -> None:
        # The label holds the DIDs of `peers_file` and no others.
        self.peer_packets = Counter(
            "relayd_peer_packets_total",
            "Packets received from peers, by outcome.",
            ["peer", "outcome"],
            registry=registry,
        )
        self.peer_witnesses_refused = Counter(
            "relayd_peer_witnesses_refused_total",
            "Packets of peers whose `received_at` cannot be true; local time is used instead.",
            ["peer"],
            registry=registry,
        )
        self.peer_connected = Gauge(
            "relayd_peer_connected",
            "1 while this relay reads from the peer, else 0.",
            ["peer"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.peer_last_witness = Gauge(
            "relayd_peer_last_witness_seconds",
            "The latest Unix time at which a packet that came from the peer was first received anywhere.",
            ["peer"],
            registry=registry,
            multiprocess_mode="livemax",
        )

        self.peer_comparisons = Counter(
            "relayd_peer_comparisons_total",
            "Comparisons of sets with peers, by outcome: equal, different, problem.",
            ["peer", "outcome"],
            registry=registry,
        )
        self.peer_differences = Counter(
            "relayd_peer_differences_total",
            "Results of comparisons with peers: packets brought, known, refused, withheld, have.",
            ["peer", "kind"],
            registry=registry,
        )
        self.peer_comparison_bytes = Counter(
            "relayd_peer_comparison_bytes_total",
            "Bytes of the messages that compared sets with peers.",
            ["peer"],
            registry=registry,
        )
        self.peer_equal_at = Gauge(
            "relayd_peer_equal_seconds",
            "Unix time at which last nothing of the peer's was missing here.",
            ["peer"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.peer_barred = Gauge(
            "relayd_peer_barred",
            "1 while the peer is barred for forging or withholding packets, else 0.",
            ["peer"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.peer_score = Gauge(
            "relayd_peer_score",
            "Score of the peer's conduct within a week, from 0 to 1.",
            ["peer"],
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.peer_paused = Gauge(
            "relayd_peer_paused",
            "1 while an operator has paused reading from the peer, else 0.",
            ["peer"],
            registry=registry,
            multiprocess_mode="livemax",
        )

    def count_processor(self) -> None:
        """Count the processor time of this worker since the last call; of a single process, nobody has to."""
        if self._processor is not None:
            before, self._processor_seconds = self._processor_seconds, time.process_time()
            self._processor.inc(self._processor_seconds - before)

    def told_of_bus(self, url: str | None) -> Callable[[str], None]:
        """A callback for each of `BUS_EVENTS`. The bus is named by its host: its URL may hold a secret."""
        if url is None:
            return lambda what: None
        connected = self.bus_connected.labels(urlsplit(url).hostname or OTHER)
        connected.set(0)

        def told(what: str) -> None:
            match what:
                case "connected":
                    connected.set(1)
                case "failed":
                    connected.set(0)
                    self.bus_failures.inc()
                case _:
                    self.bus_wakeups[what].inc()

        return told

    def retention_waits(self, days: int, reason: str | None) -> None:
        """Record how many days past retention wait for the archive, and why (`RETENTION_REASONS`)."""
        known = reason if reason in self.retention_waiting else OTHER
        for each, gauge in self.retention_waiting.items():
            gauge.set(days if each == known else 0)

    def plugin_said(self, plugin: str, verdict: str) -> None:
        """Count the verdict of a policy plug-in, by its configured name, on a packet."""
        self.plugin_verdicts.labels(plugin, verdict).inc()

    def render(self) -> tuple[str, bytes]:
        """The content type and body of one scrape: of this process, or of all workers together."""
        if self._directory is None:
            return CONTENT_TYPE_LATEST, generate_latest(self.registry)
        directory = Path(self._directory)
        for _ in range(_TRIES):  # a worker that ends meanwhile would be counted twice or not at all
            before = _counted(directory)
            with contextlib.suppress(FileNotFoundError):
                registry = CollectorRegistry()
                multiprocess.MultiProcessCollector(registry, path=directory)  # type: ignore[no-untyped-call]
                registry.register(_WorkerProcesses(directory))
                text = generate_latest(registry)
                if _counted(directory) == before:
                    return CONTENT_TYPE_LATEST, text
        raise RuntimeError("workers end one after the other: what they count cannot be added up just now")


class SupervisorMetrics:
    """The metrics of the parent of several workers, part of each worker's scrape. Make it in the parent."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.restarts = Counters(
            registry,
            "relayd_worker_restarts_total",
            "Workers that were restarted, by reason.",
            "reason",
            WORKER_RESTARTS,
        )
        self.log_lines_dropped = _log_lines_dropped(registry)


def _log_lines_dropped(registry: CollectorRegistry) -> Counter:
    return Counter(
        "relayd_log_lines_dropped_total",
        "Log lines that found no room because the log was not read, or that could not be written.",
        registry=registry,
    )


def share_between_processes(directory: Path) -> None:
    """Make all processes started from now on share their metrics in `directory`, which is emptied.

    Call it once, in the parent, before any `Metrics` is made. Raises OSError if the folder cannot be made or
    emptied.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for stale in directory.glob("*.db"):
        stale.unlink()
    os.environ[_DIRECTORY_VARIABLE] = str(directory)
    # The library already chose where values are kept when it was imported.
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def forget_process(pid: int) -> None:
    """Drop the gauges of a worker that ended, and add its counters to those of all ended workers.

    Raises `OSError`.
    """
    directory = os.environ.get(_DIRECTORY_VARIABLE)
    if directory is not None:
        multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]
        for kind in _COUNTED:
            _add_up(Path(directory), kind, pid)


def _add_up(directory: Path, kind: str, pid: int) -> None:
    own, total = directory / f"{kind}_{pid}.db", directory / f"{kind}_{_ENDED}.db"
    if not own.exists():
        return
    if not own.stat().st_size:  # it was killed before it wrote anything; an empty file cannot be read
        own.unlink()
        return
    fresh = total.with_suffix(".new")
    _make_room(fresh, max(path.stat().st_size for path in (total, own) if path.exists()))
    values = MmapedDict(str(fresh))  # type: ignore[no-untyped-call]
    for path in (total, own):
        if path.exists():
            for key, value, at, _ in MmapedDict.read_all_values_from_file(path):  # type: ignore[no-untyped-call]
                values.write_value(key, values.read_value(key)[0] + value, at)  # type: ignore[no-untyped-call]
    values.close()  # type: ignore[no-untyped-call]
    fresh.replace(total)
    own.unlink()


def _make_room(path: Path, size: int) -> None:
    """Make an empty file whose space is allocated: else a write to its memory map can end the process.

    Raises `OSError`.
    """
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


def _counted(directory: Path) -> tuple[set[str], list[tuple[int, int]]]:
    """A value that changes when an ended worker's counts join the total, and when its own file is removed."""
    totals = [(directory / f"{kind}_{_ENDED}.db") for kind in _COUNTED]
    states = [path.stat() for path in totals if path.exists()]
    names = {path.name for kind in _COUNTED for path in directory.glob(f"{kind}_*.db")}
    return names, [(state.st_ino, state.st_mtime_ns) for state in states]


def _gauge(
    registry: CollectorRegistry,
    name: str,
    doc: str,
    mode: Literal["livesum", "livemax", "livemin"] = "livesum",
) -> Gauge:
    return Gauge(name, doc, registry=registry, multiprocess_mode=mode)


class _WorkerProcesses(Collector):
    """Memory and open files, summed over all live workers. What only grows, each worker counts itself: the
    sum would fall with every worker that is replaced."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for pid in self._pids():
            collector = ProcessCollector(pid=functools.partial(int, pid), registry=None)
            for metric in collector.collect():
                if metric.type != "counter":
                    _merge(merged.setdefault(metric.name, metric), metric)
        yield from merged.values()

    def _pids(self) -> list[int]:
        files = self._directory.glob("gauge_livesum_*.db")
        return sorted(int(file.stem.rpartition("_")[2]) for file in files)


def _merge(total: Metric, part: Metric) -> None:
    """Add one process to the sum; limits and start times do not add up, so the lowest is kept."""
    if total is part:
        return
    total.samples = [
        mine._replace(
            value=min(mine.value, theirs.value)
            if mine.name in {"process_max_fds", "process_start_time_seconds"}
            else mine.value + theirs.value
        )
        for mine, theirs in zip(total.samples, part.samples, strict=True)
    ]
