"""Runs of the `strata` command to its end, as a process that starts at once (see `forks`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.forks import STRATA, run_fork

__all__ = ["run_strata", "strata_command"]


def strata_command(
    *arguments: object, stdin: bytes = b"", timeout: float = 60.0, **environment: str | Path
) -> tuple[int, str, str]:
    """Exit code, standard output, standard error; `environment` is added to the present environment."""
    return _command(arguments, stdin, environment, timeout)


async def run_strata(
    *arguments: object, stdin: bytes = b"", **environment: str | Path
) -> tuple[int, str, str]:
    """As `strata_command`, beside a relay in the same event loop."""
    return await asyncio.to_thread(_command, arguments, stdin, environment)


def _command(
    arguments: Sequence[object], stdin: bytes, environment: Mapping[str, str | Path], timeout: float = 60.0
) -> tuple[int, str, str]:
    code, out, err = run_fork(
        STRATA,
        [str(each) for each in arguments],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdin=stdin,
        timeout=timeout,
    )
    assert b"Traceback" not in err, err.decode()
    return code, out.decode(), err.decode()
