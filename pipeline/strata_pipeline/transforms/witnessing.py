"""When other relays first received rows of the log: gathered for a batch, and compared with a lake.

The times become a file of their own, so they must not be written with the rows. They come to this process as
the result of an observation: a few bytes for each row that has such a time, and no second read of the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.provenance.manifest import CLIENT_MANIFEST

from strata_pipeline.errors import LakeError
from strata_pipeline.lake.chain import Chain
from strata_pipeline.lake.witnesses import Witnesses
from strata_pipeline.lake_format import encode_witnesses
from strata_pipeline.planning import parallelism

__all__ = ["differing_witnesses", "gathered_witnesses", "witnessed_rows", "witnesses_text"]

_TASKS_PER_CORE = 4
_DDL = "sequence bigint, witnessed_at bigint"
_SCHEMA = pa.schema([("sequence", pa.int64()), ("witnessed_at", pa.int64())])
_SETTLED_TYPES = (*sorted(IDENTITY_TYPES), CLIENT_MANIFEST)
"""The types of packets for which a relay never adopts an earlier time afterwards (R-368)."""


def gathered_witnesses() -> Column:
    """The aggregate for an observation of the log; null if no row has a time."""
    line = F.concat_ws(",", "sequence", "witnessed_at")
    return F.listagg(F.when(F.col("witnessed_at").isNotNull(), line), F.lit("\n"))


def witnesses_text(gathered: str | None) -> bytes:
    """The file for what was gathered, in any order."""
    rows = (line.split(",") for line in (gathered or "").split())
    return encode_witnesses(sorted((int(sequence), int(at)) for sequence, at in rows))


def witnessed_rows(
    spark: SparkSession, chain: Chain, witnesses: Witnesses, days: Sequence[int], after: int = 0
) -> DataFrame:
    """The rows (sequence, witnessed_at) in the files of batches of these days that end after a sequence. A
    damaged file is left out: it is a fault of its batch.

    Tasks read the manifests themselves: all of them would not fit into this process.
    """

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for share in (one for batch in batches for one in batch.to_pylist()):
            for manifest in chain.of_day(share["day"])[share["number"] :: share["among"]]:
                if not manifest.witnesses or manifest.up_to <= after:
                    continue
                try:
                    times = witnesses.times_of([manifest])
                except LakeError:
                    continue
                yield pa.RecordBatch.from_arrays(list(map(pa.array, times)), schema=_SCHEMA)

    if not days:
        return spark.createDataFrame([], _DDL)
    tasks = _TASKS_PER_CORE * parallelism(spark)
    among = -(-tasks // len(days))  # of a few days, each is read by several tasks
    shares = [(day, number, among) for day in days for number in range(among)]
    asked = spark.createDataFrame(shares, "day long, number long, among long")
    return asked.repartition(min(len(shares), tasks)).mapInArrow(read, _DDL)


def differing_witnesses(lake: DataFrame, log: DataFrame) -> DataFrame:
    """The `sequence`, `packet_id` and `reason` of each row of a log that was first received at another time
    than the lake says, which has rows of `witnessed_rows`.

    An earlier time in the log is right, except for packets about keys: the relay has learned it since.
    """
    mine, theirs = F.col("lake.witnessed_at"), F.col("log.witnessed_at")
    joined = log.alias("log").join(
        lake.alias("lake"), F.col("log.sequence") == F.col("lake.sequence"), "left_outer"
    )
    is_settled = F.col("content_type").isin(*_SETTLED_TYPES)
    is_earlier = F.coalesce(theirs, "received_at") < F.coalesce(mine, "received_at")
    return joined.where(~mine.eqNullSafe(theirs) & (is_settled | ~is_earlier)).select(
        F.col("log.sequence").alias("sequence"), "packet_id", F.lit("witness").alias("reason")
    )
