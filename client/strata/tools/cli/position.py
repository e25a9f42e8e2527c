"""The file in which `strata subscribe --state` keeps where it stands."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

__all__ = ["Position", "PositionFile"]


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The last packet printed: where to go on, and at which relay."""

    relay: str
    cursor: str
    received_at: int


_DECODER = msgspec.json.Decoder(Position)


class PositionFile:
    """Reads and replaces one position.

    A file is written beside the old one, flushed to the disk and renamed over it, so at every moment there
    is a whole file. It is saved after its packet was printed: a kill in between prints that packet again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unsaved: Position | None = None

    def load(self) -> Position | None:
        """The position last saved, or None. Raises `ValueError` for a file that holds none."""
        try:
            return _DECODER.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError:
            raise ValueError(f"{self._path} holds no position; remove it to start anew") from None

    def advance(self, position: Position) -> None:
        """Remember a position, to be written by the next `save`."""
        self._unsaved = position

    def save(self) -> None:
        """Write the position durably, if it has moved. Raises `OSError`."""
        if self._unsaved is None:
            return
        beside = self._path.with_name(self._path.name + ".new")
        with open(beside, "wb") as file:
            file.write(msgspec.json.encode(self._unsaved) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)
        if os.name == "posix":  # the rename is durable once the folder is
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._unsaved = None
