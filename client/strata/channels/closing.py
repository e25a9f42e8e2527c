"""Closing at the end of a block, without hiding the error that the block raised."""

from __future__ import annotations

from collections.abc import Awaitable

from strata.protocol.errors import StrataError

__all__ = ["close_after"]


async def close_after(error: BaseException | None, closing: Awaitable[object]) -> None:
    """Await `closing` at the end of a block that raised `error`, or None.

    If the block raised nothing, a `StrataError` of `closing` is raised. Otherwise it becomes a note of
    `error`, which continues to propagate.
    """
    try:
        await closing
    except StrataError as trouble:
        if error is None:
            raise
        if str(error) != str(trouble):  # else closing raised the block's error again
            error.add_note(f"While closing: {trouble}")
