"""Datasets about authors: traffic, bursts, repeated texts, and verdicts."""

from __future__ import annotations

from strata_pipeline.datasets.dataset import Dataset

__all__ = [
    "REASON_PREFIX",
    "Abuse",
    "AuthorHours",
    "Bursts",
    "Clusters",
    "Hours",
    "Meetings",
    "NearDuplicates",
    "Seconds",
    "Texts",
    "WholeSeconds",
]

REASON_PREFIX = "pipeline: "
"""The prefix of the pipeline's reasons in the abuse table: an operator's reasons have none."""


class Seconds(Dataset, schema="seconds"):
    """Traffic by author, type and second; several rows may each cover a part of one second."""


class WholeSeconds(Dataset, schema="whole_seconds"):
    """Traffic by author, type and second, with one row for each."""


class Hours(Dataset, schema="hours"):
    """Traffic by author, type and hour."""


class AuthorHours(Dataset, schema="author_hours"):
    """Traffic by author and hour."""


class Bursts(Dataset, schema="bursts"):
    """Hours in which an author sent far more in one second than usual."""


class Texts(Dataset, schema="texts"):
    """Signatures of texts: similar texts have similar signatures."""


class Meetings(Dataset, schema="meetings"):
    """Texts, each with the first text of a bucket that it is in; and crowded buckets with their first."""


class NearDuplicates(Dataset, schema="near_duplicates"):
    """Packets whose text nearly repeats an earlier one."""


class Clusters(Dataset, schema="clusters"):
    """Texts that were sent again and again."""


class Abuse(Dataset, schema="abuse"):
    """Authors whom the relay should block or slow down."""
