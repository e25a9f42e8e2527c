"""Where a lake lies, as the name of its place says. No I/O."""

from __future__ import annotations

__all__ = ["SCHEME", "is_object_place", "not_on_a_disk"]

SCHEME = "s3://"


def is_object_place(place: object) -> bool:
    """Whether the place of a lake is in a bucket."""
    return str(place).startswith(SCHEME)


def not_on_a_disk(place: str) -> str:
    """The error text, with advice, for a lake elsewhere where a lake on a disk is needed."""
    if is_object_place(place):
        return (
            f"{place} lies on an object store, and this needs a lake on a disk: bring it there with "
            "strata-pipeline copy, and the result to a new place in the store with another copy. Archive, "
            "audit, compact, erase, restore and reports work on an object store (docs/guides/pipeline.md)"
        )
    return f"a lake is a folder or s3://bucket/prefix, not {place}: mount the storage, or copy the lake there"
