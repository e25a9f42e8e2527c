"""Questions to a relay about authors: many authors at once, and one answer for all that wait for it.

The answer about an author may be as long as a chain of keys can be, and a stranger can have a reader wait for
many authors. So few questions are under way, and after an answer that was not whole the next question is
about fewer authors.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeAlias, TypeVar

from strata.protocol.errors import Closed, StrataError

__all__ = ["Answers", "AuthorQuestions"]

_FEWER = 8
"""After an answer that was not whole, the next question is about this many times fewer authors."""

_A = TypeVar("_A")

Answers: TypeAlias = tuple[bool, Mapping[str, _A | StrataError]]
"""Whether the relay sent all that it has, and for each author the answer, or the error to raise."""

_Futures: TypeAlias = dict[asyncio.Future[_A], None]
"""Those that wait for one answer, in order. Who is done, or has given up, is no longer among them."""

_Waiting: TypeAlias = dict[str, _Futures[_A]]


@dataclass(slots=True, eq=False)
class _Question(Generic[_A]):
    """A question under way: when it was put, and who waits for the answer about each author."""

    put_at: float
    waiting: _Waiting[_A]

    @property
    def everyone(self) -> Iterable[asyncio.Future[_A]]:
        return chain.from_iterable(self.waiting.values())


class AuthorQuestions(Generic[_A]):
    """The questions to one relay: `at_once` of them at most, and each about `most` authors at most.

    `put` asks about some authors. If it returns no answer about an author, the author is asked about again.
    Whatever it raises is raised to those that wait.
    """

    def __init__(
        self,
        put: Callable[[tuple[str, ...]], Awaitable[Answers[_A]]],
        *,
        most: int,
        at_once: int,
        name: str,
    ) -> None:
        self._put = put
        self._most = self._next = most
        self._at_once = at_once
        self._name = name
        self._wanted: _Waiting[_A] = {}
        self._under_way: list[_Question[_A]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def want(self, author: str, since: float = -math.inf) -> None:
        """Ask about an author, unless a question put no earlier than `since` does so already."""
        self._waiting_for(author, since)

    def answer(self, author: str, since: float) -> asyncio.Future[_A]:
        """The answer to a question put no earlier than `since`, for one caller, who may cancel it."""
        answer: asyncio.Future[_A] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(functools.partial(self._answered, author))
        self._waiting_for(author, since)[answer] = None
        return answer

    def cancel(self) -> None:
        """Stop asking; whoever waits gets `Closed`. Idempotent."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Stop asking, and wait until all questions have ended."""
        self.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _waiting_for(self, author: str, since: float) -> _Futures[_A]:
        for question in self._under_way:
            if question.put_at >= since and author in question.waiting:
                return question.waiting[author]
        if sum(not task.done() for task in self._tasks) < self._at_once:
            task = asyncio.create_task(self._work(), name=self._name)
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        return self._wanted.setdefault(author, {})

    def _answered(self, author: str, answer: asyncio.Future[_A]) -> None:
        """Drop one that waits no more: a question may last, and those who give up may come again."""
        for waiting in (self._wanted, *(question.waiting for question in self._under_way)):
            if author in waiting:
                waiting[author].pop(answer, None)
        if not answer.cancelled():
            answer.exception()  # retrieved: nobody may be waiting any more, and then the loop would complain

    async def _work(self) -> None:
        """Ask until no author is wanted any more."""
        while self._wanted:
            authors = tuple(islice(self._wanted, self._next))
            now = asyncio.get_running_loop().time()
            question = _Question(now, {author: self._wanted.pop(author) for author in authors})
            self._under_way.append(question)
            try:
                is_whole, answers = await self._put(authors)
            except Exception as error:
                if not _fail(question.everyone, error) and not isinstance(error, StrataError):
                    raise  # the loop reports it: an error in our own code must not go unnoticed
            except BaseException:
                _fail(question.everyone, _closed())
                raise
            else:
                more, fewer = min(2 * self._next, self._most), max(1, len(authors) // _FEWER)
                self._next = more if is_whole else fewer
                self._tell(question.waiting, answers)
            finally:
                self._under_way.remove(question)

    def _tell(self, waiting: _Waiting[_A], answers: Mapping[str, _A | StrataError]) -> None:
        again = _Waiting[_A]()
        for author, some in waiting.items():
            if author not in answers:
                again[author] = some | self._wanted.pop(author, {})
            elif isinstance(found := answers[author], StrataError):
                _fail(some, found)
            else:
                for answer in some:
                    if not answer.done():
                        answer.set_result(found)
        self._wanted = again | self._wanted  # they have waited longest

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:  # a task that is cancelled before its first step asks about nobody
            _fail(chain.from_iterable(self._wanted.values()), _closed())
            self._wanted.clear()


def _closed() -> Closed:
    return Closed("the relay connection was closed")


def _fail(waiting: Iterable[asyncio.Future[_A]], error: Exception) -> bool:
    """Raise the error to all that wait; False if nobody does."""
    answers = [answer for answer in waiting if not answer.done()]
    for answer in answers:
        answer.set_exception(error)
    return bool(answers)
