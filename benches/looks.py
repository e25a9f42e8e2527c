"""How often a thread looks at a job: often, but not so often that it slows the job down."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

__all__ = ["looks"]

_PAUSE = 20
"""Times the processor time of a look: so looking takes at most a twentieth of a core."""


def looks(done: threading.Event, least_seconds: float) -> Iterator[None]:
    """Yield for each look until `done` is set, with pauses of at least so many seconds."""
    pause = least_seconds
    while not done.wait(pause):
        began = time.thread_time()
        yield
        pause = max(least_seconds, _PAUSE * (time.thread_time() - began))
