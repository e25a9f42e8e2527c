"""The places of lakes by their names. No I/O."""

from __future__ import annotations

__all__ = ["SCHEME", "is_object_place", "not_on_a_disk"]

SCHEME = "s3://"


def is_object_place(place: object) -> bool:
    """Whether a lake's place is one in a bucket."""
    return str(place).startswith(SCHEME)


def not_on_a_disk(place: str) -> str:
    """Why a lake that is elsewhere is refused by what needs folders, and what to do."""
    if is_object_place(place):
        return (
            f"{place} lies on an object store, and this needs a lake on a disk: strata-pipeline copy brings "
            "it there. On an object store work archive, audit, compact, erase, restore and reports "
            "(docs/guides/pipeline.md)"
        )
    return f"a lake is a folder or s3://bucket/prefix, not {place}: mount the storage, or copy the lake there"
