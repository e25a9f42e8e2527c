"""The shuffled bytes and the memory of a report on traffic, for growing lakes of texts made without a log."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as pads

from benches.job_memory import job_command, run
from benches.job_stages import logging_conf, read_job
from benches.measures import Measure, tenfold
from benches.pipeline_lakes import add_made
from benches.pipeline_packets import Made

__all__ = ["measure"]

_TARGET = 200
_DAY = 86_400
_FIRST = 100_000


def measure(rows: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    """The figures for lakes of 10⁵, 10⁶, … and `rows` packets; three in four have a text."""
    day = int(time.time()) // _DAY - 1
    lake, there = folder / "traffic-lake", 0
    measures: list[Measure] = []
    for size in tenfold(_FIRST, rows):
        authors = max(200, rows // 50)
        add_made(lake, Made(size - there, False, day * _DAY, _DAY - 1, there, authors, varied=True))
        there = size
        measures += _report(lake, size, folder, say)
    shutil.rmtree(lake)
    return measures


def _report(lake: Path, rows: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    events, output = folder / "traffic-events", folder / "traffic-report"
    events.mkdir()
    ran = run(job_command("traffic", lake, "--output", str(output), *logging_conf(events)))
    texts = pc.sum(pads.dataset(output / "author_hours").to_table(columns=["texts"])["texts"]).as_py()
    job = read_job(events)
    for done in (events, output):
        shutil.rmtree(done)
    bytes_a_text = job.shuffled / texts
    say(f"traffic: {rows:,} packets, {bytes_a_text:,.0f} bytes a text, {ran.peak_mb:,.0f} MB")
    by_size = sorted(job.stages, key=lambda stage: stage.shuffled, reverse=True)
    details = {
        "texts": texts,
        "spilled, bytes": job.spilled,
        "stages, bytes a text": {
            f"{at}. {stage.name}": stage.shuffled / texts for at, stage in enumerate(by_size[:8], 1)
        },
    }
    what = f"{rows:,} packets"
    return [
        Measure(
            "traffic",
            f"{what}, shuffled for a text",
            bytes_a_text,
            "bytes",
            _TARGET,
            at_most=True,
            details=details,
        ),
        Measure("traffic", f"{what}, peak memory", ran.peak_mb, "MB", details=ran.details),
        Measure("traffic", f"{what}, rate", rows / ran.seconds, "packets/s"),
    ]
