"""Files of days that were replaced, which stay in `_retired` for readers that have begun.

Later they are deleted, but only what is the lake's own: a folder with the name that this program gives it, in
which readers see batches and nothing else. An operator may have put something beside these folders.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from strata_pipeline.lake import files
from strata_pipeline.lake.layout import LakeLayout, is_stray, listed

__all__ = ["Retired", "not_retired", "retire", "retired"]

_NAME = re.compile(r"(day=\d{4}-\d\d-\d\d)\.(\d{9,})(\.\d+)?")


class Retired(NamedTuple):
    """A folder of replaced files."""

    folder: Path
    day: str
    """As in the name of the day's folder: `day=2026-11-21`."""
    at: int
    """When it was replaced, in Unix seconds."""


def retire(lake: LakeLayout, folder: Path, day: str) -> Path:
    """Keep replaced files of a day, `day=2026-11-21`, for readers that have begun to read them."""
    return files.move(folder, lake.retired, f"{day}.{int(time.time())}")


def retired(lake: LakeLayout) -> Iterator[Retired]:
    """The folders of replaced files."""
    for folder in listed(lake.retired):
        match = _NAME.fullmatch(folder.name)
        if match and folder.is_dir() and not folder.is_symlink() and not any(map(is_stray, listed(folder))):
            yield Retired(folder, match[1], int(match[2]))


def not_retired(lake: LakeLayout) -> list[Path]:
    """What else lies beside these folders, and is left alone."""
    own = {one.folder for one in retired(lake)}
    return [one for one in listed(lake.retired) if one not in own]
