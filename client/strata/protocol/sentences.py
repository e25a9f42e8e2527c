"""Errors in words for a person."""

from __future__ import annotations

__all__ = ["sentence"]


def sentence(error: BaseException) -> str:
    """What an error is about, then what is wrong, without the number that the system gives it.

    An error without words is named by its type.
    """
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
