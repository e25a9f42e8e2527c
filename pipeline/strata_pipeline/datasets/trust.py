"""Datasets about who trusts whom."""

from __future__ import annotations

from strata_pipeline.datasets.dataset import Dataset

__all__ = ["TrustAuthors", "TrustEdges", "TrustStatements"]


class TrustStatements(Dataset, schema="trust_statements"):
    """The newest statement of each kind of each author. Those of single days, taken together, give those of
    all days."""


class TrustEdges(Dataset, schema="trust_edges"):
    """The edges that are in force."""


class TrustAuthors(Dataset, schema="trust_authors"):
    """The authors that these edges join."""
