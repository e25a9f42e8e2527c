"""A worker process, as the parent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import structlog

from relayd.config import ConfigurationError, Settings, load
from relayd.process import workers
from relayd.process.workers import _beat_interval, _Crew, _Worker
from relayd.store.types import StoreError


def made(settings: Settings = Settings(), *, runs_for: float = 600.0) -> tuple[_Worker, Any]:  # noqa: B008 - immutable
    """A worker that accepts connections, with an idle process, and its end of the pipe."""
    worker = object.__new__(_Worker)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=time.sleep, args=(runs_for,))
    process.start()
    worker.settings, worker._process = settings, process
    worker.makes_way = worker.is_hung = False
    worker.timeout, worker.beat_interval = settings.worker_timeout, _beat_interval(settings)
    worker._is_ready, worker._heard_at, worker._said = True, time.monotonic(), None
    worker._pipe, its_end = context.Pipe(duplex=False)
    return worker, its_end


@contextlib.asynccontextmanager
async def kept(worker: _Worker) -> AsyncIterator[asyncio.Task[None]]:
    """Supervise the worker during the block."""
    task = asyncio.create_task(_Crew([worker], asyncio.Event())._keep(worker))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        worker._process.kill()
        worker._process.join()


class _OfAnotherRelease(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return _does_not_exist_here, ()


def _does_not_exist_here() -> NoReturn:
    raise ImportError("cannot import name 'NewError'")


async def test_a_worker_that_does_not_end_is_killed():
    worker, _ = made()
    await worker.ended(patience=0.1)
    assert worker.exit_code == -signal.SIGKILL


async def test_a_worker_that_ends_by_itself_is_not():
    worker, _ = made(runs_for=0)
    await worker.ended(patience=60.0)
    assert worker.exit_code == 0


async def test_a_worker_has_time_for_its_waves_before_it_is_killed(monkeypatch: pytest.MonkeyPatch):
    class _Process:
        pid = None

        def __init__(self, **_: object) -> None: ...

        def start(self) -> None: ...

    monkeypatch.setattr(multiprocessing.get_context("spawn"), "Process", _Process)
    settings = Settings(drain_spread=300.0, drain_timeout=20.0)
    worker = _Worker(settings, "", 0, None)  # type: ignore[arg-type]
    assert worker.patience >= 300.0 + 20.0 + 5.0
    worker.settings = Settings(drain_spread=0.0)
    assert worker.patience > 300.0, "the process goes on with the settings that it began with"


async def test_a_worker_that_is_to_make_way_and_does_not_end_is_killed():
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a child process inherits that
    try:
        worker, _ = made()
    finally:
        signal.signal(signal.SIGUSR2, before)
    worker.patience = 0.3
    crew = _Crew([worker], asyncio.Event())
    renewing = asyncio.create_task(crew._renew())
    crew.renewal.set()
    try:
        async with asyncio.timeout(60):
            while worker.is_alive():  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)
    finally:
        renewing.cancel()
        worker._process.kill()
    assert worker.exit_code == -signal.SIGKILL


async def test_what_keeps_a_worker_from_starting_reaches_its_parent():
    worker, pipe = made()
    try:
        problems = ["peers.toml: a is not a DID", "peers.toml: b is not a DID"]
        pipe.send(ConfigurationError(problems))
        assert worker.silence() < 60.0, "it is looked at while it ends"
        assert worker.problem() == "\n".join(problems)
        # A worker of another release may send objects that this program does not know.
        pipe.send_bytes(pickle.dumps(_OfAnotherRelease()))
        assert "NewError" in str(worker.problem())
        pipe.send(None)
        pipe.send_bytes(pickle.dumps(_OfAnotherRelease()))
        with pytest.raises(StoreError, match="NewError"):
            await worker.ready()
    finally:
        worker._process.kill()


async def test_a_stop_does_not_wait_for_workers_that_are_being_started():
    """One may wait long for its turn at the database, and whatever stopped the relay would kill it."""
    (worker, pipe), stop = made(), asyncio.Event()
    pipe.send({"ws": "ws://relay"})
    assert await workers._ready([worker], stop) == {"ws": "ws://relay"}
    starting = asyncio.create_task(workers._ready([worker], stop))
    await asyncio.sleep(0.05)
    assert not starting.done()
    stop.set()
    async with asyncio.timeout(10):
        assert await starting is None
    pipe.close()  # as it does when it ends: the thread that waits for its message returns
    worker._process.kill()
    worker._process.join()


async def test_what_keeps_a_worker_from_starting_ends_the_start_of_all():
    worker, pipe = made()
    try:
        pipe.send(ConfigurationError(["peers.toml: a is not a DID"]))
        async with asyncio.timeout(10):
            with pytest.raises(ConfigurationError, match="is not a DID"):
                await workers._ready([worker], asyncio.Event())
    finally:
        worker._process.kill()
        worker._process.join()


async def test_a_reload_reaches_workers_that_are_to_be_renewed_before_their_turn_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The last of many gives way minutes later, and would until then serve what is blocked."""
    file = tmp_path / "relayd.toml"
    file.write_text("workers = 2")
    crew_of = [made(load(file))[0] for _ in range(2)]
    heard: list[signal.Signals] = []
    try:
        for worker in crew_of:
            monkeypatch.setattr(worker, "signal", heard.append)
        crew = _Crew(crew_of, asyncio.Event())
        file.write_text("workers = 2\nport = 1\nmax_limit = 499\nblocked_types = ['X']")
        with structlog.testing.capture_logs() as lines:
            await crew.reload()
    finally:
        for worker in crew_of:
            worker._process.kill()
            worker._process.join()
    assert heard == [signal.SIGHUP] * 2 and crew.renewal.is_set()
    assert [line["settings"] for line in lines if line["event"] == "workers_make_way"] == [["max_limit"]]
    assert {(each.settings.max_limit, each.settings.blocked_types) for each in crew_of} == {(499, ("X",))}


@pytest.mark.parametrize(
    "line", ["peers_file = 'none.toml'", "bootstrap_file = 'none.json'", "policy_plugins = ['none']"]
)
async def test_a_reload_after_which_no_worker_could_start_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
):
    file = tmp_path / "relayd.toml"
    file.write_text("workers = 2")
    worker, _ = made(load(file))
    try:
        monkeypatch.setattr(worker, "signal", lambda number: pytest.fail("nothing is to change"))
        crew, before = _Crew([worker], asyncio.Event()), worker.settings
        file.write_text(f"workers = 2\nblocked_types = ['X']\n{line}")
        with structlog.testing.capture_logs() as lines:
            await crew.reload()
    finally:
        worker._process.kill()
        worker._process.join()
    assert [(each["event"], "none" in each["problem"] or "No such" in each["problem"]) for each in lines] == [
        ("not_reloaded", True)
    ]
    assert worker.settings is before and not crew.renewal.is_set()


@pytest.mark.parametrize("is_broken", [False, True])
async def test_no_worker_makes_way_where_its_successor_could_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_broken: bool
):
    worker, _ = made(Settings(peers_file=tmp_path / "gone.toml"))
    crew = _Crew([worker], asyncio.Event())
    if is_broken:

        def version() -> NoReturn:
            raise KeyError("Version")  # raised while a package is being replaced

        monkeypatch.setattr(workers, "installed_version", version)
    crew.renewal.set()
    with structlog.testing.capture_logs() as lines:
        task = asyncio.create_task(crew._renew())
        while not lines and not task.done():  # noqa: ASYNC110 - it says so to a log
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
    assert worker.is_alive() and not worker.makes_way
    assert [each["event"] for each in lines] == ["not_renewed"]
    worker._process.kill()
    worker._process.join()


async def test_whatever_a_killed_worker_has_left_in_its_counters_the_next_one_starts(
    monkeypatch: pytest.MonkeyPatch,
):
    def forget(pid: int) -> NoReturn:
        raise RuntimeError("Read beyond file size detected, file is corrupted.")

    monkeypatch.setattr(workers, "forget_process", forget)
    worker, _ = made(runs_for=0)
    worker._process.join()
    worker.makes_way = True  # it is restarted at once
    started = asyncio.Event()

    def start(*, is_revived: bool) -> None:
        again, _ = made()
        worker._process = again._process
        started.set()

    monkeypatch.setattr(worker, "start", start)
    async with kept(worker) as task:
        async with asyncio.timeout(60):
            await started.wait()
        assert not task.done()


async def test_one_that_cannot_be_started_again_yet_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "_RESTART_PAUSE", 0.01)
    worker, _ = made(runs_for=0)
    worker._process.join()
    tries = 0

    def start(*, is_revived: bool) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise BlockingIOError("Resource temporarily unavailable")
        again, _ = made()
        worker._process = again._process

    monkeypatch.setattr(worker, "start", start)
    async with kept(worker) as task:
        async with asyncio.timeout(60):
            while not worker.is_alive():
                assert not task.done(), "the other workers would have to end"
                await asyncio.sleep(0.01)
    assert tries == 3


async def test_a_worker_is_not_killed_for_the_time_in_which_its_parent_stood_still():
    worker, pipe = made(Settings(worker_timeout=1.0))
    async with kept(worker):
        await asyncio.sleep(0.2)
        time.sleep(1.5)  # noqa: ASYNC251 - the machine was suspended
        await asyncio.sleep(0.2)
        assert worker.is_alive() and not worker.is_hung
        pipe.send(None)
        async with asyncio.timeout(60):  # a worker that hangs by itself is killed all the same
            while worker.is_alive():  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)
        assert worker.is_hung


async def test_a_worker_is_judged_by_the_timeout_that_it_began_with():
    """It sends signs of life as often as that timeout requires, until its successor begins with another."""
    worker, _ = made(Settings(worker_timeout=60))
    worker.settings = Settings(worker_timeout=0.01)
    async with kept(worker):
        await asyncio.sleep(0.3)
        assert worker.is_alive() and not worker.is_hung


@pytest.mark.parametrize("timeout", [0.1, 1.0, 60.0])
def test_a_worker_gives_signs_of_life_in_time(timeout):
    assert _beat_interval(Settings(worker_timeout=timeout)) <= min(1.0, timeout / 3)
