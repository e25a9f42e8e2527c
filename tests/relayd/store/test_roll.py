"""A roll call over the database: present processes are waited for, and ended ones are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from relayd.roll import OpenSession, Question, parts_of
from relayd.store import Store
from relayd.store.doorbell import Doorbell
from tests.support.waiting import until


def opened(store: Store, number: int) -> OpenSession:
    return OpenSession(f"{store.roll.process}-{number}", 1, "192.0.2.1", None, 0, 0, 0, 0)


class Process:
    """A process that answers at once with two sessions."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sessions = [opened(store, number) for number in (1, 2)]
        self.answers = True
        self._tasks: set[asyncio.Task[None]] = set()

    def asked(self, payload: str) -> None:
        question = msgspec.json.decode(payload, type=Question)
        if self.answers and self.store.roll.process in question.of:
            parts = list(parts_of(self.store.roll.process, 2, self.sessions))
            self._tasks.add(asyncio.create_task(self.store.roll.answer(question.reply, parts)))


@pytest.fixture
async def processes(store: Store, second_store: Store) -> AsyncIterator[tuple[Process, Process]]:
    found = Process(store), Process(second_store)
    for process in found:
        await process.store.listen(lambda head: None, on_question=process.asked)
    yield found


async def test_all_that_are_there_are_heard(processes: tuple[Process, Process]):
    one, other = processes
    roll = await one.store.roll.ask(Question(), timeout=30)
    expected = sorted(session.id for process in processes for session in process.sessions)
    assert [session.id for session in roll.sessions] == expected
    assert (roll.total, roll.silent, roll.next) == (4, 0, None)
    page = await other.store.roll.ask(Question(limit=3), timeout=30)
    assert [session.id for session in page.sessions] == expected[:3]
    assert page.next == expected[2]


async def test_who_does_not_answer_is_counted(processes: tuple[Process, Process]):
    one, other = processes
    other.answers = False
    roll = await one.store.roll.ask(Question(), timeout=0.3)
    assert [session.id for session in roll.sessions] == [session.id for session in one.sessions]
    assert (roll.total, roll.silent) == (2, 1)


async def test_who_has_gone_is_not_waited_for(processes: tuple[Process, Process]):
    one, other = processes
    await other.store.close()
    roll = await one.store.roll.ask(Question(), timeout=30)
    assert (roll.total, roll.silent) == (2, 0)
    assert (await one.store.roll.ask(Question(session=other.sessions[0].id), timeout=30)).sessions == []


async def test_who_listens_to_nothing_hears_a_question_all_the_same(store: Store, second_store: Store):
    """Like a process that learns of commits over a bus."""
    process = Process(second_store)
    bell = Doorbell(
        second_store.url,
        lambda head: None,
        own_pid=lambda: None,
        read_head=lambda connection: connection.fetchval("SELECT last_sequence FROM log_head"),
        connect_timeout=5,
        has_bus=True,
        roll=second_store.roll,
        on_question=process.asked,
    )
    listening = asyncio.Event()
    task = asyncio.create_task(bell.run(listening))
    try:
        await listening.wait()
        roll = await store.roll.ask(Question(), timeout=30)
        assert [session.id for session in roll.sessions] == [session.id for session in process.sessions]
        await until(lambda: not bell._hears_questions, "it to listen no longer")
    finally:
        task.cancel()
