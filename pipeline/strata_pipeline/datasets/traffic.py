"""What is known about authors: how much they send, how much at once, and how often the same."""

from __future__ import annotations

from strata_pipeline.datasets.dataset import Dataset

__all__ = ["REASON_PREFIX", "Abuse", "AuthorHours", "Bursts", "Clusters", "Hours", "NearDuplicates", "Texts"]

REASON_PREFIX = "pipeline: "
"""How reasons in the abuse table begin that the pipeline wrote: by it they are told from an operator's."""


class Hours(Dataset, schema="hours"):
    """Traffic by author, type and hour."""


class AuthorHours(Dataset, schema="author_hours"):
    """Traffic by author and hour."""


class Bursts(Dataset, schema="bursts"):
    """Hours in which an author sent far more at once than usual."""


class Texts(Dataset, schema="texts"):
    """Texts as signatures that are alike where the texts are."""


class NearDuplicates(Dataset, schema="near_duplicates"):
    """Packets whose text is nearly that of an earlier one."""


class Clusters(Dataset, schema="clusters"):
    """Texts that were sent again and again."""


class Abuse(Dataset, schema="abuse"):
    """Authors whom the relay should block or slow down."""
