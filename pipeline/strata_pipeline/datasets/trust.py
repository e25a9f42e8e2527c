"""Datasets about who trusts whom."""

from __future__ import annotations

from strata_pipeline.datasets.dataset import Dataset

__all__ = ["TrustAuthors", "TrustEdges", "TrustStatements"]


class TrustStatements(Dataset, schema="trust_statements"):
    """What authors have said, the newest of each kind: those of days together are those of all."""


class TrustEdges(Dataset, schema="trust_edges"):
    """The edges that stand."""


class TrustAuthors(Dataset, schema="trust_authors"):
    """The authors that these edges join."""
