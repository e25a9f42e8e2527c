"""What a job of the pipeline says when it cannot go on. Each tells what to do next."""

from __future__ import annotations

from strata.protocol.lake import LakeError

__all__ = [
    "DatasetError",
    "LakeBusy",
    "LakeError",
    "LogError",
    "LogUnavailable",
    "PipelineError",
    "UsageError",
    "log_too_short",
]


class PipelineError(Exception):
    """A job cannot go on; its message is for the operator. `LakeError` is the other one."""


class UsageError(PipelineError):
    """What was asked for makes no sense."""


class LakeBusy(PipelineError):
    """Another process writes into the lake."""


class LogError(PipelineError):
    """The relay's log is not what it must be: rows missing, or the log of another relay."""


class LogUnavailable(PipelineError):
    """The database cannot be reached, or refuses us. Running the job again completes it."""


def log_too_short(head: int, reached: int) -> LogError:
    """The log ends before the lake does."""
    return LogError(
        f"the log ends at {head} and the lake at {reached}: this is another log, an older backup of it, or a "
        "replica that has fallen behind"
    )


class DatasetError(PipelineError):
    """A dataset has other columns than its schema says."""
