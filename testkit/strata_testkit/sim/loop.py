"""An event loop whose clock is moved only by its own timers: hours pass in milliseconds, the same each time.

There is no I/O and no waiting. When every task waits for a timer, time jumps to the earliest one. When every
task waits and there is no timer, that is a deadlock, and the loop reports it.

A `Process` can be killed, and it can sleep as a laptop does. While it sleeps, it runs nothing and its clock
stands still, so the time of a process is the loop's time minus the time that the process has slept.
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

__all__ = ["Deadlock", "Process", "VirtualLoop", "run_virtually", "virtual_time"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RESOLUTION = 1e-9
"""Timers that are at most this far apart, in seconds, are due together."""
_FEW_TASKS = 32


class Deadlock(StrataError, AssertionError):
    """Every task waits, and nothing will ever happen."""


class Process:
    """A set of tasks that can be killed. A task that one of them starts belongs to it too.

    Killing cancels all of them at once. They cannot finish anything that takes time, because tasks that they
    start then are cancelled too. A process that is asleep runs nothing until it is awake, or killed.
    """

    _current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)

    def __init__(self, name: str) -> None:
        self.name = name
        self.killed = False
        self.asleep = False
        self.slept = 0.0
        """Virtual seconds that it had slept when it last awoke."""
        self._fell_asleep_at = 0.0
        self._set_aside: list[asyncio.Handle] = []
        self._tasks: list[asyncio.Task[object]] = []
        self._many = _FEW_TASKS

    def start(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run a coroutine in this process."""
        context = contextvars.copy_context()
        context.run(self._current.set, self)
        return context.run(asyncio.get_running_loop().create_task, work)

    def kill(self) -> None:
        """End the process at this instant. Idempotent."""
        self.killed = True
        self.wake_up()  # otherwise its tasks would never see that they are cancelled
        for task in self._tasks.copy():
            task.cancel()

    def fall_asleep(self) -> None:
        """Stop the process and its clock. Idempotent."""
        loop = _virtual_loop()
        if not self.asleep and not self.killed:
            self.asleep = True
            self._fell_asleep_at = loop.now
            loop.sleepers += 1

    def wake_up(self) -> None:
        """Continue where it fell asleep: ready callbacks run, and timers keep their remaining time."""
        if not self.asleep:
            return
        loop = _virtual_loop()
        self.asleep = False
        self.slept += loop.now - self._fell_asleep_at
        loop.sleepers -= 1
        handles, self._set_aside = self._set_aside, []
        loop.resume(handles)

    def set_aside(self, handle: asyncio.Handle) -> None:
        """Keep a callback until the process is awake."""
        self._set_aside.append(handle)

    def adopt(self, task: asyncio.Task[object]) -> None:
        """Add a task to this process."""
        if len(self._tasks) >= self._many:
            self._tasks = [each for each in self._tasks if not each.done()]
            self._many = _FEW_TASKS + 2 * len(self._tasks)
        self._tasks.append(task)
        if self.killed:
            task.cancel()

    @classmethod
    def current(cls) -> Process | None:
        """The process of the running code."""
        return cls._current.get()

    @classmethod
    def of(cls, handle: asyncio.Handle) -> Process | None:
        """The process of a scheduled callback."""
        return handle._context.get(cls._current)  # type: ignore[attr-defined, no-any-return]


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop; `now` is its clock, in seconds. Timers of the same moment run in the order they were set."""

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        self.now = 0.0
        self.sleepers = 0
        """The number of processes that are asleep."""
        self._anybody_slept = False
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_set = 0
        super().__init__()
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Virtual seconds since the loop was made, minus those that the current process has slept."""
        return self.now - self._slept(None)

    def _slept(self, context: Context | None) -> float:
        if not self._anybody_slept:
            return 0.0
        process = Process.current() if context is None else context.get(Process._current)
        return 0.0 if process is None else process.slept

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As in every loop, without checking the thread: there is only one."""
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
        """As in every loop; `when` is in the time of the process to which the callback belongs."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._set_timer(when + self._slept(context), timer)
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As in every loop."""
        return self.call_at(self.now - self._slept(context) + delay, callback, *args, context=context)

    def _set_timer(self, at: float, timer: asyncio.TimerHandle) -> None:
        self._timers_set += 1
        heapq.heappush(self._timers, (at, self._timers_set, timer))

    def resume(self, handles: list[asyncio.Handle]) -> None:
        """Schedule the callbacks that were set aside while a process slept."""
        self._anybody_slept = True
        for handle in handles:
            if isinstance(handle, asyncio.TimerHandle):
                self._set_timer(handle.when() + self._slept(handle._context), handle)  # type: ignore[attr-defined]
            else:
                self._ready.append(handle)

    def _run_once(self) -> None:
        """Run what is ready; if nothing is, jump to the next timer. The base class calls this repeatedly."""
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Deadlock("every task waits, and there is no timer")
            self.now = max(self.now, timers[0][0])
        due = self.now + _RESOLUTION
        while timers and timers[0][0] < due:
            timer = heapq.heappop(timers)[2]
            if self._is_due(timer, due):
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            if self.sleepers and (process := Process.of(handle)) is not None and process.asleep:
                process.set_aside(handle)
            else:
                handle._run()

    def _is_due(self, timer: asyncio.TimerHandle, due: float) -> bool:
        """Whether a timer is due by its process's clock. If the process has slept since, it is set anew."""
        if not self._anybody_slept:
            return True
        at = timer.when() + self._slept(timer._context)  # type: ignore[attr-defined]
        if at >= due:
            self._set_timer(at, timer)
        return at < due

    @staticmethod
    def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        process = Process.current()
        if process is not None:
            process.adopt(task)
        return task


def virtual_time() -> float:
    """Virtual seconds, the same for every process."""
    return _virtual_loop().now


def _virtual_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def run_virtually(work: Callable[[], Coroutine[object, object, T]]) -> T:
    """Run to the end on a new virtual clock.

    Raises what the work raises, `Deadlock`, and `AssertionError` for anything that asyncio had to log: an
    exception that was never retrieved is a fault of the program under test.
    """
    problems: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
        result = runner.run(work())
    if problems:
        first = problems[0]
        raise AssertionError(f"{len(problems)} unseen errors, first: {first}") from first.get("exception")
    return result
