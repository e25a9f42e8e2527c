"""Summaries: one for each finished day of a chain, so that opening a lake does not take all its manifests.

A summary binds the manifests of its day by their hashes and contains the hash of the previous summary. It
says nothing that the manifests do not say: it can be made again from them, and an audit does that and
compares. So it is not part of the chain, whose manifests are all kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from blake3 import blake3
from strata.protocol.sequences import Span, day_of, day_text, is_day

from strata_pipeline.lake_format.manifest import GENESIS, ChainEnd, Manifest, check_chain
from strata_pipeline.lake_format.sealing import LakeError, read_sealed, refuse, text_of, with_hash

__all__ = [
    "SUMMARIES",
    "DaySummary",
    "check_day",
    "check_summaries",
    "decode_summary",
    "encode_summary",
    "summarise",
]

SUMMARIES = "days"
"""The folder of summaries, in the folder of the manifests: `days/2026-11-21.json`."""

_FORMAT = 1


class DaySummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the batches of one finished day have added to the lake."""

    format: int = _FORMAT
    day: int
    """Days since 1970-01-01 UTC."""
    first: int
    """The number of its first manifest."""
    batches: int
    after: int
    """Where the previous day ended; the day's sequences are `after < sequence <= up_to`."""
    up_to: int
    packets: int
    quarantined: int
    body_bytes: int
    manifests: str
    """BLAKE3-256 of the hashes of its manifests, 32 bytes each, one after the other."""
    witnesses: int
    """How many of its batches have a file of witnesses."""
    tip: str
    """The hash of its last manifest."""
    previous: str
    """The hash of the previous summary, `GENESIS` for the first."""
    hash: str = ""
    """BLAKE3-256 of the canonical JSON of all the above."""

    @property
    def span(self) -> Span:
        """The sequences of the day."""
        return Span(self.after, self.up_to)

    @property
    def end(self) -> ChainEnd:
        """The end of the chain after this day."""
        return ChainEnd(self.first + self.batches, self.tip, self.up_to)

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{day_text(self.day)}.json"


def summarise(manifests: Sequence[Manifest], previous: str) -> DaySummary:
    """The summary of all manifests of a day, after the summary with the hash `previous`."""
    last = manifests[-1]
    hashes = blake3(b"".join(bytes.fromhex(manifest.hash) for manifest in manifests))
    summary = DaySummary(
        day=day_of(last.up_to),
        first=manifests[0].number,
        batches=len(manifests),
        after=manifests[0].after,
        up_to=last.up_to,
        packets=sum(manifest.packets for manifest in manifests),
        quarantined=sum(manifest.quarantined for manifest in manifests),
        body_bytes=sum(manifest.body_bytes for manifest in manifests),
        manifests=hashes.hexdigest(),
        witnesses=sum(bool(manifest.witnesses) for manifest in manifests),
        tip=last.hash,
        previous=previous,
    )
    return with_hash(summary)


def encode_summary(summary: DaySummary) -> bytes:
    """The text of its file."""
    return text_of(summary)


def decode_summary(text: bytes, name: str) -> DaySummary:
    """Read one summary. Raises `LakeError` with this `name` if it is damaged or of another version."""
    summary = read_sealed(text, DaySummary, _FORMAT, f"summary {name}")
    if not is_day(summary.day) or summary.name != name:
        refuse(f"summary {name}", "it is that of another day")
    return summary


def check_summaries(summaries: Iterable[DaySummary]) -> ChainEnd:
    """The end of the chain after these summaries. Raises `LakeError` unless they follow each other."""
    end, previous, day = ChainEnd(), GENESIS, -1
    for summary in summaries:
        follows = summary.first == end.number and summary.after == end.up_to and summary.day > day
        if not follows or summary.previous != previous or summary.batches < 1:
            raise LakeError(f"the lake's summary {summary.name} does not follow the one before")
        end, previous, day = summary.end, summary.hash, summary.day
    return end


def check_day(summary: DaySummary, before: ChainEnd, manifests: Sequence[Manifest]) -> None:
    """Raise `LakeError` unless these are the manifests of a summary, following a chain up to `before`."""
    check_chain(manifests, before)
    if not manifests or summarise(manifests, summary.previous) != summary:
        raise LakeError(f"the lake's summary {summary.name} and the manifests of the day disagree")
