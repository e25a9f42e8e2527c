"""What a command reports to Prometheus about a lake: through a file for node_exporter, an endpoint, or both.

A timer starts a command repeatedly, and each run is a separate process. So a run begins with the values in
its file: counters continue, and a value that this run does not learn stays what it was. All series carry
`command` and `lake`, so that the files of several commands can lie in one folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from strata_pipeline.errors import LakeError, UsageError
from strata_pipeline.lake.faults import About
from strata_pipeline.lake.stores.schemes import is_object_place

__all__ = ["ABOUT", "COUNTERS", "GAUGES", "JobMetrics", "served"]

ABOUT = get_args(About)
"""What a finding of an audit can be about."""

COUNTERS = {
    "strata_archive_packets": "Packets that the archive has put into the lake.",
    "strata_archive_quarantined": "Rows of the log that the archive has put aside in quarantine.",
    "strata_archive_batches": "Batches that the archive has added to the lake.",
    "strata_archive_body_bytes": "Bytes of the bodies of packets that the archive has put into the lake.",
    "strata_pipeline_runs": "Runs of a command that have begun.",
}
"""Prometheus shows each as `…_total`."""

GAUGES = {
    "strata_archive_behind_packets": "Rows of the log that the lake lacked at the last look.",
    "strata_archive_head_reached_seconds": "Unix time at which the lake last held all of the log.",
    "strata_archive_moved_aside": "Broken folders that the last run has moved into _aside.",
    "strata_audit_batches": "Batches that the last audit has read.",
    "strata_audit_packets": "Packets that the last audit has read.",
    "strata_audit_quarantined": "Quarantined rows in the batches that the last audit has read.",
    "strata_audit_holds": "1 where the last audit that came to its end found no fault, else 0.",
    "strata_lake_broken": "1 where the last run refused the lake: chain or files are damaged or gone.",
    "strata_lake_disk_bytes": "Size of the file system on which the lake lies.",
    "strata_lake_free_bytes": "Bytes of that file system that are free for the command.",
    "strata_pipeline_exit_code": "Exit code of the last run that has ended.",
    "strata_pipeline_run_began_seconds": "Unix time at which the last run began.",
    "strata_pipeline_run_ended_seconds": "Unix time at which a run last ended, with whatever exit code.",
    "strata_pipeline_run_succeeded_seconds": "Unix time at which a run last ended with exit code 0.",
}

_FINDINGS = "strata_audit_findings"
_LABELS = ("command", "lake")


class JobMetrics:
    """The series of one command and one lake.

    `write` writes `file`. Raises `UsageError` if it cannot be written, or if node_exporter would not read it,
    so that a mistake in the command is reported at once.
    """

    def __init__(self, command: str, lake: str, file: Path | None = None) -> None:
        if file is not None and file.suffix != ".prom":
            raise UsageError(
                f"--metrics-file {file}: node_exporter reads only files whose name ends with .prom"
            )
        self.registry = CollectorRegistry()
        self._file = file
        self._lake = None if is_object_place(lake) else Path(lake.removeprefix("file://")).absolute()
        self._labels = {"command": command, "lake": str(self._lake or lake)}
        self._counters = {name: Counter(name, told, _LABELS, registry=self.registry)
                          for name, told in COUNTERS.items()}  # fmt: skip
        self._gauges = {name: Gauge(name, told, _LABELS, registry=self.registry)
                        for name, told in GAUGES.items()}  # fmt: skip
        self._findings = Gauge(
            _FINDINGS, "Findings of the last audit.", (*_LABELS, "about"), registry=self.registry
        )
        self._resume()
        self._counters["strata_pipeline_runs"].labels(**self._labels).inc()
        self.set("strata_pipeline_run_began_seconds", time.time())
        try:
            self._write()
        except OSError as error:
            raise UsageError(f"--metrics-file {file}: {error.strerror or error}") from None

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._gauges[name].labels(**self._labels).set(value)

    def add(self, name: str, value: float) -> None:
        """Add to a counter."""
        self._counters[name].labels(**self._labels).inc(value)

    def set_findings(self, counts: Mapping[str, int]) -> None:
        """Set the findings of an audit from counts by `about: reason`. There are many reasons, so the series
        count by `about` only."""
        for about in ABOUT:
            number = sum(count for name, count in counts.items() if name.startswith(f"{about}:"))
            self._findings.labels(about=about, **self._labels).set(number)

    def ended(self, code: int, error: BaseException | None = None) -> None:
        """Record the end of a run, and write."""
        self.set("strata_pipeline_run_ended_seconds", time.time())
        self.set("strata_pipeline_exit_code", code)
        if code == 0:
            self.set("strata_pipeline_run_succeeded_seconds", time.time())
        if code == 0 or isinstance(error, LakeError):
            self.set("strata_lake_broken", float(isinstance(error, LakeError)))
        self.write()

    def write(self) -> None:
        """Replace the file, if any. If it cannot be written, stderr says so and the job continues."""
        try:
            self._write()
        except OSError as error:
            print(f"strata-pipeline: {self._file} cannot be written: {error}", file=sys.stderr)

    def _write(self) -> None:
        self._look_at_disk()
        if self._file is None:
            return
        # node_exporter reads files that end in .prom, and must never find half a file.
        draft = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            draft.write_bytes(generate_latest(self.registry))
            draft.chmod(0o644)  # it holds no secrets, and another user reads it
            draft.replace(self._file)
        finally:
            draft.unlink(missing_ok=True)

    def _look_at_disk(self) -> None:
        folder = self._lake
        if folder is None:  # a bucket has no size
            return
        # If the system does not say, or refuses the folder, the job itself reports what is wrong.
        with contextlib.suppress(OSError):
            while not folder.exists():
                folder = folder.parent
            told = os.statvfs(folder)
            self.set("strata_lake_disk_bytes", told.f_blocks * told.f_frsize)
            self.set("strata_lake_free_bytes", told.f_bavail * told.f_frsize)

    def _resume(self) -> None:
        """Take over the values that the last run wrote; a file that cannot be parsed is started over."""
        try:
            text = self._file.read_text(encoding="utf-8") if self._file is not None else ""
            families = list(text_string_to_metric_families(text))
        except (OSError, ValueError):
            return
        for sample in (sample for family in families for sample in family.samples):
            if not self._labels.items() <= sample.labels.items():
                continue
            if sample.name in self._gauges:
                self.set(sample.name, sample.value)
            elif sample.name == _FINDINGS and sample.labels.get("about") in ABOUT:
                self._findings.labels(**sample.labels).set(sample.value)
            elif (name := sample.name.removesuffix("_total")) in self._counters and sample.value >= 0:
                self.add(name, sample.value)


@contextlib.contextmanager
def served(metrics: JobMetrics, address: str | None) -> Iterator[int]:
    """Answer scrapes at `host:port` within the block, which is given the port; with None nothing listens.

    Raises `UsageError`.
    """
    if address is None:
        yield 0
        return
    match = re.fullmatch(r"(.+):(\d{1,5})", address)
    if match is None or int(match[2]) > 65_535:
        raise UsageError(f"--metrics-listen {address}: HOST:PORT is needed")
    try:
        server, thread = start_http_server(
            int(match[2]), match[1].removeprefix("[").removesuffix("]"), metrics.registry
        )
    except OSError as error:
        raise UsageError(f"--metrics-listen {address}: {error.strerror or error}") from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
