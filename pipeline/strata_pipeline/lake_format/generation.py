"""Generations: the rewritten objects of a finished day, for a lake on an object store. No I/O.

The objects that an archive run has written are named by the listings of its batches (`listing`). A compaction
or an erasure writes the day's rows into other objects, names all objects of the day in one separate listing,
and writes a generation: a small record that names this listing by its hash, under the next free number. From
then on the newest generation determines the objects of the day. The generations of all days form one
sequence, each bound to the previous one, so of two that were made from the same state only one can count.

Generations, like listings, are not part of the chain: manifests bind rows in any objects. An erasure changes
which rows must be there, so its record (`erasure`) is part of its generation: objects and record count
together or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
from strata.protocol.sequences import Span, day_text, is_day

from strata_pipeline.lake_format.erasure import Erasure, check_erasures
from strata_pipeline.lake_format.listing import StoredObject, misnamed, misplaced
from strata_pipeline.lake_format.manifest import GENESIS, Manifest
from strata_pipeline.lake_format.sealing import hash_of, read_sealed, refuse, text_of, with_hash

__all__ = [
    "DAY_LISTINGS",
    "GENERATIONS",
    "DayListing",
    "Generation",
    "Part",
    "check_day_listing",
    "check_generations",
    "day_listing_name",
    "decode_day_listing",
    "decode_generation",
    "encode_day_listing",
    "encode_generation",
    "generation_name",
    "seal_day_listing",
    "seal_generation",
]

GENERATIONS = "_generations"
"""The folder of generations: `_generations/0000000000.json`."""

DAY_LISTINGS = "_days"
"""The folder of the generations' listings: `_days/2026-11-21-<attempt>.json`."""

_FORMAT = 1
_is_attempt = re.compile(r"[0-9a-f]{32}").fullmatch


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive batches of a day, and the objects with exactly their rows."""

    after: int
    up_to: int
    objects: list[StoredObject]

    @property
    def span(self) -> Span:
        """The sequences of the part."""
        return Span(self.after, self.up_to)


class DayListing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All objects of a day."""

    format: int = _FORMAT
    day: int
    """Days since 1970-01-01 UTC."""
    attempt: str
    """The name of the attempt that wrote it: each attempt to rewrite a day has its own."""
    parts: list[Part]
    hash: str = ""
    """BLAKE3-256 of the canonical JSON of all the above."""


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rewritten day."""

    format: int = _FORMAT
    number: int
    """0 for the first of all days, and so on without a gap."""
    day: int
    """Days since 1970-01-01 UTC."""
    attempt: str
    listing: str
    """The hash of its listing."""
    written_at: int
    """Unix seconds by the writer's clock. Informative."""
    erasure: Erasure | None
    """What this generation erased; null if it holds the same rows as the previous one."""
    previous: str
    """The hash of the previous generation, `GENESIS` for the first."""
    hash: str = ""
    """BLAKE3-256 of the canonical JSON of all the above."""


def generation_name(number: int) -> str:
    """The name of a generation's object."""
    return f"{number:010}.json"


def day_listing_name(day: int, attempt: str) -> str:
    """The name of the object of a day's listing."""
    return f"{day_text(day)}-{attempt}.json"


def seal_day_listing(day: int, attempt: str, parts: Sequence[Part]) -> DayListing:
    """The listing of a day, with its hash."""
    return with_hash(DayListing(day=day, attempt=attempt, parts=list(parts)))


def seal_generation(generation: Generation) -> Generation:
    """The generation with its hash."""
    return with_hash(generation)


def encode_day_listing(listing: DayListing) -> bytes:
    """The text of its object."""
    return text_of(listing)


def encode_generation(generation: Generation) -> bytes:
    """The text of its object."""
    return text_of(generation)


def decode_day_listing(text: bytes, name: str) -> DayListing:
    """Read one listing. Raises `LakeError` with this `name` if it is damaged or of another version."""
    name = f"listing {name}"
    listing = read_sealed(text, DayListing, _FORMAT, name)
    for part in listing.parts:
        if (wrong := misnamed(part.objects)) is not None:
            refuse(name, f"{wrong!r} is not the name of an object with rows")
    return listing


def decode_generation(text: bytes, name: str) -> Generation:
    """Read one generation. Raises `LakeError` with this `name` if it is damaged or of another version."""
    name = f"generation {name}"
    generation = read_sealed(text, Generation, _FORMAT, name)
    if _is_attempt(generation.attempt) is None:
        refuse(name, f"{generation.attempt!r} is not the name of an attempt")
    if not is_day(generation.day):
        refuse(name, f"{generation.day} is not a day")
    erasure = generation.erasure
    if erasure is not None and (
        erasure.day != generation.day or erasure.hash != hash_of(msgspec.to_builtins(erasure))
    ):
        refuse(name, "its erasure is that of another day, or was changed")
    return generation


def check_generations(generations: Iterable[Generation]) -> None:
    """Raise `LakeError` unless these are all generations from the first, each bound to the previous one, and
    their erasures are all erasures from the first."""
    previous, erasures = GENESIS, []
    for number, one in enumerate(generations):
        if (one.number, one.previous) != (number, previous):
            refuse(f"generation {number}", "it is missing, or does not follow the one before")
        previous = one.hash
        if one.erasure is not None:
            erasures.append(one.erasure)
    check_erasures(erasures)


def check_day_listing(
    listing: DayListing, generation: Generation, manifests: Sequence[Manifest], *, ahead: bool = False
) -> None:
    """Raise `LakeError` unless a listing belongs to this generation, and its parts cover the batches of the
    day with these manifests: each batch in one part, and each object in the folder of its part.

    A copy writes a generation before the manifests that it covers. With `ahead`, `manifests` may be only the
    first of the day, or empty: parts after them are not compared yet.
    """
    name = f"listing {day_listing_name(generation.day, generation.attempt)}"
    told = listing.day, listing.attempt, listing.hash
    if told != (generation.day, generation.attempt, generation.listing):
        refuse(name, "it is that of another generation")
    borders = [part.after for part in listing.parts[:1]] + [part.up_to for part in listing.parts]
    known = [manifests[0].after, *(one.up_to for one in manifests)] if manifests else []
    seen = [one for one in borders if not ahead or one <= max(known, default=-1)]
    follow = all(one.up_to == other.after for one, other in pairwise(listing.parts))
    is_whole = bool(borders) and (seen[:1], seen[-1:]) == (known[:1], known[-1:])
    rises = all(one < other for one, other in pairwise(borders))
    if not (follow and is_whole and rises and set(seen) <= set(known)):
        refuse(name, f"its parts are not the batches of {day_text(generation.day)}")
    for part in listing.parts:
        if (wrong := misplaced(part.objects, part.span)) is not None:
            refuse(name, f"{wrong} lies elsewhere than its part, {part.span}")
