"""The trust graph: edges that authors have signed and not revoked (RFC-0001, section 7).

The newest TRUST_EDGE of a pair replaces earlier ones, in the order of the log. A TRUST_REVOCATION ends the
edge if it came later and names no packets, or if it names the edge's packet. Ending an edge does not bring
back the one before it.

Only the newest statements of each day need to be kept, because the newest of these are the newest of all.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.trust import TrustAuthors, TrustEdges, TrustStatements
from strata_pipeline.transforms.days import day_name

__all__ = ["STATEMENTS", "count_authors", "standing_edges", "statements_by_day"]

EDGE = "TRUST_EDGE"
REVOCATION = "TRUST_REVOCATION"
STATEMENTS = (EDGE, REVOCATION)
"""The types that are read, and the names of their folders."""
_EDGE, _END = "edge", "end"
_PAIR = ["from_id", "to_id"]
_KEY = [*_PAIR, "what", "named"]
_SAID = ["sequence", "received_at", "packet_id", "strength", "context"]
_ID = r"\A0x[0-9a-f]{64}\z"


def statements_by_day(packets: Packets) -> DataFrame:
    """The newest statements of each day, with the column `day`, as 2026-11-21.

    Statements signed in the name of another author do not count (R-244), nor do edges to oneself.
    """
    content = F.col("body").cast("string")
    told = packets.frame.where(F.col("content_type").isin(*STATEMENTS)).select(
        day_name().alias("day"),
        "sequence",
        "received_at",
        "packet_id",
        F.col("content_type").alias("type"),
        F.col("author_id").alias("from_id"),
        _member(content, "from").alias("signer"),
        _member(content, "to").alias("to_id"),
        _member(content, "strength").try_cast("double").alias("strength"),
        _member(content, "context").alias("context"),
        F.from_json(_member(content, "revokes"), "array<string>").alias("revokes"),
    )
    is_own = F.col("signer") == F.col("from_id")
    is_of_another = F.col("to_id") != F.col("from_id")
    own = told.where(is_own & is_of_another)
    named = F.lit(None).cast("binary").alias("named")
    edges = own.where((F.col("type") == EDGE) & F.col("strength").between(0, 1))
    return _newest(
        edges.select("day", *_PAIR, F.lit(_EDGE).alias("what"), named, *_SAID).unionByName(_ends(own)),
        "day",
        *_KEY,
    )


def _ends(own: DataFrame) -> DataFrame:
    """A row for each revocation of all edges of a pair, and for each edge that a revocation names."""
    revoked = own.where(F.col("type") == REVOCATION)
    names_none = F.coalesce(F.size("revokes"), F.lit(0)) <= 0
    each = revoked.withColumn("name", F.explode_outer("revokes"))
    is_id = F.col("name").rlike(_ID)
    return each.where(names_none | is_id).select(
        "day",
        *_PAIR,
        F.lit(_END).alias("what"),
        F.when(~names_none, F.unhex(F.substring("name", 3, 64))).alias("named"),
        "sequence",
        "received_at",
        "packet_id",
        F.lit(None).cast("double").alias("strength"),
        F.lit(None).cast("string").alias("context"),
    )


def _newest(statements: DataFrame, *key: str) -> DataFrame:
    return statements.groupBy(*key).agg(F.max_by(F.struct(*_SAID), "sequence").alias("s")).select(*key, "s.*")


def standing_edges(statements: TrustStatements) -> TrustEdges:
    """The edges that are in force after all these statements."""
    told = statements.frame
    is_edge = F.col("what") == _EDGE
    ends_all = (F.col("what") == _END) & F.col("named").isNull()
    pairs = told.groupBy(*_PAIR).agg(
        F.max_by(F.struct(*_SAID), F.when(is_edge, F.col("sequence"))).alias("e"),
        F.max(F.when(ends_all, F.col("sequence"))).alias("ended_at"),
    )
    # The id of an edge is known only once it exists, so a revocation by name is always later.
    by_name = told.where(F.col("named").isNotNull()).select(*_PAIR, F.col("named").alias("packet_id"))
    is_there = F.col("e").isNotNull()
    is_ended = F.coalesce(F.col("ended_at") > F.col("e.sequence"), F.lit(False))
    return TrustEdges(
        pairs.where(is_there & ~is_ended)
        .select(*_PAIR, "e.*")
        .join(by_name, on=[*_PAIR, "packet_id"], how="left_anti")
    )


def count_authors(edges: TrustEdges) -> TrustAuthors:
    """A row for each author with an edge to or from that author."""
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
