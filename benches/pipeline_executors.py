"""The jobs of a finished day on standalone clusters of one, two and four executors, each with one core.

Each job is a separate program. The database and the driver use the same cores as the executors. Since the
machine may not have enough cores for four, the gain of four is derived from their tasks: from the share of
all tasks that the longest task of each stage has. It is not measured, and the report says so.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benches.job_memory import job_command, run
from benches.job_stages import Job, logging_conf, read_job
from benches.measures import Measure
from benches.pipeline_log import append, empty_log
from benches.pipeline_packets import Made
from benches.spark_cluster import DRIVER_CONF, standalone_cluster

__all__ = ["measure"]

_DAY = 86_400
_BATCHES = 8
_MOST = 4
_JOBS = ("archive", "compact", "audit", "traffic")


def measure(rows: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    """The figures for a day of `rows` signed packets."""
    # Executors are processes of this machine: they may use our interpreter, and are sent the code anyway.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    day = (int(time.time()) // _DAY - 1) * _DAY
    jobs: dict[tuple[str, int], Job] = {}
    with empty_log(folder / "executors-log") as server:
        say(f"executors: a log of {rows:,} signed packets")
        append(server.url, Made(rows, True, day, _DAY - 1, authors=max(200, rows // 50), varied=True))
        append(server.url, Made(1, True, day + _DAY, first=rows))
        for executors in (1, 2, _MOST):
            lake, report = folder / f"executors-{executors}", folder / "executors-report"
            cluster_folder = folder / f"executors-cluster-{executors}"
            options = {
                "archive": ["--database-url", server.url, "--batch-rows", str(max(1, rows // _BATCHES))],
                "traffic": ["--output", str(report)],
            }
            with standalone_cluster(cluster_folder, workers=executors, memory="1536m") as cluster:
                for name in _JOBS:
                    done = _run(name, lake, cluster.master, folder, options.get(name, []), rows)
                    if done.executors != executors:
                        raise SystemExit(f"{name}: {done.executors} executors had tasks, and not {executors}")
                    say(f"executors: {name} with {executors}: {done.seconds:,.1f} s")
                    jobs[name, executors] = done
            for gone in (lake, report, cluster_folder):
                shutil.rmtree(gone)
    shutil.rmtree(folder / "executors-log")
    return [
        measured
        for name in _JOBS
        for measured in _measures(name, jobs[name, 1], jobs[name, 2], jobs[name, _MOST], rows)
    ]


def _run(name: str, lake: Path, master: str, folder: Path, options: list[str], rows: int) -> Job:
    events = folder / "executors-events"
    events.mkdir()
    conf = [word for key, value in DRIVER_CONF.items() for word in ("--conf", f"{key}={value}")]
    ran = run(job_command(name, lake, *options, *conf, *logging_conf(events), master=master))
    told = json.loads(ran.told.splitlines()[-1])
    if told.get("packets", rows + 1) != rows + 1 or told.get("findings"):
        raise SystemExit(f"{name} tells {told}")
    job = read_job(events)
    shutil.rmtree(events)
    return job


def _measures(name: str, one: Job, two: Job, four: Job, rows: int) -> list[Measure]:
    longest = sorted(four.stages, key=lambda stage: max(stage.tasks, default=0.0), reverse=True)[:3]
    tasks = {
        f"{at}. {stage.name}": f"{len(stage.tasks)} tasks, {sum(stage.tasks):.1f} s, longest "
        f"{max(stage.tasks, default=0.0):.1f} s"
        for at, stage in enumerate(longest, 1)
    }
    return [
        Measure(
            "executors",
            f"{name}, two beside one",
            one.seconds / two.seconds,
            "×",
            limit=2.0,
            limit_name="twice the executors",
            details={
                "rows/s with one, two": [rows / one.seconds, rows / two.seconds],
                "seconds with one, two": [one.seconds, two.seconds],
                "of them without a task": [one.alone, two.alone],
                "seconds of all tasks": [one.task_seconds, two.task_seconds],
                "two, as the tasks tell": one.seconds / (one.alone + one.task_seconds / two.speedup(2)),
            },
        ),
        Measure(
            "executors",
            f"{name}, {_MOST} beside one: derived from tasks, not measured",
            one.seconds / (one.alone + one.task_seconds / four.speedup(_MOST)),
            "×",
            limit=float(_MOST),
            limit_name=f"{_MOST} times the executors",
            details={"the tasks alone": four.speedup(_MOST), **tasks},
        ),
    ]
