"""Finding texts that are nearly the same, without comparing all pairs.

A text is converted to lower case, its numbers are made alike, and it is cut into shingles of eight bytes; the
least value over all shingles is kept for each of 32 hash functions (MinHash). The share of equal values
estimates how many shingles two texts have in common. Four values at a time make a bucket, so a text is in
eight buckets, and texts that share nine tenths of their shingles almost surely meet in one of them; texts
that share a third hardly ever do.

Each text is compared only with the *first* text of each of its buckets, so the work grows with the number of
texts and not with its square. Buckets are shuffled once, at about eleven bytes for each that a text is in; a
task goes through its buckets in order and holds none of them. For a crowded bucket it reports only the first
text, which is sent to every task, so that an author with half the traffic costs no more than others.
Signatures are shuffled only for the texts that are to be compared, and samples only for those that are
repeated, which a filter of a fixed size finds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from blake3 import blake3
from numpy.typing import NDArray
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.traffic import Clusters, Meetings, NearDuplicates, Texts
from strata_pipeline.lake.kinds import CHANNEL, kind_of
from strata_pipeline.schemas import schema

__all__ = [
    "find_clusters",
    "find_meetings",
    "find_near_duplicates",
    "normalised",
    "read_texts",
    "signatures_of",
]

MIN_TEXT_BYTES = 32
"""The least size of a text that is compared: greetings are alike and harm nobody."""
MAX_TEXT_CHARACTERS = 4096
"""The most characters of a text that are compared."""
SIMILARITY = 0.75
"""Two texts are nearly the same if they share at least this fraction of their MinHash values."""

_SHINGLE_BYTES = 8
_HASHES = 32
_ROWS = 4
_CROWDED = 10_000
_SAMPLE_CHARACTERS = 120
_AT_ONCE = 64
"""The number of texts that are hashed at a time: the shingles of usual texts fit into the cache."""
_ARROW = to_arrow_schema(schema("texts"))

# Any odd numbers work, as long as they are the same on every machine.
_FACTORS = np.array(
    [int.from_bytes(blake3(b"near-duplicates %d" % n).digest(8), "little") | 1 for n in range(_HASHES)],
    np.uint64,
)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_number = re.compile(r"\d+")


class _Content(msgspec.Struct, gc=False):
    text: str | None = None


class _Body(msgspec.Struct, gc=False):
    content: _Content


_DECODER = msgspec.json.Decoder(_Body)


def read_texts(packets: Packets) -> Texts:
    """The packets with a `text` that is long enough to compare. Contents of channels do not count as text."""
    columns = ("sequence", "received_at", "author_id", "content_type", "body")
    return Texts(packets.frame.select(*columns).mapInArrow(_read, schema("texts")))


def find_meetings(texts: Texts) -> Meetings:
    """Which texts meet in a bucket. This shuffles all buckets: keep the result and use it twice."""
    buckets = texts.frame.select("sequence", F.explode(F.expr(_BUCKETS)).alias("bucket"))
    in_order = buckets.repartition("bucket").sortWithinPartitions("bucket", "sequence")
    return Meetings(in_order.mapInArrow(functools.partial(_meet, most=_CROWDED), schema("meetings")))


def find_near_duplicates(texts: Texts, meetings: Meetings) -> NearDuplicates:
    """The packets whose text is nearly that of an earlier one, each with the earliest one that it resembles
    among those that it was compared with."""
    like = _like_crowded(texts, meetings.frame).unionByName(_like_shared(texts, meetings.frame))
    return NearDuplicates(
        like.groupBy("sequence", "received_at", "author_id", "content_type").agg(
            F.min("first_sequence").alias("first_sequence")
        )
    )


def find_clusters(texts: Texts, near_duplicates: NearDuplicates) -> Clusters:
    """Repeated texts, with the number of copies and of authors."""
    # By author first: the copies of one text may be half of all packets.
    by_author = near_duplicates.frame.groupBy("first_sequence", "author_id").agg(
        F.count(F.lit(1)).alias("copies")
    )
    counted = by_author.groupBy("first_sequence").agg(
        F.sum("copies").alias("copies"), F.count(F.lit(1)).alias("authors")
    )
    repeated = _those_of(texts.frame, near_duplicates.frame.select(F.col("first_sequence").alias("sequence")))
    first = repeated.select(
        F.col("sequence").alias("first_sequence"), F.col("author_id").alias("first_author_id"), "sample"
    )
    return Clusters(counted.join(first, on="first_sequence", how="inner"))


_BUCKETS = (
    f"transform(sequence(0, {_HASHES // _ROWS - 1}), "
    f"i -> xxhash64(i, slice(signature, i * {_ROWS} + 1, {_ROWS})) & {2**44 - 1})"
)
"""Buckets have 44 bits: of 10⁹ texts, one in two thousand meets an unrelated one by chance."""


def _meet(batches: Iterator[pa.RecordBatch], *, most: int) -> Iterator[pa.RecordBatch]:
    """Turn buckets in order, each with its texts in order, into pairs of a text and the first of its bucket.

    For a bucket with more than `most` texts, also report the bucket with its first, in a row without a text.
    """
    bucket = first = -1
    rank = 0  # of the last text in its bucket
    for batch in batches:
        if not batch.num_rows:
            continue
        sequences, buckets = (batch.column(name).to_numpy() for name in ("sequence", "bucket"))
        begins = np.concatenate([[buckets[0] != bucket], buckets[1:] != buckets[:-1]])
        places = np.arange(len(buckets))
        begun = np.maximum.accumulate(np.where(begins, places, -1))
        goes_on = begun < 0  # continues the last bucket of the batch before
        ranks = np.where(goes_on, rank + 1 + places, places - begun)
        firsts = np.where(goes_on, first, sequences[np.maximum(begun, 0)])
        bucket, first, rank = int(buckets[-1]), int(firsts[-1]), int(ranks[-1])
        is_pair = (ranks > 0) & (ranks < most)
        if is_pair.any():
            nothing = pa.nulls(int(is_pair.sum()), pa.int64())
            yield _met(pa.array(sequences[is_pair]), pa.array(firsts[is_pair]), nothing)
        is_crowded = ranks == most
        if is_crowded.any():
            nothing = pa.nulls(int(is_crowded.sum()), pa.int64())
            yield _met(nothing, pa.array(firsts[is_crowded]), pa.array(buckets[is_crowded]))


def _met(*columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), names=["sequence", "first_sequence", "bucket"])


def _like_crowded(texts: Texts, met: DataFrame) -> DataFrame:
    """The texts like the first of a crowded bucket, without a shuffle: each task gets all these first
    texts."""
    crowded = F.broadcast(met.where("bucket IS NOT NULL").select("first_sequence", "bucket"))
    firsts = _firsts(texts.frame).join(crowded, on="first_sequence", how="inner")
    each = texts.frame.withColumn("bucket", F.explode(F.expr(_BUCKETS)))
    return _like_first(each.join(F.broadcast(firsts), on="bucket", how="inner"))


def _like_shared(texts: Texts, met: DataFrame) -> DataFrame:
    """The texts like the first of any other bucket: pairs are made distinct by number, and compared once."""
    pairs = met.where("bucket IS NULL").select("sequence", "first_sequence").distinct()
    some = _those_of(texts.frame, pairs.select(F.explode(F.array(*pairs.columns)).alias("sequence")))
    return _like_first(
        pairs.join(_firsts(some), on="first_sequence", how="inner").join(some, on="sequence", how="inner")
    )


def _firsts(texts: DataFrame) -> DataFrame:
    return texts.select(
        F.col("sequence").alias("first_sequence"), F.col("signature").alias("first_signature")
    )


def _those_of(texts: DataFrame, named: DataFrame) -> DataFrame:
    """The texts that are named by their `sequence`, and a few others. Each task gets a filter of at most 2²⁰
    words of 64 bits, in which each named text has set one bit."""
    words = named.groupBy(F.expr(f"{_BIT} div 64").alias("word")).agg(
        F.bit_or(F.expr(f"shiftleft(1L, cast({_BIT} % 64 AS int))")).alias("bits")
    )
    told = texts.withColumn("word", F.expr(f"{_BIT} div 64")).join(F.broadcast(words), on="word", how="inner")
    return told.where(F.expr(f"(shiftrightunsigned(bits, cast({_BIT} % 64 AS int)) & 1) = 1")).drop(
        "word", "bits"
    )


_BIT = f"pmod(xxhash64(sequence), {2**26}L)"


def _like_first(met: DataFrame) -> DataFrame:
    equal = F.size(
        F.filter(F.zip_with("signature", "first_signature", lambda a, b: a == b), lambda same: same)
    )
    is_later = F.col("first_sequence") < F.col("sequence")
    return met.where(is_later & (equal >= SIMILARITY * _HASHES)).select(
        "sequence", "received_at", "author_id", "content_type", "first_sequence"
    )


def normalised(text: str) -> bytes:
    """A text in the form that is compared: lower case, each number a 0, each run of white space one space."""
    return " ".join(_number.sub("0", text[:MAX_TEXT_CHARACTERS].lower()).split()).encode("utf-8", "replace")


def signatures_of(texts: Sequence[bytes]) -> NDArray[np.int32]:
    """The MinHash values of texts of at least eight bytes each: a row for each text."""
    signatures = np.empty((len(texts), _HASHES), np.int32)
    for begin in range(0, len(texts), _AT_ONCE):
        part = texts[begin : begin + _AT_ONCE]
        signatures[begin : begin + len(part)] = _least_hashes(part)
    return signatures


def _least_hashes(texts: Sequence[bytes]) -> NDArray[np.int32]:
    # Of one long row of bytes, which is much faster than text by text.
    ends = np.cumsum([len(text) for text in texts])
    padded = b"".join(texts) + bytes(_SHINGLE_BYTES)
    at_each_byte = np.ndarray(len(padded) - _SHINGLE_BYTES + 1, "<u8", padded, strides=(1,))
    shingles = at_each_byte.astype(np.uint64)
    shingles ^= shingles >> np.uint64(30)
    shingles *= _MIX
    shingles ^= shingles >> np.uint64(27)
    # Every second stretch holds the shingles of a text; the others hold those that reach into the next text.
    stretches = np.column_stack([np.concatenate([[0], ends[:-1]]), ends - (_SHINGLE_BYTES - 1)]).ravel()
    least = np.empty((len(texts), _HASHES), np.uint64)
    hashes = np.empty_like(shingles)
    for place, factor in enumerate(_FACTORS):
        np.multiply(shingles, factor, out=hashes)
        least[:, place] = np.minimum.reduceat(hashes, stretches)[::2]
    # The upper half counts; the least of the whole has the least upper half.
    return (least >> np.uint64(32)).astype(np.uint32).view(np.int32)


def _text_of(body: bytes, content_type: str) -> str | None:
    if kind_of(content_type) == CHANNEL:
        return None
    try:
        return _DECODER.decode(body).content.text
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # a `text` that is not a string does not count


def _read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        kept: list[int] = []
        samples: list[str] = []
        compared: list[bytes] = []
        columns: dict[str, Any] = {name: batch.column(name) for name in batch.schema.names}
        rows = zip(columns.pop("body").to_pylist(), columns["content_type"].to_pylist(), strict=True)
        for place, row in enumerate(rows):
            text = _text_of(*row)
            if text is None or len(data := normalised(text)) < MIN_TEXT_BYTES:
                continue
            kept.append(place)
            samples.append(text[:_SAMPLE_CHARACTERS].encode("utf-8", "replace").decode())
            compared.append(data)
        if kept:
            taken = {name: column.take(pa.array(kept)) for name, column in columns.items()}
            taken["sample"] = pa.array(samples, pa.string())
            flat = pa.array(signatures_of(compared).ravel(), pa.int32())
            starts = pa.array(np.arange(len(kept) + 1, dtype=np.int32) * _HASHES)
            taken["signature"] = pa.ListArray.from_arrays(starts, flat)
            yield pa.RecordBatch.from_pydict(taken, schema=_ARROW)
