"""Questions to a peer about authors' keys: one at a time about an author, shared by the packets that wait.

A stranger can publish many packets at a peer that fit no key any more (decision 136), and the answer about
their author may be as long as a chain of keys can be. If each packet had its own question, these packets
would hold up the peer's others, and use up what this relay may read there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from relayd.federation.intake import KeyVerdict

__all__ = ["KeyAnswer", "KeyQuestions"]


class KeyAnswer(NamedTuple):
    """A peer's answer about one author."""

    is_whole: bool
    """Whether the peer sent all that it has."""
    verdicts: frozenset[KeyVerdict]
    """What became of the identity packets that it sent."""


@dataclass(slots=True)
class _Author:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    put: int = 0
    """The number of questions put."""
    answer: KeyAnswer | None = None
    """The answer to the last one."""


class KeyQuestions:
    """The questions of one link. `put` asks the peer about one author."""

    def __init__(self, put: Callable[[str], Awaitable[KeyAnswer]]) -> None:
        self._put = put
        self._authors: dict[str, _Author] = {}

    async def ask(self, author: str) -> KeyAnswer:
        """The answer to a question that was put no earlier than now. Raises what `put` raises."""
        asked = self._authors.setdefault(author, _Author())
        asked.waiting += 1
        before = asked.put
        try:
            async with asked.turn:
                if asked.put == before or asked.answer is None:
                    asked.put += 1
                    asked.answer = None
                    asked.answer = await self._put(author)
                return asked.answer
        finally:
            asked.waiting -= 1
            if not asked.waiting:
                del self._authors[author]
