"""The file in which `strata subscribe --state` keeps its place."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from strata.tools.cli.files import replace_file

__all__ = ["PositionFile", "SavedPosition"]


class SavedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The place after the last packet printed, at one relay."""

    relay: str
    cursor: str
    received_at: int


_DECODER = msgspec.json.Decoder(SavedPosition)


class PositionFile:
    """Reads and replaces one position, always as a whole file.

    A position is saved after its packet was printed: a program killed in between prints that packet again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unsaved: SavedPosition | None = None

    def load(self) -> SavedPosition | None:
        """The position last saved, or None. Raises `ValueError` for a file that holds none, and for a place
        where none can be kept: better now than when the first packets are printed."""
        folder = self._path.parent
        if self._path.is_dir() or not folder.is_dir():
            raise ValueError(f"{self._path} cannot keep a position: name a file in a folder that there is")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{self._path} cannot keep a position: its folder cannot be written to")
        try:
            return _DECODER.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise ValueError(f"{self._path} holds no position; remove it to start anew") from None

    def advance(self, position: SavedPosition) -> None:
        """Remember a position, to be written by the next `save`."""
        self._unsaved = position

    def save(self) -> None:
        """Write the position durably, if it has moved. Raises `OSError`."""
        if self._unsaved is None:
            return
        replace_file(self._path, msgspec.json.encode(self._unsaved) + b"\n")
        self._unsaved = None
