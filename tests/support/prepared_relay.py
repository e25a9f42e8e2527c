"""`python -m tests.support.prepared_relay SOURCE serve … --data-dir DIR`: relayd on a copy of SOURCE."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.databases import copy_of

__all__ = ["main"]


def main() -> None:
    """Copy, and become the relay."""
    source, *arguments = sys.argv[1:]
    if "--data-dir" in arguments:  # else it has a database elsewhere
        copy_of(Path(source), Path(arguments[arguments.index("--data-dir") + 1]))
    os.execv(sys.executable, [sys.executable, "-m", "relayd", *arguments])


if __name__ == "__main__":
    main()
