"""`strata-pipeline copy`: a lake from a disk into a bucket, or back, batch by batch. It needs no Spark.

The copy gets the same manifests, so the same tips prove it. Each batch is held against its manifest before it
is committed, by the way that an archive commits. So a copy that was stopped is a whole lake, shorter than the
other, and the next run goes on.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from blake3 import blake3
from strata.protocol.lake import Manifest, StoredObject

from strata_pipeline.errors import LakeError, UsageError
from strata_pipeline.lake.checking import batch_name, batches_faults, chunks
from strata_pipeline.lake.contents import parquet_files
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import LakeLayout, span_of
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake, open_lake, write_lake

__all__ = ["Copied", "copy_lake"]


@dataclass(slots=True)
class Copied:
    """The progress of a run."""

    batches: int = 0
    """Batches that this run has copied."""
    packets: int = 0
    reached: int = 0
    """The sequence up to which the copy holds the log."""
    left: int = 0
    """Packets that are not copied yet."""
    tip: str = ""
    """The hash of the copy's last manifest: the other lake has it too."""


def copy_lake(
    source: str | Path, target: str | Path, *, progress: Callable[[Copied], None] = lambda done: None
) -> Copied:
    """Bring the lake at `target`, which need not exist yet, up to the lake at `source`.

    A day that was compacted is copied batch by batch, as it was archived. `progress` is called before each
    batch. Raises `LakeError` where the target is not a beginning of the source or a batch does not hold,
    `LakeBusy`, `StoreError`, `UsageError`.
    """
    lake = open_lake(source)
    done = Copied()
    with lake.held(), write_lake(target) as copy:
        if lake.erasures.records or copy.erasures.records:
            raise UsageError("rows were erased from one of these lakes, and copy brings no erasures yet")
        _check_beginning(lake, copy)
        missing = lake.manifests[copy.chain.end.number :]
        done.left = sum(one.packets for one in missing)
        for some in chunks(missing):
            with lake.at_hand(some) as layout:
                for manifest in some:
                    progress(done)
                    _copy(layout, manifest, copy)
                    done.batches += 1
                    done.packets += manifest.packets
                    done.left -= manifest.packets
        done.reached, done.tip = copy.reached, copy.tip
    progress(done)
    return done


def _check_beginning(lake: AnyLake, copy: AnyLake) -> None:
    number = copy.chain.end.number
    if number and (number > lake.chain.end.number or lake.chain.one(number - 1).hash != copy.tip):
        raise LakeError(
            f"{copy.place} is not the beginning of {lake.place}: it is another lake, or has gone on by "
            "itself. Nothing was changed"
        )


def _copy(layout: LakeLayout, manifest: Manifest, copy: AnyLake) -> None:
    if isinstance(copy, Lake):
        staged = copy.stage(manifest.span)
        _extract(layout, manifest, staged)
        packets, quarantine = (
            folder if (folder := staged / root).is_dir() else None for root in ("packets", "quarantine")
        )
        copy.commit(manifest, packets, quarantine)
        return
    with tempfile.TemporaryDirectory(prefix="strata-copy-") as name:
        _extract(layout, manifest, Path(name))
        _put(Path(name), manifest, copy)


def _extract(layout: LakeLayout, manifest: Manifest, folder: Path) -> None:
    """Make the files of a batch, by root and kind, in a folder. Raises `LakeError` unless they hold."""
    made: dict[str, list[Path]] = {"packets": [], "quarantine": []}
    for root in made:
        for batch in layout.folders_of_day(layout.root / root, manifest.span.day):
            if not span_of(batch).overlaps(manifest.span):
                continue
            for path in parquet_files([batch]):
                target = folder / root / path.relative_to(batch)
                if span_of(batch) == manifest.span:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
                else:
                    _filter(path, manifest, target)
            made[root] = [folder / root] if (folder / root).is_dir() else []
    faults = batches_faults([manifest], made["packets"], made["quarantine"])
    if faults:
        raise LakeError(
            f"the lake's {batch_name(manifest)} is damaged: {faults[0].detail}. Bring its files back from a "
            "copy of the lake; the batches before it are copied"
        )


def _filter(path: Path, manifest: Manifest, target: Path) -> None:
    """Copy those rows of a file that belong to a batch."""
    within = (pads.field("sequence") > manifest.after) & (pads.field("sequence") <= manifest.up_to)
    rows: pa.Table = pads.dataset(path, format="parquet").to_table(filter=within)
    if rows.num_rows:
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, target, compression="zstd")


def _put(folder: Path, manifest: Manifest, copy: ObjectLake) -> None:
    attempt = copy.begin(manifest.span)
    objects = []
    for path in parquet_files([folder]):
        root, *kinds, _ = path.relative_to(folder).parts
        content = path.read_bytes()
        one = StoredObject(
            name=attempt.object_name(root, kinds[0].removeprefix("kind=") if kinds else None),
            size=len(content),
            rows=pq.read_metadata(path).num_rows,
            hash=blake3(content).hexdigest(),
        )
        copy.store.put(one.name, content)
        objects.append(one)
    copy.adopt(manifest, attempt, objects)
