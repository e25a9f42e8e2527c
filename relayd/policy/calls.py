"""How one plug-in is called: within a deadline, with bounded concurrency, and not on the relay's own threads.

An asynchronous plug-in runs as a separate task on the relay's loop, a synchronous one on two separate
threads. Neither can be made to stop: a task may ignore its cancellation, and a thread cannot be cancelled.
So the caller leaves at the deadline, and a call that does not end keeps its place. When all places are held
like that, every further call fails at its deadline, and the relay goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

__all__ = ["Caller", "Plugin", "caller_of"]

Plugin = Callable[[Any], Any]
"""Takes a `PolicyRequest` and returns a `Refusal` or None; or an asynchronous callable that does the same."""

_PLACES: Final = 64
"""The number of packets that one plug-in may be asked about at once; others wait, within their deadline."""
_THREADS: Final = 2


class Caller(Protocol):
    """One plug-in behind its bounds."""

    async def call(self, request: object, timeout: float) -> object:
        """The plug-in's answer. Raises what the plug-in raises, and `TimeoutError` after `timeout` seconds.

        Cancelling it cancels the plug-in's task, as far as the plug-in allows that.
        """

    def close(self) -> None:
        """Take no more calls. Idempotent; waits for nothing."""


def caller_of(name: str, plugin: Plugin) -> Caller:
    """The caller that fits the plug-in: asynchronous or not."""
    if inspect.iscoroutinefunction(plugin) or inspect.iscoroutinefunction(type(plugin).__call__):
        return _TaskCaller(name, plugin)
    return _ThreadCaller(name, plugin)


class _NotAnAnswer(Exception):
    """A plug-in ended in a way that must not end anything else, such as the relay or the caller."""


class _TaskCaller:
    """Calls a coroutine function, each time in a separate task."""

    def __init__(self, name: str, plugin: Callable[[Any], Awaitable[object]]) -> None:
        self._name = name
        self._plugin = plugin
        self._places = asyncio.Semaphore(_PLACES)
        self._tasks: set[asyncio.Task[object]] = set()

    async def call(self, request: object, timeout: float) -> object:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout
        async with asyncio.timeout_at(ends_at):
            await self._places.acquire()
        task = asyncio.create_task(self._run(request), name=f"policy-{self._name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            # Wait from outside: a task that swallows its cancellation would hold up a direct wait.
            await asyncio.wait({task}, timeout=ends_at - loop.time())
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            raise TimeoutError
        if task.cancelled():  # not by us, so this must not look like a cancellation of our own caller
            raise _NotAnAnswer("the plug-in was cancelled")
        return task.result()

    async def _run(self, request: object) -> object:
        try:
            return await self._plugin(request)
        except SystemExit as error:  # would end the relay
            raise _NotAnAnswer("the plug-in raised SystemExit") from error

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        self._places.release()
        if not task.cancelled():
            task.exception()  # retrieved, so that an exception nobody waits for is not reported as lost

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


class _Job:
    """One question to a synchronous plug-in, and the future that takes its answer back to the loop."""

    __slots__ = ("future", "loop", "request")

    def __init__(self, request: object) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[object] = self.loop.create_future()


class _ThreadCaller:
    """Calls a plain function on two separate threads, started with the first call.

    The threads are daemons: a thread that hangs does not keep the process from ending. A request holds its
    place until a thread has finished with it, so the queue is never longer than the number of places.
    """

    def __init__(self, name: str, plugin: Callable[[Any], object]) -> None:
        self._name = name
        self._plugin = plugin
        self._places = asyncio.Semaphore(_PLACES)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def call(self, request: object, timeout: float) -> object:
        async with asyncio.timeout(timeout):
            await self._places.acquire()
            try:
                if not self._threads:
                    self._start()
            except RuntimeError:  # the system allows no more threads: nobody else would release the place
                self._places.release()
                raise
            job = _Job(request)
            self._jobs.put(job)
            return await job.future  # cancelled at the deadline: a thread then skips the job

    def _start(self) -> None:
        for number in range(_THREADS):
            thread = threading.Thread(target=self._work, name=f"policy-{self._name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            answer: object = None
            error: Exception | None = None
            try:
                if not job.future.cancelled():
                    answer = self._plugin(job.request)
            except Exception as raised:
                error = raised
            except BaseException as raised:  # the thread has other requests to answer
                error = _NotAnAnswer(f"the plug-in raised {type(raised).__name__}")
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all waiting callers
                job.loop.call_soon_threadsafe(self._settle, job.future, answer, error)

    def _settle(self, future: asyncio.Future[object], answer: object, error: Exception | None) -> None:
        self._places.release()
        if future.done():
            return
        if error is None:
            future.set_result(answer)
        elif isinstance(error, StopIteration):  # a future does not accept it
            future.set_exception(_NotAnAnswer("the plug-in raised StopIteration"))
        else:
            future.set_exception(error)

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        self._threads.clear()
