"""DataFrames with known columns: the arguments and results of transforms."""

from strata_pipeline.datasets.dataset import Dataset
from strata_pipeline.datasets.packets import Packets, Quarantine

__all__ = ["Dataset", "Packets", "Quarantine"]
