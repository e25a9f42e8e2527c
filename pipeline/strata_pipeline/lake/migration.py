"""A chain of format 1 rewritten in format 2: each batch gets the digest of its bodies and annotations.

The new chain is written aside and changes places with the old one, which stays in `_aside`: it proves
the tips that were noted before.
"""

from __future__ import annotations

from collections.abc import Callable

from strata.protocol.lake import FORMAT, GENESIS, Manifest, Span, encode, manifests_of_day, migrated

from strata_pipeline.errors import LakeError
from strata_pipeline.lake import files
from strata_pipeline.lake.checking import batches_faults, chunks, units_of_day
from strata_pipeline.lake.contents import Contents
from strata_pipeline.lake.lake import Lake

__all__ = ["migrate_chain"]


def migrate_chain(lake: Lake, progress: Callable[[int], None] = lambda batches: None) -> int:
    """Bring a lake's chain to the newest format, and return how many batches were of an older one.

    The caller holds the locks of `write` and of `replace`. `progress` is told how many batches were read.
    Raises `LakeError` where files and manifests disagree; then nothing was changed.
    """
    older = sum(manifest.format < FORMAT for manifest in lake.manifests)
    if not older:
        return 0
    digests = _digests(lake, progress)
    chain: list[Manifest] = []
    staged = lake.staging / "manifests"
    files.remove(staged)
    files.make_folder(staged)
    for manifest in lake.manifests:
        contents = digests.get(manifest.number, manifest.contents)
        chain.append(migrated(manifest, contents, chain[-1].hash if chain else GENESIS))
        (staged / f"{manifest.number:010}.json").write_bytes(encode(chain[-1]))
    files.make_durable(staged)
    files.exchange(lake.manifests_folder, staged)
    files.move(staged, lake.aside, "manifests-format-1")
    files.remove_if_empty(lake.staging)
    lake.manifests = chain
    return older


def _digests(lake: Lake, progress: Callable[[int], None]) -> dict[int, str]:
    """The second digest of each batch that has none, by its manifest's number."""
    digests: dict[int, str] = {}
    for day in lake.days():
        for unit in units_of_day(lake, day, manifests_of_day(lake.manifests, day)):
            for chunk in chunks(one for one in unit.manifests if one.format < FORMAT):
                faults = batches_faults(chunk, unit.packets, unit.quarantine)
                if faults:
                    raise LakeError(f"{faults[0].detail}. Nothing was changed; run audit")
                contents, span = Contents(), Span(chunk[0].after, chunk[-1].up_to)
                contents.add(unit.packets, span, quarantined=False)
                contents.add(unit.quarantine, span, quarantined=True)
                digests |= {one.number: contents.digest(one.span) for one in chunk}
                progress(len(digests))
    return digests
