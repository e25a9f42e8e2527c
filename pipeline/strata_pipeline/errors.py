"""The errors of the pipeline. Each message tells the operator what to do next."""

from __future__ import annotations

from strata_pipeline.lake_format import LakeError

__all__ = [
    "DatasetError",
    "LakeBusy",
    "LakeError",
    "LogError",
    "LogUnavailable",
    "ObjectStoreError",
    "PipelineError",
    "UsageError",
    "log_too_short",
]


class PipelineError(Exception):
    """A job cannot continue; the message is for the operator. Its sibling `LakeError`: a damaged lake."""


class UsageError(PipelineError):
    """An option or a combination of options makes no sense."""


class LakeBusy(PipelineError):
    """Another process is writing to the lake."""


class LogError(PipelineError):
    """The relay's log is not the expected one: rows are missing, or it is the log of another relay."""


class LogUnavailable(PipelineError):
    """The database cannot be reached or refuses the connection. Running the job again completes it."""


class ObjectStoreError(PipelineError):
    """An object store cannot be reached or refuses the request. Running the job again completes it."""


def log_too_short(head: int, reached: int) -> LogError:
    """The error for a log that ends before the lake does."""
    return LogError(
        f"the log ends at {head} and the lake at {reached}: this is another log, an older backup of it, or a "
        "replica that has fallen behind"
    )


class DatasetError(PipelineError):
    """The columns of a dataset differ from its schema."""
