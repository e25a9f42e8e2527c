"""How one plug-in is called: within a deadline, so many at once, and not on our threads.

An asynchronous plug-in runs as a task of its own on the relay's loop, a synchronous one on two threads of
its own. Neither can be made to stop: a task may ignore its cancelling, and a thread cannot be cancelled.
So the caller goes away at the deadline, and what will not end keeps the place it holds. When all places
are held like that, every further call fails at its deadline, and the relay goes on.
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
"""Takes a `PolicyRequest`, gives a `Refusal` or None; or is asynchronous and does the same."""

_PLACES: Final = 64
"""Packets one plug-in may be asked about at once; others wait, within their deadline."""
_THREADS: Final = 2


class Caller(Protocol):
    """One plug-in behind its bounds."""

    async def call(self, request: object, timeout: float) -> object:
        """The plug-in's answer. Raises what it raises, and `TimeoutError` after `timeout` seconds.

        Cancelling it cancels the question, as far as the plug-in lets itself be cancelled.
        """

    def close(self) -> None:
        """Take no further calls. Idempotent; waits for nothing."""


def caller_of(name: str, plugin: Plugin) -> Caller:
    """The right caller for a plug-in: is it asynchronous or not?"""
    if inspect.iscoroutinefunction(plugin) or inspect.iscoroutinefunction(type(plugin).__call__):
        return _TaskCaller(name, plugin)
    return _ThreadCaller(name, plugin)


class _NotAnAnswer(Exception):
    """A plug-in ended in a way that must not end anything else."""


class _TaskCaller:
    """Calls a coroutine function, each time in a task of its own."""

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
            # Waited for from outside: a task that swallows its cancelling would hold up a direct wait.
            await asyncio.wait({task}, timeout=ends_at - loop.time())
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            raise TimeoutError
        if task.cancelled():  # not by us, so it is no cancelling of our own caller
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
            task.exception()  # looked at, so that an exception without a waiter is not reported as lost

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
    """Calls a plain function on two threads of its own, started with the first call.

    They are daemons: one that hangs does not keep the process from ending. A question holds its place until
    a thread is through with it, so the queue is no longer than there are places.
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
            except RuntimeError:  # the system lets no thread start: nobody would give the place back
                self._places.release()
                raise
            job = _Job(request)
            self._jobs.put(job)
            return await job.future  # cancelled at the deadline: a thread then passes over the job

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
            except BaseException as raised:  # the thread has other questions to answer
                error = _NotAnAnswer(f"the plug-in raised {type(raised).__name__}")
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everyone who waited
                job.loop.call_soon_threadsafe(self._settle, job.future, answer, error)

    def _settle(self, future: asyncio.Future[object], answer: object, error: Exception | None) -> None:
        self._places.release()
        if future.done():
            return
        if error is None:
            future.set_result(answer)
        elif isinstance(error, StopIteration):  # which no future takes
            future.set_exception(_NotAnAnswer("the plug-in raised StopIteration"))
        else:
            future.set_exception(error)

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        self._threads.clear()
