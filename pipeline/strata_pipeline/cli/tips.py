"""The file in which an audit records where the next one begins."""

from __future__ import annotations

import os
from pathlib import Path

from strata_pipeline.errors import UsageError

__all__ = ["read_tip", "write_tip"]

_MOST = 200


def read_tip(file: Path) -> str | None:
    """The tip in a file; None if there is no such file. Raises `UsageError`, `OSError`."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    if not text:
        raise UsageError(f"{file} is empty: write a tip into it, or remove it for a whole audit")
    return text


def write_tip(file: Path, tip: str) -> None:
    """Replace the file, durably: a tip lost in a power cut would cost a complete audit. Raises `OSError`."""
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="ascii") as opened:
            opened.write(f"{tip}\n")
            opened.flush()
            os.fsync(opened.fileno())
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
