"""`strata-pipeline find`: the places of packets in a lake, for `relayd erase --places`. Nothing is changed.

The relay's log may have dropped their days, so only the lake can tell where they are. Quarantined rows are
looked at too: a row that was damaged when it was archived may hold what is to be erased.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from strata.protocol.errors import InvalidInput
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.places import PacketPlace, place_line, read_place
from strata.protocol.tombstones import told_place

from strata_pipeline.datasets import Packets, Quarantine
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.lake.places import AnyLake, open_lake

__all__ = ["Searched", "find"]


@dataclass(slots=True)
class Searched:
    """What a search has found."""

    places: int = 0
    """Places that were named, those of quarantined rows included."""
    quarantined: int = 0
    spared: int = 0
    """Packets that carry keys or their revocation, which a relay does not erase."""
    erased: int = 0
    """Rows of packets that are erased already: of these only the place is left."""
    unnamed: int = 0
    """Quarantined rows whose time of receipt is not of the day of their place: no relay can be asked to erase
    these."""
    absent: int = 0
    """Ids that the lake does not hold."""


def find(
    spark: SparkSession,
    path: str | Path,
    searched: Searched,
    *,
    authors: Sequence[str] = (),
    packet_ids: Sequence[str] = (),
) -> Iterator[PacketPlace]:
    """The places of all packets of these authors and of the packets with these ids, in order of sequence.

    Counts in `searched`. An archive may run meanwhile; on a disk, a compaction and an erasure wait. Raises
    `LakeError` and `PipelineError`; places that were returned before are right, and may not be all.
    """
    lake = open_lake(path)
    left = set(packet_ids)
    with lake.held(), translate_failures("looking for packets"):
        rows = _rows(spark, lake, _asked(authors, packet_ids)).orderBy("sequence")
        for row in rows.toLocalIterator():
            place = _place(row)
            left.discard(f"0x{bytes(row.packet_id or b'').hex()}")
            if row.is_empty:
                searched.erased += 1
            elif row.content_type in IDENTITY_TYPES:
                searched.spared += 1
            elif place is None:
                searched.unnamed += 1
            else:
                searched.places += 1
                searched.quarantined += row.is_aside
                yield place
    searched.absent = len(left)


def _asked(authors: Sequence[str], packet_ids: Sequence[str]) -> Column:
    by_id = F.lower(F.hex("packet_id")).isin([name.removeprefix("0x") for name in packet_ids])
    return F.col("author_id").isin(list(authors)) | by_id


def _rows(spark: SparkSession, lake: AnyLake, asked: Column) -> DataFrame:
    columns = ("sequence", "received_at", "packet_id", "content_type")
    is_there = asked & (F.col("sequence") <= lake.reached)
    is_empty = (F.col("author_id") == "") & (F.length("body") == 0) & F.isnull("annotation")
    packets = Packets.of(spark, lake).frame.where(is_there)
    aside = Quarantine.of(spark, lake).frame.where(is_there)
    return packets.select(
        *columns, F.lit(False).alias("is_aside"), F.lit(False).alias("is_empty")
    ).unionByName(aside.select(*columns, F.lit(True).alias("is_aside"), is_empty.alias("is_empty")))


def _place(row: Row) -> PacketPlace | None:
    """The place of a row as a tombstone tells it; None if no tombstone can be asked for."""
    name, at = told_place(bytes(row.packet_id or b""), row.received_at)
    try:
        return read_place(place_line(PacketPlace(name, row.sequence, at)))
    except InvalidInput:
        return None
