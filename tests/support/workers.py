"""Several processes that run the tests of one collection: forks of the process that has collected.

Workers that each import and collect all tests for themselves take a minute of the processor's time before the
first test, and have six copies of everything that was imported. Here a plugin hands tests to forks and
reports what they send back: for the rest of pytest, one process has run them all.

A worker goes through a group of tests before it begins another, so fixtures of a module are made once. A
worker for which no group is left takes over half of another's.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

from tests.support.fork_server import end_process

__all__ = ["Groups", "add_option", "run_in_workers"]

_END = "end"
"""What a worker is sent in place of a test when there is none left."""
_DONE = "done"
"""What a worker sends after the reports of a test."""
_ENDED = object()
"""What is received from a worker that has ended."""
_GRACE, _PATIENCE = 1.0, 30.0
"""Seconds for workers to end by themselves, and after an interrupt."""


def add_option(parser: pytest.Parser) -> None:
    """Add `--workers`."""
    parser.addoption(
        "--workers",
        metavar="N",
        type=lambda text: os.cpu_count() or 1 if text == "cores" else int(text),
        default=0,
        help="run the tests in N processes (`cores`: one for each core; 0, the default: in this one)",
    )


class Groups:
    """Which worker runs what next: tests are numbers, and neighbours with one key are a group.

    Groups are begun in order. `is_whole` tells of which keys no part may be taken over.
    """

    def __init__(self, keys: Iterable[Hashable], is_whole: Callable[[Hashable], bool]) -> None:
        self._waiting = deque(
            (key, deque(number for number, _ in group))
            for key, group in itertools.groupby(enumerate(keys), key=lambda pair: pair[1])
        )
        self._begun: dict[int, tuple[Hashable, deque[int]]] = {}
        self._is_whole = is_whole

    def next(self, worker: int) -> int | None:
        """The test that a worker is to run; None if there is none left for it."""
        key, group = self._begun.get(worker, (None, deque[int]()))
        if not group:
            if self._waiting:
                key, group = self._waiting.popleft()
            else:
                key, group = self._taken_over()
            self._begun[worker] = (key, group)
        return group.popleft() if group else None

    def put_back(self, worker: int, test: int) -> None:
        """Let the next test of this worker be this one, which it was given and has not begun."""
        if worker in self._begun:
            self._begun[worker][1].appendleft(test)

    def clear(self) -> None:
        """Give out no more tests."""
        self._waiting.clear()
        self._begun.clear()

    def _taken_over(self) -> tuple[Hashable, deque[int]]:
        parts = [one for one in self._begun.values() if not self._is_whole(one[0])]
        key, group = max(parts, key=lambda part: len(part[1]), default=(None, deque[int]()))
        taken = deque(group.pop() for _ in range((len(group) + 1) // 2))
        taken.reverse()
        return key, taken


@dataclass
class _Worker:
    pid: int
    connection: Connection[Any, Any]
    given: deque[int] = field(default_factory=deque[int])
    """The tests that it runs, and is to run next."""


def run_in_workers(
    session: pytest.Session,
    count: int,
    groups: Groups,
    began: Callable[[pytest.Item], None] = lambda item: None,
) -> None:
    """Run all tests of a session in `count` forks; `began` is called in each of them with its first test.

    Raises what pytest raises when it is told to stop. A worker that dies has failed the test that it ran, and
    another takes its place. An interrupt ends the workers, each after it has torn down its fixtures.
    """
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    _Run(session, groups, began).run(min(count, len(session.items)))
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


class _Run:
    def __init__(self, session: pytest.Session, groups: Groups, began: Callable[[pytest.Item], None]) -> None:
        self._session = session
        self._hook = session.config.hook
        self._groups = groups
        self._began = began
        self._workers: dict[int, _Worker] = {}
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        reporter.showfspath = False  # tests of many files come in between each other

    def run(self, count: int) -> None:
        try:
            for number in range(count):
                self._start(number)
            while self._workers:
                ready = wait([worker.connection for worker in self._workers.values()])
                for number, worker in list(self._workers.items()):
                    if worker.connection in ready:
                        self._receive(number, worker)
        finally:
            self._end()

    def _start(self, number: int) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            for worker in self._workers.values():
                worker.connection.close()
            ours.close()
            _work(self._session, theirs, self._began)
        theirs.close()
        worker = self._workers[number] = _Worker(pid, ours)
        # One more than it can run, as a test's fixtures are torn down with a view to the next one.
        self._give(number, worker)
        self._give(number, worker)

    def _give(self, number: int, worker: _Worker) -> None:
        test = self._groups.next(number)
        if test is not None:
            worker.given.append(test)
        try:
            worker.connection.send(_END if test is None else test)
        except BrokenPipeError:
            pass  # it has died, which the next reading tells

    def _receive(self, number: int, worker: _Worker) -> None:
        message = _received(worker.connection)
        if message is _ENDED:
            worker.connection.close()
            del self._workers[number]
            _, status = os.waitpid(worker.pid, 0)
            if worker.given:
                self._lost(number, worker.given, os.waitstatus_to_exitcode(status))
        elif message == _DONE:
            self._finish(worker.given.popleft())
            if self._session.shouldfail or self._session.shouldstop:
                self._groups.clear()
            self._give(number, worker)
        else:
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=message)
            self._hook.pytest_runtest_logreport(report=report)

    def _finish(self, test: int) -> None:
        item = self._session.items[test]
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _lost(self, number: int, given: deque[int], code: int) -> None:
        """Report the test in which a worker has died, and let another worker go on."""
        test = given.popleft()
        item = self._session.items[test]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", f"The worker died in this test: {how}", "call"
        )
        self._hook.pytest_runtest_logreport(report=report)
        self._finish(test)
        for following in given:
            self._groups.put_back(number, following)
        self._start(number)

    def _end(self) -> None:
        for number, limit in ((0, _GRACE), (signal.SIGINT, _PATIENCE), (signal.SIGKILL, _PATIENCE)):
            for worker in self._workers.values():
                os.kill(worker.pid, number)
            deadline = time.monotonic() + limit
            while self._workers and time.monotonic() < deadline:
                for name, worker in list(self._workers.items()):
                    if os.waitpid(worker.pid, os.WNOHANG)[0]:
                        del self._workers[name]
                time.sleep(0.02)


def _received(connection: Connection[Any, Any]) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return _ENDED


class _Sender:
    """Sends what is reported in a worker."""

    def __init__(self, config: pytest.Config, connection: Connection[Any, Any]) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._connection.send(hook.pytest_report_to_serializable(config=self._config, report=report))


def _work(
    session: pytest.Session, connection: Connection[Any, Any], began: Callable[[pytest.Item], None]
) -> None:
    """Run tests until there are none left, and end this process."""
    atexit._clear()  # what the process that has collected will do at its end
    code = 1
    try:
        _report_to(connection, session.config)
        _run_tests(session, connection, began)
        code = 0
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        pass
    finally:
        try:
            session._setupstate.teardown_exact(None)
            end_process(code)
        finally:
            os._exit(code)


def _report_to(connection: Connection[Any, Any], config: pytest.Config) -> None:
    """Send what is reported, show nothing here, and catch output in files of this process alone."""
    plugins = config.pluginmanager
    plugins.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")
    capturing = plugins.getplugin("capturemanager")
    capturing.stop_global_capturing()
    capturing.start_global_capturing()
    capturing.suspend_global_capture()
    plugins.register(_Sender(config, connection))


def _run_tests(
    session: pytest.Session, connection: Connection[Any, Any], began: Callable[[pytest.Item], None]
) -> None:
    test = connection.recv()
    if test != _END:
        began(session.items[test])
    while test != _END:
        following = connection.recv()
        after = None if following == _END else session.items[following]
        item = session.items[test]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        connection.send(_DONE)
        test = following
