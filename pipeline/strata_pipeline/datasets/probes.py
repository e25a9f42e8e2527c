"""What clients saw of relays, and what follows from it."""

from __future__ import annotations

from strata_pipeline.datasets.dataset import Dataset

__all__ = ["Probes", "RelayScores"]


class Probes(Dataset, schema="probes"):
    """Lines of probe logs; those with a reason do not count."""


class RelayScores(Dataset, schema="relay_scores"):
    """The quality of service of relays over seven days."""
