"""An example as a fork (see `forks`): it runs unchanged, and relays that it starts have their tables."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.databases import copy_of_migrated
from tests.support.forks import STRATA, ForkedProcess

__all__ = ["example", "main"]

_FOLDER = Path(__file__).resolve().parents[2] / "examples"


def example(name: str, *arguments: object) -> ForkedProcess:
    """Start an example."""
    return ForkedProcess(
        STRATA,
        [str(_FOLDER / f"{name}.py"), *map(str, arguments)],
        env=os.environ,
        module=__name__,
        stdin=subprocess.PIPE,
    )


class _Popen(subprocess.Popen[Any]):
    """A relay finds a data folder with a migrated database where it would create one."""

    def __init__(self, command: Sequence[str], *arguments: Any, **options: Any) -> None:
        if command[1:4] == ["-m", "relayd", "serve"]:
            copy_of_migrated(_data_dir(command))
        super().__init__(command, *arguments, **options)


def _data_dir(command: Sequence[str]) -> Path:
    if "--data-dir" in command:
        return Path(command[command.index("--data-dir") + 1])
    settings = Path(command[command.index("--config") + 1])
    return Path(tomllib.loads(settings.read_text())["data_dir"])


def main() -> None:
    """Become the example."""
    del sys.argv[0]
    sys.path[0] = str(_FOLDER)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    subprocess.Popen = _Popen  # type: ignore[assignment, misc]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
