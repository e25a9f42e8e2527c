"""A chain of format 1 rewritten in format 2: each batch gets the digest of its bodies and annotations.

The new chain is written aside and changes places with the old one, which stays in `_aside`: it proves tips
that were noted earlier. Records of erasures name batches by the hashes of their manifests, and each manifest
after a changed one has another hash. So first the records are made to name each batch by both hashes, and
thus mean the same with the old chain and with the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from strata.protocol.lake import (
    FORMAT,
    GENESIS,
    Erasure,
    Manifest,
    encode,
    encode_erasure,
    migrated,
    seal_erasure,
)

from strata_pipeline.errors import LakeError
from strata_pipeline.lake import files
from strata_pipeline.lake.chain import manifest_name
from strata_pipeline.lake.checking import batches_faults, chunks, units_of_day
from strata_pipeline.lake.contents import Contents
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import span_over

__all__ = ["migrate_chain"]


def migrate_chain(lake: Lake, progress: Callable[[int], None] = lambda batches: None) -> int:
    """Bring a lake's chain to the newest format; return how many batches had an older one.

    The caller holds the locks of `write` and of `replace`. `progress` is called with the number of batches
    read so far. Raises `LakeError` if files and manifests disagree; then nothing was changed.
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
        (staged / manifest_name(manifest.number)).write_bytes(encode(chain[-1]))
    files.make_durable(staged)
    _name_by_both(lake, {old.hash: new.hash for old, new in zip(lake.manifests, chain, strict=True)})
    files.exchange(lake.manifests_folder, staged)
    files.move(staged, lake.aside, "manifests-format-1")
    files.remove_if_empty(lake.staging)
    lake.chain.replace(chain)
    return older


def _name_by_both(lake: Lake, became: Mapping[str, str]) -> None:
    """Make the records of erasures name each batch by the old and by the new hash of its manifest."""
    if not lake.erasures.records:
        return
    staged = lake.staging / "erased"
    files.remove(staged)
    files.make_folder(staged)
    previous = GENESIS
    for record in lake.erasures.records:
        text = lake.erasures.text_of(record)
        batches = {one.manifest: one for one in record.batches}
        batches |= {
            became[old]: msgspec.structs.replace(one, manifest=became[old])
            for old, one in batches.items()
            if old in became
        }
        told = msgspec.structs.replace(record, batches=list(batches.values()), previous=previous)
        sealed: Erasure = seal_erasure(told)
        name, tombstones = lake.erasures.names(record.number)
        (staged / name).write_bytes(encode_erasure(sealed))
        (staged / tombstones).write_bytes(text)
        previous = sealed.hash
    files.make_durable(staged)
    files.exchange(lake.erased, staged)
    files.move(staged, lake.aside, "erased-format-1")
    lake.erasures.load()


def _digests(lake: Lake, progress: Callable[[int], None]) -> dict[int, str]:
    """The second digest of each batch that has none, by the number of its manifest."""
    digests: dict[int, str] = {}
    for day in lake.days():
        for unit in units_of_day(lake, day, lake.chain.of_day(day)):
            for chunk in chunks(one for one in unit.manifests if one.format < FORMAT):
                faults = batches_faults(chunk, unit.packets, unit.quarantine)
                if faults:
                    raise LakeError(f"{faults[0].detail}. Nothing was changed; run audit")
                contents = Contents.of(unit.packets, unit.quarantine, span_over(chunk))
                digests |= {one.number: contents.digest(one.span) for one in chunk}
                progress(len(digests))
    return digests
