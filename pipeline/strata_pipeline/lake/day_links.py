"""The names by which whoever opened a lake on a disk can finish: `generations/day=…/<when>`.

Readers list files, and open them later by their paths. A path cannot leave a listing and still lead to its
file. So each set of files that a day has had is a link of its own: the newest leads to the day's folder in
`packets`, and an older one to the same files in `_retired`, until these are deleted. The links follow from
the folders and are made again, so a copy or backup of a lake does not need them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from strata_pipeline.lake import files

if TYPE_CHECKING:
    from strata_pipeline.lake.layout import LakeLayout

__all__ = ["delete_kept", "keep_files", "link_day", "mend_links", "newest_link", "point_to_kept"]

_AS_ARCHIVED = "0000000000"


def newest_link(lake: LakeLayout, day: str) -> Path | None:
    """The newest link of a day, `day=2026-11-21`; None if there is none."""
    return max((lake.generations / day).glob("*"), default=None)


def link_day(lake: LakeLayout, day: str) -> Path:
    """The newest link of a day, which leads to its folder in `packets`; made if there is no such one.

    No other process may replace the files of the day meanwhile.
    """
    newest, target = newest_link(lake, day), lake.packets / day
    if newest is not None and _leads_to(newest, target):
        return newest
    when = _AS_ARCHIVED if newest is None else f"{max(int(time.time()), int(newest.name) + 1):010}"
    link = lake.generations / day / when
    files.make_folder(link.parent)
    with contextlib.suppress(FileExistsError):  # archive and compaction may both have come to a new day
        os.symlink(_from(link, target), link)
    files.sync(link.parent)
    return link


def keep_files(lake: LakeLayout, day: str, now: int) -> Path:
    """Give the files of a day other names in `_retired`, by hard links, before they are replaced."""
    files.make_folder(lake.retired)
    kept = files.free_name(lake.retired, f"{day}.{now}")
    shutil.copytree(lake.packets / day, kept, copy_function=os.link)
    return kept


def point_to_kept(lake: LakeLayout, day: str, kept: Path) -> None:
    """Let the newest link of a day lead to `kept`, so that the day's folder can change."""
    link = link_day(lake, day)
    draft = lake.generations / f"_{day}"
    os.symlink(_from(link, kept), draft)
    os.replace(draft, link)
    files.sync(link.parent)


def delete_kept(lake: LakeLayout, kept: Path, day: str) -> None:
    """Delete replaced files of a day, and the links to them."""
    for link in list((lake.generations / day).glob("*")):
        if _leads_to(link, kept):
            link.unlink()
    files.remove(kept)


def mend_links(lake: LakeLayout) -> None:
    """Make the links of all days right. No other process may replace files meanwhile."""
    for draft in list(lake.generations.glob("_day=*")):
        draft.unlink()
    for link in list(lake.generations.glob("day=*/*")):
        if not link.is_symlink():  # a tool that follows links has copied files, which no erasure would reach
            files.remove(link)
    for folder in list(lake.packets.glob("day=*")):
        link_day(lake, folder.name)


def _leads_to(link: Path, folder: Path) -> bool:
    return link.is_symlink() and os.readlink(link) == _from(link, folder)


def _from(link: Path, folder: Path) -> str:
    """A folder as a link names it: a lake can be moved."""
    return os.path.relpath(folder, link.parent)
