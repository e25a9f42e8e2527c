"""Small lakes in a bucket, made without a log and without Spark; and a writer killed at a given request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from blake3 import blake3
from strata.protocol.ids import Identity
from strata.protocol.sequences import Span
from strata.protocol.tombstones import Tombstone, sign_tombstone
from strata_pipeline.jobs.object_days import Found, Run, compact_day, erase_from_day, still_there
from strata_pipeline.jobs.parts import PartDone, PartWork, rewrite_part
from strata_pipeline.lake.attempts import ROOTS, Attempt
from strata_pipeline.lake.batches import Batch
from strata_pipeline.lake.object_lake import DELTA_LOG, ObjectLake
from strata_pipeline.lake.rewrite_attempts import Grace
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake_format import Manifest, StoredObject, witnesses_name

from tests.support.file_faults import Killed
from tests.support.toy_lakes import DAY, manifest_once, place, rows_file, rows_table, witnessed

__all__ = [
    "NO_GRACE",
    "begin_with",
    "compacted",
    "drafted",
    "erased",
    "inline",
    "named",
    "put_batch",
    "requests",
    "rows",
    "rows_apart",
    "tombstones",
    "unnamed",
]

NO_GRACE = Grace(timedelta(), timedelta())


def drafted(
    lake: ObjectLake, ordinals: Iterable[int], quarantined: Iterable[int] = (), *, day: int = DAY
) -> tuple[Manifest, Attempt, list[StoredObject]]:
    """A batch whose objects are in the bucket, two kinds of packets; returns the arguments of `commit`."""
    sound, aside = [place(n, day) for n in ordinals], [place(n, day) for n in quarantined]
    span = Span(lake.reached, max([*sound, *aside]))
    attempt = lake.begin(span)
    objects = [
        _put(lake, attempt.object_name("packets", kind), rows_file(tuple(some), kind=kind), len(some))
        for kind, some in (("POST", sound[::2]), ("NOTE", sound[1::2]))
        if some
    ]
    if aside:
        content = rows_file(tuple(aside), quarantined=True)
        objects.append(_put(lake, attempt.object_name("quarantine", None), content, len(aside)))
    with lake.shelf.at_hand(objects) as (folder, faults):
        assert faults == []
        packets, quarantine = (
            [path] if (path := Path(folder, attempt.folder(root))).is_dir() else []
            for root in ("packets", "quarantine")
        )
        manifest = manifest_once(lake, span, sound, aside, packets, quarantine)
    return manifest, attempt, objects


def put_batch(
    where: str,
    ordinals: Iterable[int],
    quarantined: Iterable[int] = (),
    *,
    day: int = DAY,
    grace: Grace = NO_GRACE,
    times: Mapping[int, int] | None = None,
) -> Manifest:
    """Add a batch to a lake."""
    with ObjectLake.write(where, grace) as lake:
        manifest, attempt, objects = drafted(lake, ordinals, quarantined, day=day)
        text = b""
        if times is not None:
            manifest, text = witnessed(manifest, times)
        return lake.commit(manifest, attempt, objects, text)


def rows(where: str) -> list[int]:
    """The sequences found by a reader of manifests, with each batch checked against its manifest."""
    lake = ObjectLake.open(where)
    found: list[int] = []
    for manifest in lake.manifests:
        with lake.at_hand([manifest]) as layout:
            batch = Batch.read(layout, manifest)
            batch.check_contents()
        found += batch.rows["sequence"].to_pylist()
    return found


def rows_apart(where: str) -> tuple[list[int], list[int]]:
    """The sequences of packets, and those of quarantined rows; each batch is checked against its manifest."""
    lake = ObjectLake.open(where)
    packets: list[int] = []
    aside: list[int] = []
    with lake.at_hand(lake.manifests) as layout:
        for day in lake.days():
            batch = Batch.read(layout, *lake.chain.of_day(day))
            batch.check_contents()
            packets += batch.packets["sequence"].to_pylist()
            aside += set(batch.rows["sequence"].to_pylist()) - set(packets)
    return packets, sorted(aside)


def begin_with(where: str, other: str) -> None:
    """Make a lake from all objects of another."""
    source, target = (ObjectLake.open(other).store, ObjectStore.at(where))
    names = list(source.keys(""))
    for name, content in zip(names, source.get_all(names), strict=True):
        target.put(name, content)


def inline(lake: ObjectLake, works: Sequence[PartWork]) -> list[PartDone]:
    """Do the work of tasks here, without Spark."""
    return [rewrite_part(lake.store, work) for work in works]


def compacted(where: str, day: int = DAY, part_bytes: int = 1_000, run: Run = inline) -> bool:
    """Compact a day of a lake; returns whether there was anything to do."""
    with ObjectLake.replace(where) as lake:
        return compact_day(lake, day, run, part_bytes) is not None


def tombstones(*sequences: int) -> Found:
    """The tombstones of packets of toy lakes."""
    signer = Identity(bytes(32))
    found = {}
    for sequence in sequences:
        row = rows_table([sequence]).to_pylist()[0]
        tombstone = Tombstone(f"0x{row['packet_id'].hex()}", sequence, row["received_at"], 7, signer.did)
        found[sequence] = tombstone, sign_tombstone(tombstone, signer)
    return found


def erased(where: str, *sequences: int, day: int = DAY, run: Run = inline) -> int:
    """Erase packets from a day of a lake, and from its quarantine; returns how many were still there."""
    with ObjectLake.replace(where) as lake:
        found = still_there(lake, day, tombstones(*sequences)).found
        return erase_from_day(lake, day, found, run).rows if found else 0


def named(lake: ObjectLake) -> set[str]:
    """The objects that the lake's manifests name."""
    return {one.name for root in ROOTS for one in lake.objects(lake.manifests, root)}


def unnamed(where: str) -> list[str]:
    """Objects in the bucket that are no part of the lake, except probes, which stay for an hour, and
    published objects."""
    lake = ObjectLake.open(where)
    listings = len(list(lake.store.keys("_objects"))) - len(lake.manifests)
    listings += len(list(lake.store.keys("_days"))) - len(lake.generations.records)
    listings += len(list(lake.store.keys("_erased/"))) - len(lake.erasures.records)
    there = {name for root in ("packets", "quarantine", "_attempts") for name in lake.store.keys(root)}
    there |= set(lake.store.keys("_witnesses")) - {
        f"_witnesses/{witnesses_name(one)}" for one in lake.manifests if one.witnesses
    }
    apart = ("_attempts/probe-", f"{DELTA_LOG}/")
    others = {name for name in there - named(lake) if not name.startswith(apart)}
    return sorted(others) + ["a listing"] * listings


@contextmanager
def requests(last: int | None = None) -> Iterator[list[str]]:
    """Let the process send `last` requests that change something, and kill it before the next; None for no
    limit.

    Being killed after a request is the same as being killed before the next one.
    """
    sent: list[str] = []

    def through(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: object, path: str, *arguments: Any, **options: Any) -> Any:
            if last is not None and len(sent) >= last:
                raise Killed
            sent.append(f"{name} {path}")
            return real(store, path, *arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("put", "delete"):
            patch.setattr(obstore, name, through(name, getattr(obstore, name)))
        yield sent


def _put(lake: ObjectLake, name: str, content: bytes, rows: int) -> StoredObject:
    lake.store.put(name, content)
    return StoredObject(name=name, size=len(content), rows=rows, hash=blake3(content).hexdigest())
