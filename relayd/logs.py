"""Logging: structlog over the standard library, one line per event, on stderr.

A thread writes the lines, so that nobody waits for whoever reads them: a pipe may be full, a terminal
stopped, a disk gone. A bounded number of bytes waits, and a line that finds no room is dropped and counted.

Every logger is a named stdlib logger, so other libraries' lines take the same form. The meaning of each level
is given in docs/guides/operations.md.

Two rules hold for every caller: a field that could carry content or a key is redacted (R-328), and an address
loses its host part (R-330), unless the operator wants full addresses and it is logged as `full_address`.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Final, Literal, TextIO

from strata.protocol.sentences import sentence

if TYPE_CHECKING:
    from structlog.typing import Processor


@contextlib.contextmanager
def _absent(*modules: str) -> Iterator[None]:
    """Make imports of these modules fail inside the block, except those that are loaded already."""
    hidden = [name for name in modules if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# structlog loads these if they are installed, and works without them. They take a quarter of the start time,
# for coloured tracebacks that show the values of variables, and for other kinds of threads.
with _absent("rich", "greenlet", "twisted"):
    import structlog

__all__ = ["configure", "dropped_lines", "flush", "get_logger", "problem_of", "truncated_address"]

_NEVER_LOGGED = frozenset(
    {
        "body",
        "content",
        "packet",
        "payload",
        "frame",
        "signature",
        "seed",
        "key",
        "secret",
        "password",
        "token",
    }
    | {"challenge", "bus_url", "tracing_url", "database_url", "read_database_url", "identity_seed"}
)
_ADDRESS_FIELDS = frozenset({"peer", "remote", "client_address"})

_stamp: Final = structlog.processors.TimeStamper(fmt="iso", utc=True, key="at")

_MAX_WAITING_BYTES: Final = 4 * 2**20
_LINE_OVERHEAD: Final = 256
"""What a waiting line costs beside its text."""
_ATOMIC_BYTES: Final = 4096
"""What a pipe takes in one piece: lines of several processes do not mix."""
_GATHER_SECONDS: Final = 0.005
"""How long the first of several lines waits for others: waking the thread for each costs more than a line."""
_FLUSH_SECONDS: Final = 1.0
"""How long the end of a process waits for the last lines to be written."""


def configure(
    log_format: Literal["auto", "json", "console"] = "auto",
    log_level: str = "info",
    stream: TextIO | None = None,
) -> None:
    """Send all logging of this process to `stream` (default stderr). A second call replaces the first."""
    stream = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        _stamp,
        _withhold,
    ]
    rendering: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if console:
        # A traceback with the values of variables would show what must never be logged.
        plain, colors = structlog.dev.plain_traceback, stream.isatty()
        rendering += [_escape, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    else:
        rendering += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = _Handler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=rendering))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    # These log every connection and statement at INFO; our own loggers decide what to log about them.
    for noisy in ("websockets", "asyncio", "alembic", "sqlalchemy"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module, `get_logger(__name__)`; usable before `configure`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def flush() -> None:
    """Wait until the lines so far are written, for a second at most. For a process that ends at once."""
    for each in logging.getLogger().handlers:
        each.flush()


def dropped_lines() -> int:
    """The number of log lines of this process that were dropped since the last call."""
    return sum(each.take_dropped() for each in logging.getLogger().handlers if isinstance(each, _Handler))


def truncated_address(address: str) -> str:
    """The network of an address, without its host: /24 of IPv4, /48 of IPv6; anything else is `?`."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "?"
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


class _Handler(logging.Handler):
    """Hands lines to a thread that writes them in order.

    When there is no room, lines are dropped until those that wait have been written; then one line tells how
    many are missing. A line that the stream refuses, as on a full disk, is dropped too.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._is_full = False
        self._missing = 0
        """The lines that were dropped and not yet reported in the log."""
        self._dropped = 0
        """The lines that were dropped and not yet counted by `take_dropped`."""
        self._writer: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # our bug
            self.handleError(record)
            return
        self._add(line)

    def _add(self, line: str) -> None:
        with self._changed:
            data = f"{line}\n".encode(errors="backslashreplace")
            if self._is_full or self._bytes > _MAX_WAITING_BYTES:
                self._is_full = True
                self._drop(1)
                return
            if self._writer is None:
                # A daemon, because the end of the process must not wait for it.
                self._writer = threading.Thread(target=self._write, name="log", daemon=True)
                try:
                    self._writer.start()
                except RuntimeError:  # the system allows no more threads
                    self._writer = None
                    self._drop(1)
                    return
            self._waiting.append(data)
            self._bytes += len(data) + _LINE_OVERHEAD
            self._changed.notify_all()

    def _drop(self, lines: int) -> None:
        self._missing += lines
        self._dropped += lines

    def take_dropped(self) -> int:
        """The number of lines dropped since the last call."""
        with self._changed:
            dropped, self._dropped = self._dropped, 0
            return dropped

    def flush(self) -> None:
        """Wait until all lines are written, for a second at most. `logging` calls this as a process ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, _FLUSH_SECONDS)

    def _write(self) -> None:
        """Write what waits, forever: in pieces that a pipe takes whole."""
        while True:
            with self._changed:
                is_idle = not self._waiting
                self._changed.wait_for(lambda: self._waiting)
            if is_idle:
                time.sleep(_GATHER_SECONDS)
            with self._changed:
                lines = [self._waiting.popleft()]
                size = len(lines[0])
                while self._waiting and size + len(self._waiting[0]) <= _ATOMIC_BYTES:
                    lines.append(self._waiting.popleft())
                    size += len(lines[-1])
            try:
                self._put(b"".join(lines))
                is_written = True
            except (OSError, ValueError):  # a ValueError: the stream is closed
                is_written = False
            with self._changed:
                self._bytes -= size + _LINE_OVERHEAD * len(lines)
                if not is_written:
                    self._drop(len(lines))
                if not self._waiting:
                    self._is_full = False
                    if is_written and self._missing:
                        missing, self._missing = self._missing, 0
                        self._add(self._gap(missing))
                self._changed.notify_all()

    def _gap(self, missing: int) -> str:
        """The line in place of those that are missing, whatever the level."""
        said: MutableMapping[str, object] = {"event": "log_lines_dropped", "lines": missing}
        said.update({"problem": "the log was not read", "level": "warning", "logger": __name__})
        said = _stamp(None, "warning", said)
        return self.format(logging.makeLogRecord({"msg": said, "_logger": None, "_name": "warning"}))

    def _put(self, data: bytes) -> None:
        """Write to the stream's descriptor: a thread that is stuck in the stream's own buffer would keep the
        interpreter from ending."""
        try:
            descriptor = self._stream.fileno()
        except io.UnsupportedOperation:
            self._stream.write(data.decode())
            return
        while data:
            data = data[os.write(descriptor, data) :]


def _withhold(
    logger: object, method_name: str, event: MutableMapping[str, object]
) -> MutableMapping[str, object]:
    for name in event.keys() & _NEVER_LOGGED:
        event[name] = "[withheld]"
    for name in event.keys() & _ADDRESS_FIELDS:
        if not str(event[name]).startswith("did:"):  # the name of a relay, which is public
            event[name] = truncated_address(str(event[name]))
    return event


def _escape(
    logger: object, method_name: str, event: MutableMapping[str, object]
) -> MutableMapping[str, object]:
    """Escape the text of a library's line, which may contain a peer's words: they must not control the
    terminal or start a new line. The renderer escapes the other fields."""
    text = str(event.get("event", ""))
    if not text.isprintable():
        event["event"] = repr(text)[1:-1]
    return event


def problem_of(error: BaseException) -> str:
    """The value of the field `problem` for an error."""
    return sentence(error)
