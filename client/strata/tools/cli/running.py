"""How a command runs and ends: its exit code, and the message of an expected error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import typer

from strata.protocol.errors import RequestRefused, Retry, StrataError
from strata.protocol.sentences import sentence
from strata.protocol.streams import BROKEN_PIPE, forget_stdout
from strata.tools.cli import output

__all__ = ["run"]

_INTERRUPTED = 130


def run(work: Coroutine[object, object, int]) -> None:
    """Run a command and exit with its code. An expected error becomes a sentence, never a traceback."""
    try:
        code = asyncio.run(_to_the_end(work))
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BrokenPipeError:
        forget_stdout()
        code = BROKEN_PIPE
    except (StrataError, ValueError, OSError) as error:
        output.fail(f"{sentence(error)}{_advice(error)}")
    raise typer.Exit(code)


async def _to_the_end(work: Coroutine[object, object, int]) -> int:
    code = await work
    await output.flushed()
    return code


def _advice(error: Exception) -> str:
    """Advice for the user on an error whose message has none."""
    if not isinstance(error, RequestRefused) or error.retry is not Retry.AUTHENTICATE:
        return ""
    if error.__cause__ is not None:
        return f"; authentication failed: {error.__cause__}"
    return "; the relay wants to know who asks: add --identity FILE"
