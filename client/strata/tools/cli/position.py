"""The file in which `strata subscribe --state` keeps its place."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from strata.relays.connection import Delivery
from strata.tools.cli.files import replace_file

__all__ = ["PositionFile", "PositionKeeper", "SavedPosition"]

_SAVE_INTERVAL = 0.2


class SavedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position after the last packet printed, at one relay."""

    relay: str
    cursor: str
    received_at: int


_DECODER = msgspec.json.Decoder(SavedPosition)


class PositionFile:
    """Reads and replaces one position, always as a whole file.

    A position is saved after its packet was printed; a program killed in between prints that packet again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unsaved: SavedPosition | None = None

    def load(self) -> SavedPosition | None:
        """The position last saved, or None if there is no file. Raises `ValueError` for a file that holds no
        position, and for a path where none could be saved: better now than after the first packet."""
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
        """Remember a position for the next `save`."""
        self._unsaved = position

    def save(self) -> None:
        """Write the position durably if it has changed. Raises `OSError`."""
        if self._unsaved is None:
            return
        replace_file(self._path, msgspec.json.encode(self._unsaved) + b"\n")
        self._unsaved = None


class PositionKeeper:
    """Saves the position after each printed packet: at once, or within a fifth of a second under load."""

    def __init__(self, url: str, file: PositionFile | None) -> None:
        self._url = url
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def printed(self, delivery: Delivery) -> None:
        """Note that a packet has reached stdout. A packet without a cursor does not change the position."""
        if self._file is None or delivery.cursor is None:
            return
        self._file.advance(
            SavedPosition(relay=self._url, cursor=delivery.cursor, received_at=delivery.received_at)
        )
        if self._timer is None:
            self._file.save()
            self._timer = self._loop.call_later(_SAVE_INTERVAL, self._save)

    def _save(self) -> None:
        self._timer = None
        if self._file is not None:
            self._file.save()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._save()
