"""What Spark did in a job, from its event log: stages, their tasks, and the bytes that they shuffled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Job", "Stage", "logging_conf", "read_job"]


@dataclass(slots=True)
class Stage:
    """One stage that has run."""

    name: str
    began: float
    """Unix seconds."""
    ended: float
    tasks: list[float] = field(default_factory=list)
    """The seconds of each task."""
    shuffled: int = 0
    """The bytes that its tasks wrote for later stages."""
    spilled: int = 0
    """The bytes that did not fit into memory, as written to disk."""


@dataclass(slots=True)
class Job:
    """Everything that one program has run on Spark."""

    seconds: float
    """From the start of its session to the end."""
    executors: int
    """The number of executors that have run tasks."""
    stages: list[Stage]

    @property
    def shuffled(self) -> int:
        """The bytes of all shuffles."""
        return sum(stage.shuffled for stage in self.stages)

    @property
    def spilled(self) -> int:
        """The bytes that were spilled to disks."""
        return sum(stage.spilled for stage in self.stages)

    @property
    def task_seconds(self) -> float:
        """The seconds of all tasks together."""
        return sum(sum(stage.tasks) for stage in self.stages)

    @property
    def alone(self) -> float:
        """The seconds in which no stage ran: those of the driver."""
        busy, end = 0.0, float("-inf")
        for stage in sorted(self.stages, key=lambda stage: stage.began):
            busy += max(0.0, stage.ended - max(stage.began, end))
            end = max(end, stage.ended)
        return max(0.0, self.seconds - busy)

    def speedup(self, count: int) -> float:
        """How many times faster `count` executors of one core would finish these tasks than a single one: the
        tasks of a stage are divided evenly, but a stage takes at least as long as its longest task."""
        stages = (max(max(stage.tasks, default=0.0), sum(stage.tasks) / count) for stage in self.stages)
        return self.task_seconds / max(sum(stages), 1e-9)


def logging_conf(folder: Path) -> list[str]:
    """Options of a command of the pipeline that make Spark write its events into an existing folder."""
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": folder.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]


def read_job(folder: Path) -> Job:
    """The job described by the only log in a folder."""
    [path] = (path for path in folder.iterdir() if not path.name.startswith("."))
    with path.open(encoding="utf-8") as lines:
        return _job([json.loads(line) for line in lines])


def _job(events: Sequence[dict[str, Any]]) -> Job:
    stages: dict[tuple[int, int], Stage] = {}
    executors = set()
    began = ended = 0.0
    tasks: list[tuple[tuple[int, int], dict[str, Any]]] = []
    for event in events:
        match event["Event"]:
            case "SparkListenerApplicationStart":
                began = event["Timestamp"] / 1000
            case "SparkListenerApplicationEnd":
                ended = event["Timestamp"] / 1000
            case "SparkListenerStageCompleted":
                told = event["Stage Info"]
                if "Submission Time" in told:  # otherwise it was skipped
                    stages[told["Stage ID"], told["Stage Attempt ID"]] = Stage(
                        told["Stage Name"], told["Submission Time"] / 1000, told["Completion Time"] / 1000
                    )
            case "SparkListenerTaskEnd":
                tasks.append(((event["Stage ID"], event["Stage Attempt ID"]), event))
    for key, event in tasks:
        info, metrics = event["Task Info"], event.get("Task Metrics")
        if key not in stages or not metrics:
            continue
        executors.add(info["Executor ID"])
        stages[key].tasks.append((info["Finish Time"] - info["Launch Time"]) / 1000)
        stages[key].shuffled += metrics["Shuffle Write Metrics"]["Shuffle Bytes Written"]
        stages[key].spilled += metrics["Disk Bytes Spilled"]
    return Job(ended - began, len(executors), list(stages.values()))
