"""Progress on a terminal, with a rate and the remaining time; nothing is written to a log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["rows_shown", "steps_shown", "tasks_under_way"]

_LOOK_SECONDS = 0.5


class _Counted(ProgressColumn):
    """12,000 of 50,000 packets, 8,100/s."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        rate = "" if task.speed is None else f", {task.speed:,.4g}/s"
        return Text(f"{task.completed:,.0f} of {task.total:,.0f} {task.fields['unit']}{rate}")


@contextmanager
def rows_shown(name: str, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """A function to call with the number of packets that are done and the number of all packets."""
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield lambda done, total: None
        return
    with _bar(console) as bar:
        task = bar.add_task(name, total=None, unit="packets")
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def steps_shown(
    name: str, as_json: bool, spark: SparkSession | None = None
) -> Iterator[Callable[[str], None]]:
    """A function to call with the current step; the bar shows how many of its Spark tasks are done."""
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield lambda step: None
        return
    ended = threading.Event()
    with _bar(console) as bar:
        task = bar.add_task(name, total=None, unit="tasks")

        def look() -> None:
            while not ended.wait(_LOOK_SECONDS):
                if spark is not None and (found := tasks_under_way(spark)) is not None:
                    bar.update(task, completed=found[0], total=found[1])

        def step(told: str) -> None:
            bar.reset(task, description=f"{name}: {told}", total=None)

        watch = threading.Thread(target=look, name="progress", daemon=True)
        watch.start()
        try:
            yield step
        finally:
            ended.set()
            watch.join()


def tasks_under_way(spark: SparkSession) -> tuple[int, int] | None:
    """The number of finished tasks of the jobs that run now, and the number of all; None if there is no job.

    It is also None if this is not known, as over Spark Connect or while a session ends.
    """
    try:
        tracker = spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getActiveJobsIds()]
        names = {stage for job in jobs if job is not None for stage in job.stageIds}
        stages = [stage for stage in map(tracker.getStageInfo, names) if stage is not None]
    except Exception:  # a progress bar must never end a job
        return None
    total = sum(stage.numTasks for stage in stages)
    return (sum(stage.numCompletedTasks for stage in stages), total) if total else None


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), _Counted(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)
