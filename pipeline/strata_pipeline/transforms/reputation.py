"""One score for each relay from the probe logs of many clients, computed by the client's own code.

The last digit of a score depends on the order in which its numbers are added. So the observations of a relay
are sorted by time and passed, one after the other, to the client's own `pool.reputation`: a client with the
same observations gets exactly the same figures. A relay needs a few hundred sums, so memory use does not grow
with the number of clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from strata.relays.conduct import WINDOW_SECONDS, Aspect
from strata.relays.pool.reputation import Observation, Reputation

from strata_pipeline.datasets.probes import Probes, RelayScores
from strata_pipeline.schemas import schema

__all__ = ["FUTURE", "OLD", "read_probes", "relay_scores"]

FUTURE = "future"
"""The reason of an observation later than the time of the scores: some clock was wrong."""
OLD = "old"
"""The reason of an observation older than seven days."""

_HOUR = 3600
_OBSERVED = ("url", "at", "kind", "good", "bad", "value")
_PROBES = pa.schema(
    [
        ("url", pa.string()),
        ("at", pa.float64()),
        ("kind", pa.string()),
        ("good", pa.int64()),
        ("bad", pa.int64()),
        ("value", pa.float64()),
        ("reason", pa.string()),
        ("line", pa.binary()),
        ("file", pa.string()),
    ]
)
_SCORES = pa.schema(
    [
        ("url", pa.string()),
        ("standing", pa.string()),
        ("score", pa.float64()),
        ("integrity", pa.float64()),
        ("latency_seconds", pa.float64()),
        ("throughput_bytes", pa.float64()),
        ("uptime", pa.float64()),
        ("last_seen_at", pa.float64()),
        ("observations", pa.int64()),
    ]
)

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
# Seconds, or bytes per second. Sums of much larger values are infinite, and their score is not a number.
_Value = Annotated[float, msgspec.Meta(ge=0, le=2**53)]


class _Line(msgspec.Struct, gc=False):
    """A line of a probe log; other members come from a newer client and are ignored."""

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    at: Annotated[float, msgspec.Meta(ge=0)]
    kind: Aspect
    good: _Count = 0
    bad: _Count = 0
    value: _Value | None = None


_DECODER = msgspec.json.Decoder(_Line)


def read_probes(lines: DataFrame, now: float) -> Probes:
    """Lines of probe logs (columns `line`, binary, and `file`), judged as of a time. Empty ones are left
    out."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = batch.column("line").to_pylist(), batch.column("file").to_pylist()
            rows = [_row(line, file, now) for line, file in zip(*columns, strict=True) if line.strip()]
            yield pa.RecordBatch.from_pylist(rows, schema=_PROBES)

    return Probes(lines.select("line", "file").mapInArrow(read, schema("probes")))


def relay_scores(probes: Probes, now: float) -> RelayScores:
    """Scores from the probes that count. A repeated probe counts once, because exports overlap."""

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = list(_scores(_observations(batches), now))
        yield pa.RecordBatch.from_pylist(rows, schema=_SCORES)

    counting = probes.frame.where(F.col("reason").isNull()).select(*_OBSERVED)
    by_relay = counting.repartition("url").sortWithinPartitions(*_OBSERVED)
    return RelayScores(by_relay.mapInArrow(score, schema("relay_scores")))


def _row(line: bytes, file: str, now: float) -> dict[str, Any]:
    try:
        told = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {"reason": "malformed", "line": line, "file": file}
    if not math.isfinite(told.at):
        return {"reason": "malformed", "line": line, "file": file}
    reason = None
    if told.at > now:
        reason = FUTURE
    elif told.at < (now - WINDOW_SECONDS) // _HOUR * _HOUR:  # scores count whole hours
        reason = OLD
    return msgspec.structs.asdict(told) | {"kind": told.kind.value, "reason": reason, "file": file}


def _observations(batches: Iterator[pa.RecordBatch]) -> Iterator[Observation]:
    last = None
    for batch in batches:
        for row in zip(*(batch.column(name).to_pylist() for name in _OBSERVED), strict=True):
            if row != last:
                url, at, kind, good, bad, value = last = row
                yield Observation(url, at, Aspect(kind), good, bad, value)


def _scores(observations: Iterator[Observation], now: float) -> Iterator[dict[str, Any]]:
    """The scores, one relay after the other."""
    reputation, url, count = Reputation(), None, 0
    for observation in observations:
        if url is not None and observation.url != url:
            yield _scored(reputation, url, now, count)
            reputation, count = Reputation(), 0
        url = observation.url
        count += 1
        reputation.record(observation)
    if url is not None:
        yield _scored(reputation, url, now, count)


def _scored(reputation: Reputation, url: str, now: float, count: int) -> dict[str, Any]:
    score = reputation.score(url, now)
    reputation.judge(url, now)
    saved = reputation.saved(url)
    return {
        "url": url,
        "standing": saved.standing.value,
        "score": score.value,
        "integrity": score.integrity,
        "latency_seconds": score.latency,
        "throughput_bytes": score.throughput,
        "uptime": score.uptime,
        "last_seen_at": saved.last_seen_at,
        "observations": count,
    }
