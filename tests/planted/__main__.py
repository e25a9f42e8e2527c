"""`python -m tests.planted`: plant each bug in a copy of the source, and see whether its tests notice.

    python -m tests.planted                    all of them: about ten minutes of processor time
    python -m tests.planted --first 3
    python -m tests.planted --only cursor      those with this in their name or file

Exit code 1 where a bug was not found: a test is missing.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.planted.bugs import BUGS, Bug

_ROOT = Path(__file__).resolve().parents[2]
_NEEDED = ("relayd", "client", "tests", "migrations", "docs", "pyproject.toml")
_LONGEST_RUN = 600.0
"""In seconds. A single test that never ends fails after a minute; a run that does not end shows nothing."""
_OPTIONS = (
    "-x -q --timeout 60 -p no:cacheprovider -p tests.planted.unshrunk --hypothesis-profile unshrunk".split()
)
_FAILED = 1
"""The exit code of pytest if a test has failed; other codes mean that no test could be run."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=len(BUGS), help="how many of them")
    parser.add_argument("--only", default="", help="those with this text in their name or file")
    options = parser.parse_args(arguments)
    chosen = [bug for bug in BUGS if options.only in f"{bug.file} {bug.name}"][: options.first]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for name in _NEEDED:
            _copy(_ROOT / name, copy / name)
        found = [_is_found(bug, copy) for bug in chosen]
    print(f"{sum(found)} of {len(chosen)} found", flush=True)
    return 0 if all(found) and found else 1


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "node_modules", ".*"))
    elif source.exists():
        shutil.copy2(source, target)


def _is_found(bug: Bug, copy: Path) -> bool:
    file = copy / bug.file
    source = file.read_text()
    file.write_text(bug.planted_in(source))
    command = [sys.executable, "-m", "pytest", *_OPTIONS, *bug.tests]
    try:
        done = subprocess.run(
            command, cwd=copy, capture_output=True, text=True, timeout=_LONGEST_RUN, check=False
        )
        said, is_found = done.stdout, done.returncode == _FAILED
    except subprocess.TimeoutExpired:
        said, is_found = "it never ended", False
    finally:
        file.write_text(source)
    failures = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    why = "".join(failures[:1] or said.splitlines()[-1:])[:120]
    print(f"{'found' if is_found else 'NOT FOUND'}  {bug.file}: {bug.name}  [{why}]", flush=True)
    return is_found


if __name__ == "__main__":
    sys.exit(main())
