"""A batch that is being archived: written by tasks, read back here, and committed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from pyspark.sql import DataFrame
from strata.protocol.sequences import Span

from strata_pipeline.datasets.objects import write_objects
from strata_pipeline.errors import ObjectStoreError
from strata_pipeline.lake import files
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake_format import Manifest, StoredObject

__all__ = ["Draft", "drafting"]


class Draft(Protocol):
    """A batch that readers do not see yet."""

    def write(self, root: str, rows: DataFrame) -> None:
        """Write its rows of `packets` or `quarantine`, by `kind` if there is such a column."""

    def folder(self, root: str) -> Path | None:
        """The folder on this machine with what was actually written; None if that is nothing.

        Call this only after everything was written.
        """

    def commit(self, manifest: Manifest, witnesses: bytes) -> Manifest:
        """Make it a batch of the lake, with its file of witnesses; return the manifest as written. Raises
        `LakeBusy`."""


@contextlib.contextmanager
def drafting(lake: AnyLake, span: Span) -> Iterator[Draft]:
    """A new draft; if it is not committed by the end of the block, it never is."""
    if isinstance(lake, Lake):
        yield _OnDisk(lake, span)
        return
    with contextlib.ExitStack() as stack:
        yield _InBucket(lake, span, stack)


class _OnDisk:
    def __init__(self, lake: Lake, span: Span) -> None:
        self._lake = lake
        self._staged = lake.stage(span)

    def write(self, root: str, rows: DataFrame) -> None:
        writer = rows.write.partitionBy("kind") if "kind" in rows.columns else rows.write
        writer.options(**files.WRITER_OPTIONS).parquet(str(self._staged / root))

    def folder(self, root: str) -> Path | None:
        folder = self._staged / root
        files.without_notes(folder)
        return folder if any(folder.rglob("*.parquet")) else None

    def commit(self, manifest: Manifest, witnesses: bytes) -> Manifest:
        return self._lake.commit(manifest, self.folder("packets"), self.folder("quarantine"), witnesses)


class _InBucket:
    def __init__(self, lake: ObjectLake, span: Span, stack: contextlib.ExitStack) -> None:
        self._lake = lake
        self._attempt = lake.begin(span)
        self._stack = stack
        self._objects: list[StoredObject] = []
        self._brought: Path | None = None

    def write(self, root: str, rows: DataFrame) -> None:
        self._objects += write_objects(rows, self._lake.store, self._attempt, root)

    def folder(self, root: str) -> Path | None:
        if self._brought is None:
            self._brought, faults = self._stack.enter_context(self._lake.shelf.at_hand(self._objects))
            if faults:
                raise ObjectStoreError(f"{faults[0].detail}, just now: nothing was committed. Run this again")
        folder = self._brought / self._attempt.folder(root)
        return folder if folder.is_dir() else None

    def commit(self, manifest: Manifest, witnesses: bytes) -> Manifest:
        return self._lake.commit(manifest, self._attempt, self._objects, witnesses)
