"""Listings: which objects hold the rows of a batch, for a lake on an object store. No I/O.

On a disk, a batch is the content of its folder, and a rename puts all of it there in one step. An object
store has no such step: the remains of killed writers lie beside the objects that count. So a listing names
the objects of a batch. It is written before the manifest, under a name that contains the manifest's hash, and
counts once that manifest is in the chain.

A listing is not part of the chain. The manifest binds the rows in any objects, so a listing cannot add a
false row or omit a true one undetected. A lake that is copied between a disk and an object store keeps its
manifests, and every noted tip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec
from strata.protocol.sequences import Span, day_text

from strata_pipeline.lake_format.manifest import Manifest
from strata_pipeline.lake_format.sealing import read_sealed, refuse, text_of, with_hash

__all__ = [
    "LISTINGS",
    "Listing",
    "StoredObject",
    "check_listing",
    "decode_listing",
    "encode_listing",
    "listing_name",
    "misnamed",
    "misplaced",
    "seal_listing",
]

LISTINGS = "_objects"
"""The folder of listings: `_objects/0000000000-<hash of the manifest>.json`."""

_FORMAT = 1
# A copy of a lake to a disk creates files with these names: none may lead outside the folder.
_is_name = re.compile(
    r"(?:packets|quarantine)/day=\d{4}-\d\d-\d\d/batch=\d+-\d+/(?:kind=[A-Za-z_]+/)?"
    r"[A-Za-z0-9][A-Za-z0-9._-]*\.parquet"
).fullmatch


class StoredObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object with rows of a batch."""

    name: str
    """The key below the lake's, the same as the path of a file below a lake's folder."""
    size: int
    rows: int
    hash: str
    """BLAKE3-256 of its bytes."""


class Listing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The objects of one batch."""

    format: int = _FORMAT
    number: int
    """The number of its manifest."""
    manifest: str
    """The hash of its manifest."""
    attempt: str
    """The name of the attempt that wrote the objects: each attempt to archive a batch has its own."""
    objects: list[StoredObject]
    hash: str = ""
    """BLAKE3-256 of the canonical JSON of all the above."""


def listing_name(manifest: Manifest) -> str:
    """The name of the listing of a manifest's batch."""
    return f"{manifest.number:010}-{manifest.hash}.json"


def seal_listing(manifest: Manifest, attempt: str, objects: Sequence[StoredObject]) -> Listing:
    """The listing of a sealed manifest's batch, with its hash."""
    listing = Listing(number=manifest.number, manifest=manifest.hash, attempt=attempt, objects=list(objects))
    return with_hash(listing)


def encode_listing(listing: Listing) -> bytes:
    """The text of its object."""
    return text_of(listing)


def decode_listing(text: bytes, name: str) -> Listing:
    """Read one listing. Raises `LakeError` with this `name` if it is damaged or of another version."""
    listing = read_sealed(text, Listing, _FORMAT, f"listing {name}")
    if (wrong := misnamed(listing.objects)) is not None:
        refuse(f"listing {name}", f"{wrong!r} is not the name of an object with rows")
    return listing


def misnamed(objects: Iterable[StoredObject]) -> str | None:
    """The first name of these objects that is not a valid name of an object with rows, or None."""
    return next((one.name for one in objects if _is_name(one.name) is None), None)


def misplaced(objects: Iterable[StoredObject], span: Span) -> str | None:
    """The first name of these objects that is not in the folder of these sequences, or None."""
    folder = f"day={day_text(span.day)}/batch={span}/"
    return next((one.name for one in objects if not one.name.partition("/")[2].startswith(folder)), None)


def check_listing(listing: Listing, manifest: Manifest) -> None:
    """Raise `LakeError` unless a listing belongs to this manifest and names only objects of its batch."""
    name = f"listing {listing_name(manifest)}"
    if (listing.number, listing.manifest) != (manifest.number, manifest.hash):
        refuse(name, f"it is that of another manifest, {listing.number}")
    if (wrong := misplaced(listing.objects, manifest.span)) is not None:
        refuse(name, f"{wrong} lies elsewhere than its batch, {manifest.span}")
