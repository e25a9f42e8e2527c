"""Datasets about who trusts whom."""

from __future__ import annotations

from strata_pipeline.datasets.dataset import Dataset

__all__ = ["TrustAuthors", "TrustEdges"]


class TrustEdges(Dataset, schema="trust_edges"):
    """The edges that stand."""


class TrustAuthors(Dataset, schema="trust_authors"):
    """The authors that these edges join."""
