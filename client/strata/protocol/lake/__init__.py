"""What an archive of a relay's log promises, and how anybody checks it: no Spark, no database, no I/O.

The pipeline writes such an archive (a lake), relayd reads its manifests before it lets go of a day, and an
auditor needs no more than this and a reader of Parquet.
"""

from strata.protocol.lake.columns import HASHED, string_key
from strata.protocol.lake.digest import RowsDigest, row_bytes
from strata.protocol.lake.manifest import (
    FORMAT,
    GENESIS,
    LakeError,
    Manifest,
    check_chain,
    decode,
    encode,
    manifests_of_day,
    seal,
)
from strata.protocol.lake.sequences import DAY_SECONDS, Span, day_of, day_text, first_of_day, parse_day

__all__ = [
    "DAY_SECONDS",
    "FORMAT",
    "GENESIS",
    "HASHED",
    "LakeError",
    "Manifest",
    "RowsDigest",
    "Span",
    "check_chain",
    "day_of",
    "day_text",
    "decode",
    "encode",
    "first_of_day",
    "manifests_of_day",
    "parse_day",
    "row_bytes",
    "seal",
    "string_key",
]
