"""Generations: the objects of a finished day written anew, for a lake on an object store. No I/O.

What an archive has put stays named by the listings of its batches (`listing`). A compaction or an erasure
writes the day's rows into other objects, names all objects of the day in one listing of its own, and puts a
generation: a small record that names this listing by its hash, under the next free number. From then on the
day is what its newest generation says. Generations of all days are one sequence, each bound to the one
before, so of two that were made of the same state only one can count.

A generation is no part of the chain, as listings are none: manifests bind rows, whatever objects they are
in. An erasure changes what must be there, so its record (`erasure`) is a part of its generation: objects and
record count together or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from strata.protocol.lake.erasure import Erasure, check_erasures
from strata.protocol.lake.listing import StoredObject, misnamed, misplaced
from strata.protocol.lake.manifest import GENESIS, Manifest
from strata.protocol.lake.sealing import hash_of, read_sealed, refuse, text_of, with_hash
from strata.protocol.lake.sequences import Span, day_text, is_day

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
"""The folder of their listings: `_days/2026-11-21-<attempt>.json`."""

_FORMAT = 1
_is_attempt = re.compile(r"[0-9a-f]{32}").fullmatch


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batches of a day that follow each other, and the objects with all of their rows and no others."""

    after: int
    up_to: int
    objects: list[StoredObject]

    @property
    def span(self) -> Span:
        """Its sequences."""
        return Span(self.after, self.up_to)


class DayListing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All objects of a day."""

    format: int = _FORMAT
    day: int
    """From 1970-01-01 UTC."""
    attempt: str
    """Who wrote it: each attempt to write a day anew has a name of its own."""
    parts: list[Part]
    hash: str = ""
    """BLAKE3-256 of the canonical JSON of all the above."""


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One day written anew."""

    format: int = _FORMAT
    number: int
    """0 for the first of any day, and so on without a gap."""
    day: int
    """From 1970-01-01 UTC."""
    attempt: str
    listing: str
    """The hash of its listing."""
    written_at: int
    """Unix seconds by the writer's clock. Informative."""
    erasure: Erasure | None
    """What was erased by this generation; null where it holds the rows of the one before."""
    previous: str
    """The hash of the generation before, `GENESIS` for the first."""
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
    """Read one listing. Raises `LakeError`, by `name`, for one that is damaged or of another version."""
    name = f"listing {name}"
    listing = read_sealed(text, DayListing, _FORMAT, name)
    for part in listing.parts:
        if (wrong := misnamed(part.objects)) is not None:
            refuse(name, f"{wrong!r} is no name of an object with rows")
    return listing


def decode_generation(text: bytes, name: str) -> Generation:
    """Read one generation. Raises `LakeError`, by `name`, for one that is damaged or of another version."""
    name = f"generation {name}"
    generation = read_sealed(text, Generation, _FORMAT, name)
    if _is_attempt(generation.attempt) is None:
        refuse(name, f"{generation.attempt!r} is no name of an attempt")
    if not is_day(generation.day):
        refuse(name, f"{generation.day} is no day")
    erasure = generation.erasure
    if erasure is not None and (
        erasure.day != generation.day or erasure.hash != hash_of(msgspec.to_builtins(erasure))
    ):
        refuse(name, "its erasure is that of another day, or was changed")
    return generation


def check_generations(generations: Iterable[Generation]) -> None:
    """Raise `LakeError` unless these are all generations from the first, each bound to the one before, and
    their erasures all erasures."""
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
    """Raise `LakeError` unless a listing is that of this generation, and its parts are the batches of a day,
    whose manifests these are: each batch in one part, and each object in the folder of its part.

    A copy puts a generation before the manifests that it tells of. With `ahead` these may be the day's first
    manifests, or none: the parts after them are held against none yet.
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
