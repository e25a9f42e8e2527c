"""Large lakes for the benchmarks, made without a log and without Spark, with the files and the chain that an
archive would write."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from strata.protocol.sequences import Span, day_of, first_of_day
from strata_pipeline.lake import files
from strata_pipeline.lake.contents import contents_of
from strata_pipeline.lake.kinds import kind_of
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import batch_path
from strata_pipeline.lake.rows import digest_of, read_places
from strata_pipeline.lake_format import Manifest
from strata_pipeline.log.spans import DEFAULT_BATCH_ROWS

from benches.pipeline_packets import Made, Row, made_rows

__all__ = ["Maker", "add_copies", "add_made", "add_rows", "add_same", "batches_added"]

Maker = Callable[[range], list[Row]]
"""Makes the packets with these numbers; it is sent to other processes."""

_CHUNK = 5_000
_ID_BYTES = 32
_SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("received_at", pa.int64(), nullable=False),
        pa.field("timestamp", pa.int64(), nullable=False),
        pa.field("expires_at", pa.int64()),
        pa.field("packet_id", pa.binary(), nullable=False),
        pa.field("author_id", pa.string(), nullable=False),
        pa.field("content_type", pa.string(), nullable=False),
        pa.field("size", pa.int32(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
        pa.field("annotation", pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True)
class _Written:
    """A process's report on a batch that it has written."""

    rows: str
    contents: str
    body_bytes: int
    kinds: dict[str, int]
    last_id: bytes
    last_received_at: int


def add_made(lake: Path, made: Made, batch_rows: int = DEFAULT_BATCH_ROWS) -> None:
    """Add the packets that `append` would put into a log; the lake must have none of a later day."""
    add_rows(lake, partial(made_rows, made=made), made.rows, made.at // 86_400, batch_rows)


def add_rows(path: Path, maker: Maker, rows: int, day: int, batch_rows: int = DEFAULT_BATCH_ROWS) -> None:
    """Add packets 0, 1, … of a maker to a day of a lake, after those that the day has, in batches."""
    for _ in batches_added(path, maker, rows, day, batch_rows):
        pass


def batches_added(path: Path, maker: Maker, rows: int, day: int, batch_rows: int) -> Iterator[None]:
    """Do the same as `add_rows`, and yield after each batch."""
    with Lake.write(path) as lake, _writing(min(rows, batch_rows)) as submit:
        place = lake.reached if day_of(lake.reached) == day else first_of_day(day)
        work = [range(first, min(first + batch_rows, rows)) for first in range(0, rows, batch_rows)]

        def begin(numbers: range) -> Future[_Written]:
            return submit(_write, lake.root / "_bench" / str(numbers.start), maker, numbers, place)

        waiting = [begin(numbers) for numbers in work[:2]]
        for number, numbers in enumerate(work):
            told = waiting.pop(0).result()
            waiting += map(begin, itertools.islice(work, number + 2, number + 3))
            _commit(lake, lake.root / "_bench" / str(numbers.start), told, place + numbers.stop)
            yield
        files.remove(lake.root / "_bench")


def add_copies(path: Path, rows: int) -> None:
    """Append copies of the batches of the last day of a lake until the day has this many packets.

    A copy has its own places and ids, and the bodies of its source: that is enough for jobs that count and
    sort, and takes a fraction of the time.
    """
    with Lake.write(path) as lake, _writing(rows) as submit:
        day = lake.days()[-1]
        sources = lake.chain.of_day(day)
        place, waiting = lake.reached, list[tuple[Path, int, Future[_Written]]]()
        for number, source in enumerate(itertools.cycle(sources)):
            is_enough = place - first_of_day(day) >= rows
            while waiting and (is_enough or len(waiting) > 1):
                folder, up_to, told = waiting.pop(0)
                _commit(lake, folder, told.result(), up_to)
            if is_enough:
                break
            first = max(source.after, first_of_day(day))
            folder = lake.root / "_bench" / str(number)
            batch = lake.packets / batch_path(source.span)
            waiting.append(
                (folder, place + source.packets, submit(_copy, folder, batch, place - first, number))
            )
            place += source.packets
        files.remove(lake.root / "_bench")


def add_same(path: Path, other: Path) -> None:
    """Add the batches of the last day of another lake that this one lacks, as hard links to their files."""
    source = Lake.open(other)
    with Lake.write(path) as lake:
        for manifest in source.chain.of_day(source.days()[-1]):
            if manifest.up_to <= lake.reached:
                continue
            staged = lake.stage(Span(lake.reached, manifest.up_to))
            packets = source.packets / batch_path(manifest.span)
            shutil.copytree(packets, staged / "packets", copy_function=os.link)
            again = msgspec.structs.replace(
                manifest, number=lake.chain.end.number, after=lake.reached, previous=lake.tip
            )
            lake.commit(again, staged / "packets", None)


def _copy(folder: Path, batch: Path, shift: int, number: int) -> _Written:
    """Write a copy of a batch, with its places moved by `shift`."""
    drawn = np.random.default_rng(number)
    last, body_bytes, kinds = (-1, 0, b""), 0, {}
    for path in sorted(batch.glob("kind=*/*.parquet")):
        with pq.ParquetFile(path) as file:
            table = file.read()
        sequences = pc.add(table["sequence"], shift)
        ids = pa.array([drawn.bytes(_ID_BYTES) for _ in range(table.num_rows)], pa.binary())
        table = table.set_column(0, _SCHEMA.field("sequence"), sequences)
        table = table.set_column(4, _SCHEMA.field("packet_id"), ids)
        target = folder / "packets" / path.parent.name / path.name
        target.parent.mkdir(parents=True)
        pq.write_table(table, target, compression="zstd", row_group_size=_CHUNK)
        last = max(last, (sequences[-1].as_py(), table["received_at"][-1].as_py(), ids[-1].as_py()))
        body_bytes += pc.sum(table["size"]).as_py()
        kinds[path.parent.name.removeprefix("kind=")] = table.num_rows
    packets = [folder / "packets"]
    span = Span(last[0] - sum(kinds.values()), last[0])
    return _Written(
        digest_of(read_places(packets)), contents_of(packets, [], span), body_bytes, kinds, last[2], last[1]
    )


@contextmanager
def _writing(rows: int) -> Iterator[Callable[..., Future[_Written]]]:
    """A way to call functions: in other processes, or at once if there is little to do."""
    if rows <= _CHUNK:
        yield _at_once
        return
    # Forked processes would hold the lock of the lake.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield pool.submit


def _at_once(function: Callable[..., _Written], *arguments: object) -> Future[_Written]:
    done = Future[_Written]()
    done.set_result(function(*arguments))
    return done


def _write(folder: Path, maker: Maker, numbers: range, place: int) -> _Written:
    """Write a batch as a single task of an archive would."""
    writers: dict[str, pq.ParquetWriter] = {}
    kinds: Counter[str] = Counter()
    body_bytes = 0
    last: Row | None = None
    for start in range(numbers.start, numbers.stop, _CHUNK):
        by_kind: dict[str, list[tuple[int, Row]]] = {}
        for number, row in enumerate(maker(range(start, min(start + _CHUNK, numbers.stop))), start + 1):
            by_kind.setdefault(kind_of(row[4].decode()), []).append((place + number, row))
            body_bytes += len(row[5])
            last = row
        for kind, some in by_kind.items():
            if kind not in writers:
                target = folder / "packets" / f"kind={kind}"
                target.mkdir(parents=True)
                writers[kind] = pq.ParquetWriter(target / "part-0.zstd.parquet", _SCHEMA, compression="zstd")
            writers[kind].write_batch(_batch(some))
            kinds[kind] += len(some)
    for writer in writers.values():
        writer.close()
    span = Span(place + numbers.start, place + numbers.stop)
    packets = [folder / "packets"]
    assert last is not None
    return _Written(
        digest_of(read_places(packets)),
        contents_of(packets, [], span),
        body_bytes,
        dict(kinds),
        last[2],
        last[0],
    )


def _batch(rows: list[tuple[int, Row]]) -> pa.RecordBatch:
    received, stamps, ids, authors, types, bodies = zip(*(row for _, row in rows), strict=True)
    nothing = [None] * len(rows)
    columns = (
        [sequence for sequence, _ in rows],
        received,
        stamps,
        nothing,
        ids,
        [author.decode() for author in authors],
        [name.decode() for name in types],
        [len(body) for body in bodies],
        bodies,
        nothing,
    )
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _commit(lake: Lake, folder: Path, told: _Written, up_to: int) -> None:
    span = Span(lake.reached, up_to)
    staged = lake.stage(span)
    folder.rename(staged)
    lake.commit(
        Manifest(
            number=lake.chain.end.number,
            after=span.after,
            up_to=span.up_to,
            packets=sum(told.kinds.values()),
            quarantined=0,
            rows=told.rows,
            contents=told.contents,
            body_bytes=told.body_bytes,
            kinds=told.kinds,
            last_packet_id=told.last_id.hex(),
            last_received_at=told.last_received_at,
            written_at=int(time.time()),
            previous=lake.tip,
        ),
        staged / "packets",
        None,
    )
