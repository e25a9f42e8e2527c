"""Publishing a Delta log after each batch of a long chain: the time of the first commits, and of the last."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deltalake import DeltaTable
from strata_pipeline.lake.delta import publish
from strata_pipeline.lake.lake import Lake

from benches.measures import Measure
from benches.pipeline_lakes import batches_added
from benches.pipeline_packets import Made, made_rows

__all__ = ["measure"]

_TARGET_MS = 50
_DAY = 86_400
_BATCH_ROWS = 20
_SHARE = 10
"""The first tenth of the commits is compared with the last."""


def measure(commits: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    """The time of each of many publishes, as a long-running `archive --delta` makes them; all batches are of
    one day."""
    lake, day = folder / "delta-lake", int(time.time()) // _DAY - 1
    rows = commits * _BATCH_ROWS
    maker = partial(made_rows, made=Made(rows, False, day * _DAY, _DAY - 1))
    published: list[float] = []
    opening: list[float] = []
    computed: list[float] = []
    for number, _ in enumerate(batches_added(lake, maker, rows, day, _BATCH_ROWS)):
        began, worked = time.perf_counter(), time.process_time()
        found = Lake.open(lake)
        between = time.perf_counter()
        done = publish(found, days=())
        ended = time.perf_counter()
        assert done.version == number and done.rows == (number + 1) * _BATCH_ROWS
        opening.append(1e3 * (between - began))
        published.append(1e3 * (ended - between))
        computed.append(1e3 * (time.process_time() - worked))
        if number % max(1, commits // _SHARE) == 0:
            say(f"delta: publish {number:,}: {published[-1]:,.0f} ms")
    table = DeltaTable(lake / "generations")
    assert table.version() == commits - 1 and table.to_pyarrow_dataset().count_rows() == rows
    shutil.rmtree(lake)
    few = max(1, commits // _SHARE)
    first, last = slice(None, few), slice(-few, None)
    return [
        Measure(
            "delta",
            f"a publish, {what} {few:,} of {commits:,}, median",
            statistics.median(published[some]),
            "ms",
            _TARGET_MS,
            at_most=True,
            limit=statistics.median(published[first]),
            limit_name=f"the first {few:,}",
            details={
                "worst": max(published[some]),
                "opening the lake before it": statistics.median(opening[some]),
                "CPU of both": statistics.median(computed[some]),
            },
        )
        for what, some in (("first", first), ("last", last))
    ]
