"""`relayd serve` as a process: logging, one process or several, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib

import uvloop

from relayd import logs
from relayd.config import ConfigurationError, Settings
from relayd.database import database
from relayd.exit_codes import EXIT_CONFIGURATION, EXIT_DATABASE, EXIT_INCOMPLETE, EXIT_OK, EXIT_PORT
from relayd.logs import get_logger
from relayd.process.listening import PortTaken
from relayd.process.server import print_ready, serve
from relayd.process.signals import stop_on_signals, stop_seconds
from relayd.process.workers import supervise
from relayd.references import check_references
from relayd.store.types import StoreError
from relayd.tls import TlsError, lacks_name, make_certificate

__all__ = ["run"]

_log = get_logger("relayd.daemon")


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code (design §4). Prints the ready line on stdout."""
    logs.configure(settings.log_format, settings.log_level)
    for warning in settings.warnings:
        _log.warning("setting", problem=warning)
    try:
        check_references(settings)  # before a database is made and a worker is started for nothing
        _show_trust(settings)
        main = supervise(settings, print_ready) if settings.workers > 1 else _serve_alone(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
    except asyncio.CancelledError:
        return EXIT_OK  # stopped while it was starting
    except StoreError as error:
        return _failed(EXIT_DATABASE, "database", error)
    except PortTaken as error:
        return _failed(EXIT_PORT, "port", error)
    except TlsError as error:
        return _failed(EXIT_CONFIGURATION, "tls", error)
    except ConfigurationError as error:  # in a file or plug-in that a setting names
        return _failed(EXIT_CONFIGURATION, "configuration", error)
    except Exception:  # our bug; the interpreter's own traceback would wait for the log's reader
        _log.exception("crashed")
        return EXIT_INCOMPLETE
    return EXIT_OK


def _show_trust(settings: Settings) -> None:
    """Make the relay's own certificate, if it is to have one, and log how clients come to trust it."""
    files = make_certificate(settings)
    if files is None or files.ca is None:
        return
    _log.info(
        "tls_self_made", trust=f"SSL_CERT_FILE={files.ca}", consequence="clients need a copy of that file"
    )
    missing = lacks_name(files.cert, settings.public_url)
    if missing is not None:
        advice = f"remove {files.cert.parent}, and the next start makes one that has it"
        _log.warning("certificate_lacks_name", name=missing, advice=advice)


def _failed(code: int, what: str, error: Exception) -> int:
    _log.error("cannot_serve", what=what, problem=logs.problem_of(error))
    return code


async def _serve_alone(settings: Settings) -> None:
    stop = stop_on_signals(stop_seconds(settings))
    async with contextlib.AsyncExitStack() as stack:
        with stop.cancels():
            url = await stack.enter_async_context(database(settings, stop))
        await serve(settings, url, announce=print_ready, stop=stop)
