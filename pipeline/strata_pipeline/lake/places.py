"""A lake by its place: a folder, or `s3://bucket/prefix`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.stores.schemes import is_object_place

__all__ = ["AnyLake", "open_lake", "require_lake", "write_lake"]

AnyLake: TypeAlias = Lake | ObjectLake


def open_lake(place: str | Path) -> AnyLake:
    """The lake at a place, for reading; its chain is checked.

    Raises `LakeError`, `ObjectStoreError`, `UsageError`.
    """
    return ObjectLake.open(str(place)) if is_object_place(place) else Lake.open(place)


def require_lake(place: str) -> None:
    """Raise `LakeError` if no lake is at a place on a disk; a bucket is asked when its lake is opened."""
    if not is_object_place(place):
        Lake.found(place)


def write_lake(place: str | Path, *, copying: bool = False) -> AbstractContextManager[AnyLake]:
    """The lake at a place, for adding batches, as by the `write` of its class."""
    if is_object_place(place):
        return ObjectLake.write(str(place), copying=copying)
    return Lake.write(place, copying=copying)
