"""What an archive of a relay's log promises, and how anybody checks it: no Spark, no database, no I/O.

The pipeline writes such an archive (a lake), relayd reads its manifests before it lets go of a day, and an
auditor needs no more than this and a reader of Parquet.
"""

from strata.protocol.lake.columns import HASHED, string_key
from strata.protocol.lake.digest import (
    NOTHING,
    OTHERS,
    ContentsDigest,
    RowsDigest,
    contents_bytes,
    others_hash,
    row_bytes,
)
from strata.protocol.lake.erasure import (
    ErasedBatch,
    Erasure,
    check_erasures,
    decode_erasure,
    encode_erasure,
    seal_erasure,
    told,
)
from strata.protocol.lake.manifest import (
    FORMAT,
    FORMATS,
    GENESIS,
    ChainEnd,
    LakeError,
    Manifest,
    as_format_1,
    check_chain,
    decode,
    encode,
    manifests_of_day,
    migrated,
    seal,
)
from strata.protocol.lake.sequences import DAY_SECONDS, Span, day_of, day_text, first_of_day, parse_day
from strata.protocol.lake.summary import (
    SUMMARIES,
    DaySummary,
    check_day,
    check_summaries,
    decode_summary,
    encode_summary,
    summarise,
)

__all__ = [
    "DAY_SECONDS",
    "FORMAT",
    "FORMATS",
    "GENESIS",
    "HASHED",
    "NOTHING",
    "OTHERS",
    "SUMMARIES",
    "ChainEnd",
    "ContentsDigest",
    "DaySummary",
    "ErasedBatch",
    "Erasure",
    "LakeError",
    "Manifest",
    "RowsDigest",
    "Span",
    "as_format_1",
    "check_chain",
    "check_day",
    "check_erasures",
    "check_summaries",
    "contents_bytes",
    "day_of",
    "day_text",
    "decode",
    "decode_erasure",
    "decode_summary",
    "encode",
    "encode_erasure",
    "encode_summary",
    "first_of_day",
    "manifests_of_day",
    "migrated",
    "others_hash",
    "parse_day",
    "row_bytes",
    "seal",
    "seal_erasure",
    "string_key",
    "summarise",
    "told",
]
