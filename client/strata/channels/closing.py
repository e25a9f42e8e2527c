"""The end of a block: what closing raises does not hide what the block raised."""

from __future__ import annotations

from collections.abc import Awaitable

from strata.protocol.errors import StrataError

__all__ = ["close_after"]


async def close_after(error: BaseException | None, closing: Awaitable[object]) -> None:
    """Await `closing` at the end of a block that raised `error`, or nothing.

    A `StrataError` of the closing is raised after a block that ended well. Otherwise it becomes a note of
    `error`, which goes on.
    """
    try:
        await closing
    except StrataError as trouble:
        if error is None:
            raise
        if str(error) != str(trouble):  # else it is the error that the block raised
            error.add_note(f"While closing: {trouble}")
