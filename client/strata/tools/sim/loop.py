"""An event loop whose clock is moved by its own timers alone: hours pass in milliseconds, the same each time.

There is no I/O and no waiting. When every task waits for a timer, time jumps to the earliest one; when every
task waits and there is none, that is a deadlock, and it is reported as one.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from strata.protocol.errors import StrataError

__all__ = ["Deadlock", "Process", "VirtualLoop", "run_virtually"]

T = TypeVar("T")


class Deadlock(StrataError, AssertionError):
    """Everything waits, and nothing will ever happen."""


class Process:
    """A set of tasks that can be killed: whatever is started within it belongs to it, however deep.

    Killing cancels all of them at once. They get no chance to finish anything that takes time, for what they
    start then is cancelled too.
    """

    _current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)

    def __init__(self, name: str) -> None:
        self.name = name
        self.killed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in this process."""
        context = contextvars.copy_context()
        context.run(self._current.set, self)
        return context.run(asyncio.get_running_loop().create_task, work)

    def kill(self) -> None:
        """End it, at this instant. Idempotent."""
        self.killed = True
        for task in list(self._tasks):
            task.cancel()

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """A task of this process."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.killed:
            task.cancel()

    @classmethod
    def current(cls) -> Process | None:
        """The process of the code that runs."""
        return cls._current.get()


class _NoIo(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("every task waits, and there is no timer")
        self.loop.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; `now` is its clock, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _NoIo()
        selector.loop = self
        super().__init__(selector)
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.now

    @staticmethod
    def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        process = Process.current()
        if process is not None:
            process.adopt(task)
        return task


def run_virtually(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to the end on a clock of its own.

    Raises what the work raises, `Deadlock`, and `AssertionError` for anything that asyncio had to log: an
    exception that nobody looked at is a fault of the program under test.
    """
    problems: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
        result = runner.run(work())
    if problems:
        first = problems[0]
        raise AssertionError(f"{len(problems)} unseen errors, first: {first}") from first.get("exception")
    return result
