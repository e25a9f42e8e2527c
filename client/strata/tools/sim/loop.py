"""An event loop whose clock is moved by its own timers alone: hours pass in milliseconds, the same each time.

There is no I/O and no waiting. When every task waits for a timer, time jumps to the earliest one; when every
task waits and there is none, that is a deadlock, and it is reported as one.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

from strata.protocol.errors import StrataError

__all__ = ["Deadlock", "Process", "VirtualLoop", "run_virtually"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RESOLUTION = 1e-9
"""Timers no further apart than this, in seconds, are due together."""
_FEW_TASKS = 32


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
        self._tasks: list[asyncio.Task[Any]] = []
        self._many = _FEW_TASKS

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in this process."""
        context = contextvars.copy_context()
        context.run(self._current.set, self)
        return context.run(asyncio.get_running_loop().create_task, work)

    def kill(self) -> None:
        """End it, at this instant. Idempotent."""
        self.killed = True
        for task in self._tasks.copy():
            task.cancel()

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """A task of this process."""
        if len(self._tasks) >= self._many:
            self._tasks = [each for each in self._tasks if not each.done()]
            self._many = _FEW_TASKS + 2 * len(self._tasks)
        self._tasks.append(task)
        if self.killed:
            task.cancel()

    @classmethod
    def current(cls) -> Process | None:
        """The process of the code that runs."""
        return cls._current.get()


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop; `now` is its clock, in seconds. Timers of one moment run in the order of their setting."""

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_set = 0
        super().__init__()
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.now

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As every loop has it, without a look at threads: there is one."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As every loop has it."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As every loop has it."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Run what is ready; with nothing ready, go to the next timer. The base class calls this for ever."""
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Deadlock("every task waits, and there is no timer")
            self.now = max(self.now, timers[0][0])
        due = self.now + _RESOLUTION
        while timers and timers[0][0] < due:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

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
