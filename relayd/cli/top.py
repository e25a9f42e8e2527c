"""`relayd top`: show what a running relay is doing, from two scrapes of its metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, TypeAlias

from relayd.cli.scraped import Scraped, scrape

__all__ = ["Look", "figures", "look", "table"]

_MIB: Final = 2**20

Figures: TypeAlias = dict[str, str | float | None]
"""The figures of a relay by name; None for one that is not known."""


@dataclass(frozen=True, slots=True)
class Look:
    """One scrape, and when it was made in monotonic seconds."""

    scraped: Scraped
    at: float


def look(url: str) -> Look:
    """Scrape now. Raises as `scrape` does."""
    return Look(scrape(url), time.monotonic())


def figures(now: Look, before: Look | None) -> Figures:
    """The figures of the relay by name; rates and latencies are since `before`, or since its start."""
    new, old = now.scraped, None if before is None else before.scraped
    started = new.total("process_start_time_seconds")
    seconds = now.at - before.at if before is not None else max(1.0, time.time() - started)

    def rate(name: str, **labels: str) -> float:
        grown = new.total(name, **labels) - (0.0 if old is None else old.total(name, **labels))
        return round(max(0.0, grown) / seconds, 2)

    taken = rate("relayd_publishes_total", outcome="accepted")
    again = rate("relayd_publishes_total", outcome="duplicate")
    return {
        "version": next(iter(new.by("relayd_build_info", "version")), ""),
        "sessions": int(new.total("relayd_connections")),
        "sessions_from_one_address": new.total("relayd_address_share"),
        "subscriptions": int(new.total("relayd_subscriptions")),
        "subscriptions_behind": int(new.total("relayd_subscriptions_behind")),
        "accepted_per_second": taken,
        "duplicates_per_second": again,
        "refused_per_second": round(max(0.0, rate("relayd_publishes_total") - taken - again), 2),
        "events_live_per_second": rate("relayd_events_sent_total", source="live"),
        "events_stored_per_second": rate("relayd_events_sent_total", source="store"),
        "received_mib_per_second": round(rate("relayd_received_bytes_total") / _MIB, 3),
        "sent_mib_per_second": round(rate("relayd_sent_bytes_total") / _MIB, 3),
        "publish_p50_seconds": new.quantile("relayd_publish_seconds", 0.5, old),
        "publish_p99_seconds": new.quantile("relayd_publish_seconds", 0.99, old),
        "commit_p99_seconds": new.quantile("relayd_commit_seconds", 0.99, old),
        "loop_lag_p99_seconds": new.quantile("relayd_loop_lag_seconds", 0.99, old),
        "fanout_lag_seconds": round(new.total("relayd_fanout_lag_seconds"), 3),
        "rate_limited_per_second": rate("relayd_rate_limited_total"),
        "errors_per_second": rate("relayd_errors_sent_total"),
        "faults": int(new.total("relayd_faults_total")),
        "worker_restarts": int(new.total("relayd_worker_restarts_total")),
        "log_bytes": int(new.total("relayd_log_bytes")),
        "disk_free_bytes": int(new.total("relayd_disk_free_bytes")),
        "database_up": bool(new.total("relayd_database_up")),
        "database_connections": int(new.total("relayd_database_connections")),
        "database_max_connections": int(new.total("relayd_database_max_connections")),
        "retention_waiting_days": int(new.total("relayd_retention_waiting_days")),
        "log_epoch": int(new.total("relayd_log_epoch")),
        "processors": rate("process_cpu_seconds_total"),
        "memory_bytes": int(new.total("process_resident_memory_bytes")),
        "open_files_share": round(new.total("relayd_open_files_share"), 3),
    }


def table(found: Figures) -> str:
    """The figures as lines for people."""
    width = max(map(len, found))
    return "\n".join(
        f"{name.replace('_', ' '):{width}}  {_shown(name, value)}" for name, value in found.items()
    )


def _shown(name: str, value: str | float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return f"{value / _MIB:.1f} MiB"
    if name.endswith("_seconds"):
        return f"{value * 1000:g} ms"
    return f"{value:g}" if isinstance(value, float) else str(value)
