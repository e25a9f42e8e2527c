"""What all commands do in the same way: read the settings, run, print, fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import NoReturn, TypeVar

import typer
from strata.protocol.sentences import sentence
from strata.protocol.text_files import json_of

from relayd.config import ConfigurationError, Settings, load
from relayd.exit_codes import EXIT_CONFIGURATION, EXIT_DATABASE

__all__ = ["fail", "print_json", "read_settings", "run", "say"]

T = TypeVar("T")


def read_settings(config: Path | None, **given: object) -> Settings:
    """The settings from file, environment and command line; invalid ones end the command."""
    try:
        return load(config, os.environ, given)
    except ConfigurationError as error:
        fail(EXIT_CONFIGURATION, *error.problems)


def run(main: Coroutine[object, object, T]) -> T:
    """Run a command's coroutine; an error that an operator can fix becomes a message and an exit code.

    SIGTERM ends it like SIGINT, with cleanup.
    """
    from relayd import logs
    from relayd.store.types import StoreError

    logs.configure("auto", "warning")
    try:
        return asyncio.run(_until_told(main))
    except StoreError as error:
        fail(EXIT_DATABASE, error)
    except ConfigurationError as error:
        fail(EXIT_CONFIGURATION, *error.problems)
    except BrokenPipeError:
        raise  # the reader of stdout has gone: nothing to report
    except (OSError, ValueError) as error:
        fail(EXIT_CONFIGURATION, error)
    except KeyboardInterrupt:
        fail(130, "stopped; start it again to go on")
    except asyncio.CancelledError:
        fail(143, "stopped; start it again to go on")


async def _until_told(main: Coroutine[object, object, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await main


def fail(code: int, *problems: str | Exception) -> NoReturn:
    """End the command with this code, after a line for each problem."""
    for problem in problems:
        say(problem if isinstance(problem, str) else sentence(problem))
    raise typer.Exit(code)


def say(text: str) -> None:
    """Print a line on stderr: stdout is for results."""
    typer.echo(f"relayd: {text}", err=True)


def print_json(value: object) -> None:
    """Print a result for programs, in one line."""
    typer.echo(json_of(value).decode())
