"""Lines of stdin for a program that must stay interruptible while nothing comes."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator

__all__ = ["size_of_stdin", "stdin_lines"]

_QUEUE = 1024
_PIECE_BYTES = 64 * 1024
_MAX_LINE_BYTES = 2**20


def size_of_stdin() -> int | None:
    """Bytes to come, if stdin is a file."""
    size = os.fstat(sys.stdin.fileno()).st_size
    return size or None


async def stdin_lines() -> AsyncIterator[bytes]:
    """Each line, without its end. Raises `ValueError` for one longer than a mebibyte.

    A thread reads, since neither pipes nor files nor terminals can all be read by the loop; at most 1024 lines
    wait. It is a daemon and reads the descriptor itself: blocked in `read`, it keeps nothing from ending.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[list[bytes] | Exception | None] = asyncio.Queue(_QUEUE)

    def hand_over(item: list[bytes] | Exception | None) -> None:
        asyncio.run_coroutine_threadsafe(queue.put(item), loop).result()

    def read() -> None:
        try:
            rest = b""
            while piece := os.read(descriptor, _PIECE_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                if lines:
                    hand_over(lines)
                if len(rest) > _MAX_LINE_BYTES:
                    raise ValueError("a line of the input is longer than a mebibyte")
            hand_over([rest] if rest else [])
            hand_over(None)
        except RuntimeError:
            pass  # the loop has ended: nobody listens
        except Exception as error:
            hand_over(error)

    descriptor = sys.stdin.fileno()
    threading.Thread(target=read, name="strata-stdin", daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        for line in item:
            yield line
