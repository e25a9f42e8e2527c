"""Datasets about relays: the observations of clients, and the scores."""

from __future__ import annotations

from strata_pipeline.datasets.dataset import Dataset

__all__ = ["Probes", "RelayScores"]


class Probes(Dataset, schema="probes"):
    """Lines of probe logs; a line with a `reason` does not count."""


class RelayScores(Dataset, schema="relay_scores"):
    """The quality of service of relays over seven days."""
