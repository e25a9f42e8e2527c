"""Lines of stdin for a program that can be interrupted while it waits for input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator

from strata.protocol.text_files import utf8_of

__all__ = ["size_of_stdin", "stdin_lines"]

_MAX_PIECES = 16
_PIECE_BYTES = 64 * 1024
_MAX_LINE_BYTES = 2**20


def size_of_stdin() -> int | None:
    """The size of stdin in bytes; None if stdin is not a file, or is empty."""
    return os.fstat(sys.stdin.fileno()).st_size or None


async def stdin_lines() -> AsyncIterator[bytes]:
    """Each line, without its newline. Raises `ValueError` for a line longer than a mebibyte, and for UTF-16.

    A thread reads, since the loop has no single way to read pipes, files and terminals. The thread pauses
    while 16 pieces of 64 KiB are waiting. It is a daemon thread and reads the descriptor itself, so a blocked
    `read` does not keep the program from ending.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[list[bytes] | Exception | None] = asyncio.Queue()
    room = threading.Semaphore(_MAX_PIECES)  # bounds the queue
    descriptor = sys.stdin.fileno()

    def hand_over(item: list[bytes] | Exception | None) -> None:
        room.acquire()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody listens
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def read() -> None:
        try:
            rest = b""
            for piece in _pieces(descriptor):
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    raise ValueError("a line of the input is longer than a mebibyte")
                hand_over(lines)
            hand_over([rest] if rest else [])
            hand_over(None)
        except (OSError, ValueError) as error:
            hand_over(error)

    threading.Thread(target=read, name="strata-stdin", daemon=True).start()
    while (item := await queue.get()) is not None:
        room.release()
        if isinstance(item, Exception):
            raise item
        for line in item:
            yield line


def _pieces(descriptor: int) -> Iterator[bytes]:
    start = b""  # may be read in parts that are smaller than a byte order mark
    while len(start) < 3 and b"\n" not in start and (piece := os.read(descriptor, _PIECE_BYTES)):
        start += piece
    yield utf8_of(start)
    while piece := os.read(descriptor, _PIECE_BYTES):
        yield piece
