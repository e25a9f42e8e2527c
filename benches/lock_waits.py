"""`python -m benches.lock_waits FILE JOB …`: run a job of the pipeline, and at its end write into a file how
long it has waited for locks."""

from __future__ import annotations

import fcntl
import json
import sys
import time
from pathlib import Path
from typing import Any

from strata_pipeline.cli import app

__all__ = ["main"]


def main() -> None:
    """Run the job."""
    waits: list[float] = []
    flock = fcntl.flock

    def timed(file: Any, operation: int) -> None:
        began = time.monotonic()
        try:
            flock(file, operation)
        finally:
            waits.append(time.monotonic() - began)

    fcntl.flock = timed
    told, arguments = Path(sys.argv[1]), sys.argv[2:]
    try:
        app(arguments, prog_name="strata-pipeline")
    finally:
        told.write_text(json.dumps({"locks": len(waits), "longest": max(waits, default=0.0)}))


if __name__ == "__main__":
    main()
