"""Questions to a peer about authors' keys: many authors at once, shared by the packets that wait for them.

A stranger can publish many packets at a peer that fit no key any more (decision 136), in the names of many
authors, and the answer about an author may be as long as a chain of keys can be. If each packet had its own
question, these packets would hold up the peer's others, and use up what this relay may ask and read there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from relayd.federation.intake import KeyVerdict

__all__ = ["MOST_AUTHORS", "KeyAnswer", "KeyQuestions"]

MOST_AUTHORS = 64
"""The most authors in one question."""
_AT_ONCE = 4
"""The number of questions under way."""
_FEWER = 8
"""After an answer that was not whole, the next question is about this many times fewer authors."""


class KeyAnswer(NamedTuple):
    """A peer's answer about one author."""

    is_whole: bool
    """Whether the peer sent all that it has."""
    is_alone: bool
    """Whether the question was about this author alone: then no other one can be why it is not whole."""
    verdicts: frozenset[KeyVerdict]
    """What became of the identity packets that it sent."""


_Told = tuple[bool, Mapping[str, frozenset[KeyVerdict]]]
"""Whether the peer sent all that it has, and what became of it, by author."""


class KeyQuestions:
    """The questions of one link. `put` asks the peer about some authors; `spawn` starts a task."""

    def __init__(
        self,
        put: Callable[[tuple[str, ...]], Awaitable[_Told]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._put = put
        self._spawn = spawn
        self._wanted: dict[str, asyncio.Future[KeyAnswer]] = {}
        self._asking = 0
        self._most = MOST_AUTHORS

    async def ask(self, author: str) -> KeyAnswer:
        """The answer to a question that is put no earlier than now. Raises what `put` raises."""
        answer = self._wanted.get(author)
        if answer is None:
            answer = self._wanted[author] = asyncio.get_running_loop().create_future()
            if self._asking < _AT_ONCE:
                self._asking += 1
                self._spawn(self._work())
        await asyncio.wait([answer])  # to cancel this must not cancel the answer of others
        return answer.result()

    async def _work(self) -> None:
        """Ask until no author is wanted any more."""
        try:
            while self._wanted:
                authors = tuple(self._wanted)[: self._most]
                waiting = {author: self._wanted.pop(author) for author in authors}
                try:
                    is_whole, verdicts = await self._put(authors)
                except Exception as error:
                    for answer in waiting.values():
                        answer.set_exception(error)
                        answer.exception()  # nobody may be waiting any more
                    continue
                is_alone = len(authors) == 1
                for author, answer in waiting.items():
                    found = verdicts.get(author, frozenset())
                    answer.set_result(KeyAnswer(is_whole, is_alone, found))
                more, fewer = min(2 * self._most, MOST_AUTHORS), max(1, len(authors) // _FEWER)
                self._most = more if is_whole else fewer
        finally:
            self._asking -= 1
