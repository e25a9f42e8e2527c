"""A slow database is available; one that refuses or is silent is not, and the log gives the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

from relayd.faults import FaultLog
from relayd.process.database_watch import watch_database
from relayd.store.types import StoreUnavailable


@asynccontextmanager
async def watching(
    ping: Callable[[], Awaitable[None]], longest_silence: float = 60.0
) -> AsyncIterator[asyncio.Queue[bool]]:
    """The findings, one for each answer."""
    found: asyncio.Queue[bool] = asyncio.Queue()
    watch = watch_database(ping, found.put_nowait, FaultLog(), interval=0, longest_silence=longest_silence)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch)
        async with asyncio.timeout(60):
            yield found
        watching.cancel()


async def test_a_refusal_is_a_loss_at_once_and_each_change_is_one_line():
    answers = iter([None, "gone", "gone", None, None])

    async def ping() -> None:
        if (problem := next(answers, None)) is not None:
            raise StoreUnavailable(problem)

    with structlog.testing.capture_logs() as lines:
        async with watching(ping) as found:
            assert [await found.get() for _ in range(5)] == [True, False, False, True, True]
    assert [(line["event"], line.get("problem")) for line in lines] == [
        ("database_lost", "gone"),
        ("database_back", None),
    ]


async def test_silence_is_a_loss_that_has_a_name():
    silent = asyncio.Event()

    async def ping() -> None:
        await silent.wait()

    with structlog.testing.capture_logs() as lines:
        async with watching(ping, longest_silence=0.01) as found:
            assert await found.get() is False
            silent.set()
            while not await found.get():
                pass
    assert [line.get("problem") for line in lines] == ["no answer in 0.01 s", None]


async def test_an_answer_that_is_late_is_an_answer():
    late = asyncio.Event()

    async def ping() -> None:
        await late.wait()

    with structlog.testing.capture_logs() as lines:
        async with watching(ping) as found:
            await asyncio.sleep(0)
            assert found.empty()
            late.set()
            assert await found.get() is True
    assert lines == []


async def test_an_error_without_words_is_named_by_its_type():
    answers = iter([StoreUnavailable()])

    async def ping() -> None:
        if (error := next(answers, None)) is not None:
            raise error

    with structlog.testing.capture_logs() as lines:
        async with watching(ping) as found:
            assert await found.get() is False
    assert lines[0]["problem"] == "StoreUnavailable"
