"""The trust graph: edges that authors have signed and not revoked (RFC-0001 section 7).

The newest TRUST_EDGE of a pair stands in the place of earlier ones, by the order of the log. A
TRUST_REVOCATION ends it if it came later and names no packets, or names this edge's. An edge whose
revocation is gone does not bring back the one before it.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.trust import TrustAuthors, TrustEdges

__all__ = ["STATEMENTS", "count_authors", "standing_edges"]

EDGE = "TRUST_EDGE"
REVOCATION = "TRUST_REVOCATION"
STATEMENTS = (EDGE, REVOCATION)
"""The types that are read, and the folders they are in."""
_PAIR = ["from_id", "to_id"]


def standing_edges(packets: Packets) -> TrustEdges:
    """The edges that stand after all these packets.

    What was signed in the name of another does not count (R-244), nor does an edge to oneself.
    """
    content = F.col("body").cast("string")
    told = packets.frame.where(F.col("content_type").isin(*STATEMENTS)).select(
        "sequence",
        "received_at",
        "packet_id",
        "content_type",
        F.col("author_id").alias("from_id"),
        _member(content, "from").alias("named"),
        _member(content, "to").alias("to_id"),
        _member(content, "strength").try_cast("double").alias("strength"),
        _member(content, "context").alias("context"),
        F.from_json(_member(content, "revokes"), "array<string>").alias("revokes"),
    )
    is_own = F.col("named") == F.col("from_id")
    is_of_another = F.col("to_id") != F.col("from_id")
    own = told.where(is_own & is_of_another)
    edges = (
        own.where((F.col("content_type") == EDGE) & F.col("strength").between(0, 1))
        .groupBy(*_PAIR)
        .agg(
            F.max_by(
                F.struct("sequence", "received_at", "packet_id", "strength", "context"), "sequence"
            ).alias("e")
        )
        .select(*_PAIR, "e.*")
    )
    ended = _revocations(own)
    return TrustEdges(edges.join(ended, on=_PAIR, how="left").where(~_is_ended()))


def _revocations(own: DataFrame) -> DataFrame:
    """For each pair the last revocation of all its edges, and the last of each edge that was named."""
    revoked = own.where(F.col("content_type") == REVOCATION)
    names_none = F.coalesce(F.size("revokes"), F.lit(0)) <= 0
    return revoked.groupBy(*_PAIR).agg(
        F.max(F.when(names_none, F.col("sequence"))).alias("ended_at"),
        F.flatten(F.collect_set(F.when(~names_none, F.col("revokes")))).alias("ended_ids"),
    )


def _is_ended() -> Column:
    """Whether an edge was revoked. The id of an edge is known only after it, so a name needs no order."""
    by_all = F.col("ended_at") > F.col("sequence")
    own_id = F.concat(F.lit("0x"), F.lower(F.hex("packet_id")))
    by_name = F.array_contains("ended_ids", own_id)
    return F.coalesce(by_all, F.lit(False)) | F.coalesce(by_name, F.lit(False))


def count_authors(edges: TrustEdges) -> TrustAuthors:
    """A row for each author with an edge to or from it."""
    there = edges.frame.select(*_PAIR, "strength")
    back = there.select(
        F.col("from_id").alias("to_id"), F.col("to_id").alias("from_id"), F.lit(1).alias("back")
    )
    both = there.join(back, on=_PAIR, how="left")
    given = both.select(
        F.col("from_id").alias("author_id"),
        F.lit(0).alias("by"),
        F.lit(0.0).alias("strength"),
        F.lit(1).alias("to"),
        F.coalesce("back", F.lit(0)).alias("mutual"),
    )
    received = both.select(
        F.col("to_id").alias("author_id"),
        F.lit(1).alias("by"),
        "strength",
        F.lit(0).alias("to"),
        F.lit(0).alias("mutual"),
    )
    return TrustAuthors(
        given.unionByName(received)
        .groupBy("author_id")
        .agg(
            F.sum("by").alias("trusted_by"),
            F.sum("strength").alias("strength"),
            F.sum("to").alias("trusts"),
            F.sum("mutual").alias("mutual"),
        )
    )


def _member(body: Column, name: str) -> Column:
    return F.get_json_object(body, f"$.content.{name}")
