"""Logging: structlog over the standard library, one line per event, on stderr.

Every logger is a named stdlib logger, so other libraries' lines take the same form. The meaning of each level
is given in docs/guides/operations.md.

Two rules hold for every caller: a field that could carry content or a key is redacted (R-328), and an address
loses its host part (R-330), unless the operator wants full addresses and it is logged as `full_address`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import sys
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Literal, TextIO

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

__all__ = ["configure", "get_logger", "problem_of", "truncated_address"]

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
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
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


def truncated_address(address: str) -> str:
    """The network of an address, without its host: /24 of IPv4, /48 of IPv6; anything else is `?`."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "?"
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a line that the stream does not accept, as on a full disk; any other error is a bug."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


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
