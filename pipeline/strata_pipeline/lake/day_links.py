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

from strata_pipeline.lake import files

__all__ = ["GENERATIONS", "DayLinks"]

GENERATIONS = "generations"
"""The folder of the links, and the table of a Delta log."""
_AS_ARCHIVED = "0000000000"


class DayLinks:
    """The links of a lake. Days are named as their folders: `day=2026-11-21`."""

    def __init__(self, root: Path) -> None:
        self.folder = root / GENERATIONS
        self._packets = root / "packets"
        self._retired = root / "_retired"

    def newest(self, day: str) -> Path | None:
        """The newest link of a day; None if there is none."""
        return max((self.folder / day).glob("*"), default=None)

    def current(self, day: str) -> Path:
        """The newest link of a day, which leads to its folder in `packets`; made if there is no such one.

        No other process may replace the files of the day meanwhile.
        """
        newest, target = self.newest(day), self._packets / day
        if newest is not None and _leads_to(newest, target):
            return newest
        when = _AS_ARCHIVED if newest is None else f"{max(int(time.time()), int(newest.name) + 1):010}"
        link = self.folder / day / when
        files.make_folder(link.parent)
        with contextlib.suppress(FileExistsError):  # archive and compaction may both have come to a new day
            os.symlink(_from(link, target), link)
        files.sync(link.parent)
        return link

    def keep_files(self, day: str, now: int) -> Path:
        """Give the files of a day other names in `_retired`, by hard links, before they are replaced."""
        files.make_folder(self._retired)
        kept = files.free_name(self._retired, f"{day}.{now}")
        shutil.copytree(self._packets / day, kept, copy_function=os.link)
        return kept

    def point_to_kept(self, day: str, kept: Path) -> None:
        """Let the newest link of a day lead to `kept`, so that the day's folder can change."""
        link, draft = self.current(day), self.folder / f"_{day}"
        os.symlink(_from(link, kept), draft)
        os.replace(draft, link)
        files.sync(link.parent)

    def delete_kept(self, kept: Path, day: str) -> None:
        """Delete replaced files of a day, and the links to them."""
        for link in list((self.folder / day).glob("*")):
            if _leads_to(link, kept):
                link.unlink()
        files.remove(kept)

    def mend(self) -> None:
        """Make the links of all days right. No other process may replace files meanwhile."""
        for draft in list(self.folder.glob("_day=*")):
            draft.unlink()
        for link in list(self.folder.glob("day=*/*")):
            if not link.is_symlink():  # copied by a tool that follows links: no erasure would reach it
                files.remove(link)
        for folder in list(self._packets.glob("day=*")):
            self.current(folder.name)


def _leads_to(link: Path, folder: Path) -> bool:
    return link.is_symlink() and os.readlink(link) == _from(link, folder)


def _from(link: Path, folder: Path) -> str:
    """A folder as a link names it: a lake can be moved."""
    return os.path.relpath(folder, link.parent)
