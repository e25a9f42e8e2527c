"""`strata-pipeline migrate-lake`: audit a lake of format 1, then also bind its bodies and annotations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.audit import audit
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.migration import migrate_chain

__all__ = ["Migrated", "migrate_lake"]


@dataclass(frozen=True, slots=True)
class Migrated:
    """The result of a migration."""

    batches: int
    """The number of batches that had format 1; 0 if there was nothing to do."""
    tip_before: str
    tip: str


def migrate_lake(
    spark: SparkSession,
    path: str | Path,
    *,
    url: str | None = None,
    bootstrap: Path | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Migrated:
    """Audit a lake, with `url` also against its log, and rewrite its manifests in the newest format.

    From then on, bodies and annotations count as they are: only an audit against the log can show whether an
    annotation was altered earlier. Raises `LakeError` if the audit finds anything, `LakeBusy` while an
    archive or a compaction runs, and `PipelineError`; then nothing was changed.
    """
    with Lake.replace(path), Lake.write(path) as lake:
        before = lake.tip
        if all(manifest.format > 1 for manifest in lake.manifests):
            return Migrated(0, before, before)
        progress("auditing")
        audited = audit(spark, path, url=url, bootstrap=bootstrap)
        if not audited.holds:
            found = ", ".join(f"{count:,} × {name}" for name, count in sorted(audited.counts.items()))
            raise LakeError(
                f"the lake does not hold ({found}), and a migration would vouch for what it has: nothing was "
                "changed. Run audit, and bring the files back from a copy"
            )
        total = len(lake.manifests)
        batches = migrate_chain(lake, lambda done: progress(f"{done:,} of {total:,} batches read"))
        return Migrated(batches, before, lake.tip)
