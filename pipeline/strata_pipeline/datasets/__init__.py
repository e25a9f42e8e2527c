"""DataFrames with known columns: what transforms take and give."""

from strata_pipeline.datasets.dataset import Dataset
from strata_pipeline.datasets.packets import Packets, Quarantine

__all__ = ["Dataset", "Packets", "Quarantine"]
