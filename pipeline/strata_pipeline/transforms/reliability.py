"""The reliability of channels, by channel and UTC day."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from strata.channels.sds import Kind

from strata_pipeline.datasets.channels import ChannelDays, ChannelMessages, ChannelPackets, Gaps, Silences

__all__ = ["MAX_LISTED_PARTICIPANTS", "channel_days", "find_gaps", "find_silences"]

MAX_LISTED_PARTICIPANTS = 64
"""No silences are listed for a day with more participants: the number of pairs grows with the square."""

_CHANNEL = ["content_topic", "channel_id"]
_DAY = ["day", *_CHANNEL]


def find_gaps(packets: ChannelPackets, earlier: ChannelPackets | None = None) -> Gaps:
    """The messages that histories name and that no packet carries, in these packets or in `earlier`."""
    named = _readable(packets).select(
        *_CHANNEL, "sequence", "received_at", "day", "sender_id", F.explode("history").alias("message_id")
    )
    # By participant first, so that an id that everybody names is counted where its packets are. Numbers and
    # dates are aggregated by hash; for a struct, Spark would have to sort all rows.
    first = [F.min_by(name, "sequence").alias(name) for name in ("received_at", "day")]
    first.append(F.min("sequence").alias("sequence"))
    by_participant = named.groupBy(*_CHANNEL, "message_id", "sender_id").agg(*first)
    by_id = by_participant.groupBy(*_CHANNEL, "message_id").agg(*first, F.count(F.lit(1)).alias("named_by"))
    carried = _carried(packets)
    if earlier is not None:
        carried = carried.unionByName(_carried(earlier))
    missing = by_id.join(carried.distinct(), on=[*_CHANNEL, "message_id"], how="left_anti")
    return Gaps(
        missing.select(
            "day",
            *_CHANNEL,
            "message_id",
            F.col("received_at").alias("named_at"),
            "named_by",
        )
    )


def find_silences(packets: ChannelPackets, messages: ChannelMessages) -> Silences:
    """The pairs in which a participant sent something after another's messages of a day but acknowledged none
    of them."""
    there = (
        _readable(packets)
        .groupBy(*_DAY, "sender_id")
        .agg(F.max("sequence").alias("last_sequence"))
        .withColumn("participants", F.count(F.lit(1)).over(Window.partitionBy(*_DAY)))
    )
    listed = there.where(F.col("participants") <= MAX_LISTED_PARTICIPANTS)
    sent = messages.frame.where(F.col("acknowledged_by").isNotNull()).groupBy(*_DAY, "sender_id").agg(
        F.count(F.lit(1)).alias("messages"), F.min("first_sequence").alias("first_sequence")
    )  # fmt: skip
    pairs = sent.join(
        listed.select(*_DAY, F.col("sender_id").alias("participant_id"), "last_sequence"),
        on=_DAY,
        how="inner",
    ).where(
        (F.col("participant_id") != F.col("sender_id")) & (F.col("last_sequence") > F.col("first_sequence"))
    )
    given = messages.frame.select(
        *_DAY, "sender_id", F.explode("acknowledged_by").alias("participant_id")
    ).distinct()
    silent = pairs.join(given, on=[*_DAY, "sender_id", "participant_id"], how="left_anti")
    return Silences(silent.select(*_DAY, "sender_id", "participant_id", "messages"))


def channel_days(
    packets: ChannelPackets, messages: ChannelMessages, gaps: Gaps, silences: Silences
) -> ChannelDays:
    """The figures of each channel and day. A retransmission counts on its own day, everything else about a
    message on the day of its first packet."""
    joined = _counted_packets(packets)
    for counted in (
        _counted_messages(messages),
        gaps.frame.groupBy(*_DAY).agg(F.count(F.lit(1)).alias("gaps")),
        silences.frame.groupBy(*_DAY).agg(F.count(F.lit(1)).alias("silences")),
    ):
        joined = joined.join(counted, on=_DAY, how="left")
    readable = F.col("channel_id").isNotNull()
    is_listed = (F.col("participants") <= MAX_LISTED_PARTICIPANTS) & F.coalesce("all_known", F.lit(True))
    return ChannelDays(
        joined.select(
            *_DAY,
            readable.alias("readable"),
            "packets",
            "bytes",
            "authors",
            "first_at",
            "last_at",
            "unreadable",
            "malformed",
            F.when(readable, _or_zero("messages")).alias("messages"),
            F.when(readable, F.col("contents") - _or_zero("messages")).alias("retransmissions"),
            F.when(readable, F.col("syncs")).alias("syncs"),
            F.when(readable, F.col("ephemerals")).alias("ephemerals"),
            F.when(readable, F.col("participants")).alias("participants"),
            "ack_delay_p50",
            "ack_delay_p95",
            "unacknowledged",
            F.when(readable, _or_zero("gaps")).alias("gaps"),
            F.when(readable & is_listed, _or_zero("silences")).alias("silences"),
        )
    )


def _counted_packets(packets: ChannelPackets) -> DataFrame:
    kind = F.col("kind")
    return packets.frame.groupBy(*_DAY).agg(
        F.count(F.lit(1)).alias("packets"),
        F.sum(F.col("size").cast("long")).alias("bytes"),
        F.count_distinct("author_id").alias("authors"),
        F.count_distinct("sender_id").alias("participants"),
        F.min("received_at").alias("first_at"),
        F.max("received_at").alias("last_at"),
        F.count_if(kind.isNull()).alias("unreadable"),
        F.count_if(~F.col("has_payload")).alias("malformed"),
        F.count_if(kind == Kind.CONTENT.value).alias("contents"),
        F.count_if(kind == Kind.SYNC.value).alias("syncs"),
        F.count_if(kind == Kind.EPHEMERAL.value).alias("ephemerals"),
    )


def _counted_messages(messages: ChannelMessages) -> DataFrame:
    delay = (F.col("acknowledged_at") - F.col("first_at")).cast("double")
    return messages.frame.groupBy(*_DAY).agg(
        F.count(F.lit(1)).alias("messages"),
        F.percentile(delay, 0.5).alias("ack_delay_p50"),
        F.percentile(delay, 0.95).alias("ack_delay_p95"),
        F.avg(F.col("acknowledged_at").isNull().cast("double")).alias("unacknowledged"),
        F.every(F.col("acknowledged_by").isNotNull()).alias("all_known"),
    )


def _carried(packets: ChannelPackets) -> DataFrame:
    content = F.col("kind").isin(Kind.CONTENT.value, Kind.EPHEMERAL.value)
    return packets.frame.where(content).select(*_CHANNEL, "message_id")


def _readable(packets: ChannelPackets) -> DataFrame:
    return packets.frame.where(F.col("kind").isNotNull())


def _or_zero(name: str) -> Column:
    return F.coalesce(F.col(name), F.lit(0))
