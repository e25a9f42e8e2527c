"""Large lakes for the benchmarks, made without a log and without Spark: files and chain as an archive writes
them."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from strata.protocol.lake import FORMAT, Manifest, Span, day_of, first_of_day
from strata_pipeline.lake import files
from strata_pipeline.lake.contents import contents_of
from strata_pipeline.lake.kinds import kind_of
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.rows import digest_of, read_places
from strata_pipeline.log.spans import DEFAULT_BATCH_ROWS

from benches.pipeline_log import Made, Row, made_rows

__all__ = ["Maker", "add_made", "add_rows", "batches_added"]

Maker = Callable[[range], list[Row]]
"""The packets of these numbers; it is sent to other processes."""

_CHUNK = 5_000
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
    """What a process tells of a batch that it has written."""

    rows: str
    contents: str
    body_bytes: int
    kinds: dict[str, int]
    last: Row


def add_made(lake: Path, made: Made, batch_rows: int = DEFAULT_BATCH_ROWS) -> None:
    """Add the packets that `append` would put into a log; the lake has none of a later day."""
    add_rows(lake, partial(made_rows, made=made), made.rows, made.at // 86_400, batch_rows)


def add_rows(path: Path, maker: Maker, rows: int, day: int, batch_rows: int = DEFAULT_BATCH_ROWS) -> None:
    """Add packets 0, 1, … of a maker to a day of a lake, behind what the day has, in batches."""
    for _ in batches_added(path, maker, rows, day, batch_rows):
        pass


def batches_added(path: Path, maker: Maker, rows: int, day: int, batch_rows: int) -> Iterator[None]:
    """The same, with a pause after each batch."""
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


@contextmanager
def _writing(rows: int) -> Iterator[Callable[..., Future[_Written]]]:
    """Calls a function in a process of its own, or at once where it has little to do."""
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
    """Write a batch as an archive's only task would."""
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
        digest_of(read_places(packets)), contents_of(packets, [], span), body_bytes, dict(kinds), last
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
            format=FORMAT,
            number=lake.chain.end.number,
            after=span.after,
            up_to=span.up_to,
            packets=sum(told.kinds.values()),
            quarantined=0,
            rows=told.rows,
            contents=told.contents,
            body_bytes=told.body_bytes,
            kinds=told.kinds,
            last_packet_id=told.last[2].hex(),
            last_received_at=told.last[0],
            written_at=int(time.time()),
            previous=lake.tip,
        ),
        staged / "packets",
        None,
    )
