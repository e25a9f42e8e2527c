"""The file in which `strata subscribe --state` keeps its place."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from strata.protocol.files import replace_file
from strata.protocol.text_files import utf8_of
from strata.relays.connection import Delivery

__all__ = ["MAX_PRINTED", "PositionFile", "PositionKeeper", "Printed", "SavedPosition"]

MAX_PRINTED = 4_096
"""How many of the last printed packets a file remembers."""

_SAVE_INTERVAL = 0.2
_NAME_BYTES = 8


class SavedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position after the last packet printed, at one relay."""

    relay: str
    cursor: str
    received_at: int
    printed: bytes = b""
    """The first bytes of the ids of the packets printed last: see `Printed`."""


_DECODER = msgspec.json.Decoder(SavedPosition)


class Printed:
    """The packets printed last, over all runs with one file, at most `MAX_PRINTED`.

    When the relay's log has lost the position, reading goes on from an earlier place, and what was printed
    after that place comes again.
    """

    def __init__(self, position: SavedPosition | None = None) -> None:
        known = b"" if position is None else position.printed
        self._names = dict.fromkeys(map(bytes, zip(*[iter(known)] * _NAME_BYTES, strict=False)))
        # What comes again pushes none of these out: else all of it would be printed again if it is too much.
        self._earlier = frozenset(self._names)

    def __contains__(self, digest: bytes) -> bool:
        name = digest[:_NAME_BYTES]
        return name in self._earlier or name in self._names

    def __bytes__(self) -> bytes:
        return b"".join(self._names)

    def add(self, digest: bytes) -> None:
        """Note that the packet with this digest was printed."""
        name = digest[:_NAME_BYTES]
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > MAX_PRINTED:
            del self._names[next(iter(self._names))]


class PositionFile:
    """Reads and replaces one position, always as a whole file.

    A position is saved after its packet was printed; a program killed in between prints that packet again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unsaved: SavedPosition | None = None

    def load(self) -> SavedPosition | None:
        """The position last saved, or None if there is no file or an empty one.

        Raises `ValueError` for a file that holds no position, and for a path where none could be saved:
        better now than after the first packet.
        """
        folder = Path(os.path.realpath(self._path)).parent
        if (self._path.exists() and not self._path.is_file()) or not folder.is_dir():
            raise ValueError(f"{self._path} cannot keep a position: name a file in a folder that there is")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{self._path} cannot keep a position: its folder cannot be written to")
        try:
            saved = utf8_of(self._path.read_bytes())
            return _DECODER.decode(saved) if saved else None
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, ValueError, RecursionError):
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

    def __init__(self, url: str, file: PositionFile | None, start: SavedPosition | None) -> None:
        self._url = url
        self._file = file
        self._printed = Printed(start)
        self._last: Delivery | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def has_printed(self, delivery: Delivery) -> bool:
        """Whether this packet was printed, in this run or in an earlier one."""
        return self._file is not None and delivery.packet.digest in self._printed

    def printed(self, delivery: Delivery) -> None:
        """Note that a packet has reached stdout, now or before. A packet without a cursor does not change the
        position."""
        if self._file is None or delivery.cursor is None:
            return
        self._printed.add(delivery.packet.digest)
        self._last = delivery
        if self._timer is None:
            self._save()
            self._timer = self._loop.call_later(_SAVE_INTERVAL, self._save)

    def _save(self) -> None:
        self._timer = None
        if self._file is None or self._last is None:
            return
        self._file.advance(
            SavedPosition(
                relay=self._url,
                cursor=self._last.cursor or "",
                received_at=self._last.received_at,
                printed=bytes(self._printed),
            )
        )
        self._file.save()
        self._last = None

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
