from __future__ import annotations

import asyncio

import pytest

from relayd.federation.key_questions import KeyAnswer, KeyQuestions
from relayd.federation.link_parts import LinkEnded

ALL = KeyAnswer(True, frozenset())


class SlowPeer:
    """A peer that answers when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.questions = KeyQuestions(self.put)

    async def put(self, author: str) -> KeyAnswer:
        self.asked.append(author)
        await self.may_answer.wait()
        return ALL

    def ask(self, author: str) -> asyncio.Task[KeyAnswer]:
        return asyncio.create_task(self.questions.ask(author))


@pytest.mark.req("R-381")
async def test_packets_of_one_author_share_a_question_put_after_they_came():
    """Else a stranger's packets that fit no key any more would hold up the others of an honest peer."""
    peer = SlowPeer()
    first = peer.ask("a")
    await asyncio.sleep(0)
    late = [peer.ask("a") for _ in range(250)]
    other = peer.ask("b")
    await asyncio.sleep(0)
    assert peer.asked == ["a", "b"]
    peer.may_answer.set()
    assert set(await asyncio.gather(first, other, *late)) == {ALL}
    assert peer.asked == ["a", "b", "a"], "a key may have come after the first question"
    await peer.ask("a")
    assert len(peer.asked) == 4 and not peer.questions._authors


async def test_a_question_that_fails_is_put_again_by_whoever_waits():
    peer = SlowPeer()
    first = peer.ask("a")
    await asyncio.sleep(0)
    second, third = peer.ask("a"), peer.ask("a")
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    peer.may_answer.set()
    assert (await second, await third) == (ALL, ALL) and peer.asked == ["a", "a"]

    async def ended(author: str) -> KeyAnswer:
        raise LinkEnded(author)

    with pytest.raises(LinkEnded):
        await KeyQuestions(ended).ask("a")
