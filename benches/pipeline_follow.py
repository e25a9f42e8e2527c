"""The single task that follows the acknowledgements of a hot channel, without Spark: the memory of its
process, and its CPU time, as the channel grows.

It gets the rows that Spark would give it, five thousand at a time.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pyarrow as pa
from strata_pipeline.transforms.acknowledgements import follow_rows

from benches.measures import Measure, tenfold

__all__ = ["batches", "measure"]

_TARGET_MB = 2_000
_FIRST = 100_000
_GIVEN = 5_000
_PARTICIPANTS = 20
_ODD = np.uint64(0x9E3779B97F4A7C15)


def measure(rows: int, say: Callable[[str], None]) -> list[Measure]:
    """The figures for channels of 10⁵, 10⁶, … and `rows` messages."""
    measures: list[Measure] = []
    for size in tenfold(_FIRST, rows):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            messages, peak, seconds = pool.submit(_follow, size).result()
        if messages != size:
            raise SystemExit(f"{messages:,} messages were followed, and not {size:,}")
        say(f"follow: {size:,} messages: {peak:,.0f} MB, {seconds:,.1f} s of the processor")
        measures += [
            Measure(
                "follow",
                f"{size:,} messages of one channel, peak of the process",
                peak,
                "MB",
                _TARGET_MB,
                at_most=True,
                details={"bytes a message": peak * 2**20 / size},
            ),
            Measure("follow", f"{size:,} messages for a second of the processor", size / seconds, "/s"),
        ]
    return measures


def batches(rows: int) -> Iterator[pa.RecordBatch]:
    """The packets of a channel whose participants take turns; each message names the two before it."""
    for start in range(0, rows, _GIVEN):
        numbers = np.arange(start, min(start + _GIVEN, rows))
        earlier = np.stack([numbers - 2, numbers - 1], axis=1)
        is_there = earlier >= 0
        lengths = is_there.sum(axis=1)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        yield pa.RecordBatch.from_pydict(
            {
                "sequence": numbers + 1,
                "received_at": numbers // 100,
                "sender_id": [f"participant-{number % _PARTICIPANTS}" for number in numbers.tolist()],
                "content": _names(numbers),
                "history": pa.ListArray.from_arrays(pa.array(offsets), pa.array(_names(earlier[is_there]))),
            }
        )


def _names(numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return (numbers.astype(np.uint64) * _ODD).view(np.int64)


def _follow(rows: int) -> tuple[int, float, float]:
    began = time.process_time()
    found = sum(batch.num_rows for batch in follow_rows(batches(rows)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found, peak, time.process_time() - began
