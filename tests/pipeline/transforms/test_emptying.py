"""What batches hold after an erasure."""

from __future__ import annotations

from pathlib import Path

from strata.protocol.sequences import Span
from strata_pipeline.jobs.copy_files import write_without
from strata_pipeline.lake import checking
from strata_pipeline.lake.contents import Contents
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.rows import places_at
from strata_pipeline.transforms.emptying import emptied, erased_batches

from tests.support.toy_lakes import DAY, place, write_batch


def test_only_the_rows_of_a_few_batches_are_in_memory_at_a_time(tmp_path, monkeypatch):
    write_batch(tmp_path, [1, 2], [3])
    write_batch(tmp_path, [4, 5])
    write_batch(tmp_path, [6, 7])
    lake = Lake.open(tmp_path)
    old, manifests, erased = lake.day(DAY), lake.manifests, [place(2), place(4)]
    gone = emptied(places_at(old.packets, erased))
    spans = [one.span for one in manifests]
    new = write_without(old, gone, spans, tmp_path, tmp_path / "new", "erased")
    found = erased_batches(manifests, old, new, erased)
    assert [(one.manifest, one.packets, one.quarantined, one.kinds) for one in found] == [
        (manifests[0].hash, 1, 2, {"POST": 1}),
        (manifests[1].hash, 1, 1, {"NOTE": 1}),
    ]
    read: list[tuple[int, Span]] = []
    contents_of = Contents.of

    def counted(packets: list[Path], quarantine: list[Path], span: Span) -> Contents:
        read.append((len(packets), span))
        return contents_of(packets, quarantine, span)

    monkeypatch.setattr(Contents, "of", counted)
    monkeypatch.setattr(checking, "_CHUNK_ROWS", 1)
    assert erased_batches(manifests, old, new, erased) == found
    assert read == [(1, span) for span in spans for _ in (old, new)]
