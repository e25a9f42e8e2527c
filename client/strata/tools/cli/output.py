"""Output of the commands: results to stdout, the rest to stderr. No text from others steers the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import stat
import sys
import threading
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

import msgspec
import typer

from strata.protocol.fields import is_content_id
from strata.protocol.ids import is_did
from strata.protocol.sentences import sentence
from strata.protocol.text_files import json_of

if TYPE_CHECKING:
    from rich.progress import Progress

    from strata.relays.connection import Delivery

__all__ = [
    "USAGE",
    "ProgressBar",
    "fail",
    "flushed",
    "harmless",
    "misuse",
    "note",
    "note_error",
    "require_did",
    "require_packet_id",
    "utc",
    "write_delivery",
    "write_key_file",
    "write_line",
    "write_record",
]

_ENCODER = msgspec.json.Encoder()
_SHOW_AFTER = 1.0

USAGE = 2
"""The exit code of a command line that cannot work."""


def write_line(text: str) -> None:
    """Write lines to stdout at once; in an event loop, see `flushed`.

    Raises `BrokenPipeError` if the reader has gone away.
    """
    _write(_harmless_lines(text).encode("utf-8", "replace"))


def write_key_file(path: Path) -> None:
    """Write a line that names a new key file, and says what to do with it."""
    write_line(f"key file: {path} (keep it secret: anyone who has it can sign as you)")


def write_record(record: Mapping[str, object]) -> None:
    """Write one JSON object as a line to stdout, as `write_line` does."""
    _write(json_of(record))


def _write(line: bytes) -> None:
    _stdout.write(line + b"\n")


async def flushed() -> None:
    """Wait until stdout has taken what was written. Raises `BrokenPipeError` if the reader has gone away, and
    `OSError`. Cancelling does not stop the writing.

    In an event loop, a line that would block is kept for this call: a reader that pauses must not stop the
    loop. Whoever writes many lines calls this after each.
    """
    await _stdout.flushed()


class _Stdout:
    """Standard output. What would block an event loop is written by a daemon thread, which writes to the
    descriptor itself, so that a reader that never reads does not keep the program from ending."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        """Lines that are not written yet; the thread may be writing the first ones."""
        self._writing: asyncio.Future[None] | None = None

    def write(self, line: bytes) -> None:
        if self._waiting or (_is_in_loop() and _would_block(line)):
            self._waiting.append(line)
        else:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

    async def flushed(self) -> None:
        while self._waiting:
            if self._writing is None:
                loop = asyncio.get_running_loop()
                self._writing = loop.create_future()
                work = (loop, sys.stdout.fileno(), b"".join(self._waiting), len(self._waiting))
                threading.Thread(target=self._work, args=work, name="strata-stdout", daemon=True).start()
            await asyncio.shield(self._writing)

    def _work(self, loop: asyncio.AbstractEventLoop, descriptor: int, data: bytes, lines: int) -> None:
        problem: OSError | None = None
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody listens
            loop.call_soon_threadsafe(self._written, lines, problem)

    def _written(self, lines: int, problem: OSError | None) -> None:
        assert self._writing is not None
        writing, self._writing = self._writing, None
        if problem is None:
            del self._waiting[:lines]
            writing.set_result(None)
        else:
            self._waiting.clear()
            writing.set_exception(problem)


_stdout = _Stdout()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _would_block(line: bytes) -> bool:
    """Whether a line must wait for the reader of stdout, or may have to."""
    try:
        descriptor = sys.stdout.fileno()
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        # A pipe that is ready takes this much without blocking.
        return len(line) > getattr(select, "PIPE_BUF", 0) or not select.select((), (descriptor,), (), 0)[1]
    except (OSError, ValueError):  # no descriptor
        return False


def note(text: str) -> None:
    """Write lines to stderr, for the user."""
    print(_harmless_lines(text), file=sys.stderr)


def note_error(problem: str | Exception) -> None:
    """Write a line about what went wrong to stderr."""
    note(f"error: {problem if isinstance(problem, str) else sentence(problem)}")


def fail(problem: str | Exception) -> NoReturn:
    """Say what went wrong, and end with exit code 1."""
    note_error(problem)
    raise typer.Exit(1)


def misuse(problem: str | Exception) -> NoReturn:
    """Say what is wrong with the command line, or with a file that it names, and end with exit code 2."""
    note_error(problem)
    raise typer.Exit(USAGE)


def require_packet_id(text: str) -> None:
    """End the command with exit code 2 unless this is a packet id."""
    if not is_content_id(text):
        misuse(f"not a packet id: {text!r}; one is 0x and 64 lowercase hex digits")


def require_did(text: str, option: str = "") -> None:
    """End the command with exit code 2 unless this is a DID; `option` says where it was given."""
    if not is_did(text):
        misuse(f"{option}not a DID: {text!r}; one looks like did:strata:z6Mk…")


def harmless(text: str) -> str:
    """Text on one line that cannot steer a terminal: no control, format or surrogate characters."""
    return "".join(c if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else " " for c in text)


def _harmless_lines(text: str) -> str:
    """Harmless lines: error messages quote a relay's reasons, and key chains hold names that others chose."""
    return text if text.isprintable() else "\n".join(map(harmless, text.split("\n")))


def utc(at: float) -> str:
    """A time in Unix seconds for people, in UTC. It may come from others, and be outside the calendar."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return str(at)


def write_delivery(delivery: Delivery, *, as_json: bool) -> None:
    """Write a packet: a line for people; for programs the signed bytes, and what the relay says of them."""
    packet = delivery.packet
    if as_json:
        write_record(
            {
                "packet": msgspec.Raw(packet.canonical),
                "received_at": delivery.received_at,
                "cursor": delivery.cursor,
                "live": delivery.live,
                "origin_type": delivery.origin_type,
            }
        )
        return
    text = packet.content.get("text")
    if not isinstance(text, str):
        rest = {name: value for name, value in packet.content.items() if name != "type"}
        text = _ENCODER.encode(rest).decode()
    at = utc(delivery.received_at)
    write_line(harmless(f"{at}  {packet.author_id[-8:]}  {packet.content_type}  {text}  {packet.packet_id}"))


class ProgressBar:
    """A bar on stderr. It appears after a second, and only on a terminal."""

    def __init__(self, description: str, total: int | None = None) -> None:
        self._description = description
        self._total = total
        self._done = 0
        self._bar: Progress | None = None
        self._timer: asyncio.TimerHandle | None = None

    def advance(self, amount: int = 1) -> None:
        """Add to the amount of work done."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._timer = asyncio.get_running_loop().call_later(_SHOW_AFTER, self._show)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._bar is not None:
            self._bar.stop()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._bar.add_task(self._description, total=self._total, completed=self._done)
