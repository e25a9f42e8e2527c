from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from relayd.federation.intake import KeyVerdict
from relayd.federation.key_questions import KeyAnswer, KeyQuestions
from relayd.federation.link_parts import LinkEnded

JUDGED, LATER = frozenset({KeyVerdict.JUDGED}), frozenset({KeyVerdict.LATER})


class SlowPeer:
    """A peer that answers when the test lets it, about no more than `most` authors."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.may_answer = asyncio.Event()
        self.most = 1000
        self.questions = KeyQuestions(self.put, self.spawn)
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def put(self, authors: tuple[str, ...]) -> tuple[bool, dict[str, frozenset[KeyVerdict]]]:
        self.asked.append(authors)
        await self.may_answer.wait()
        return len(authors) <= self.most, {"a": LATER} | dict.fromkeys(authors, JUDGED)

    def ask(self, *authors: str) -> list[asyncio.Task[KeyAnswer]]:
        return [asyncio.create_task(self.questions.ask(author)) for author in authors]


@pytest.mark.req("R-381")
async def test_packets_that_wait_share_questions_put_after_they_came():
    """Else a stranger's packets that fit no key any more would hold up the others of an honest peer."""
    peer = SlowPeer()
    early = peer.ask(*["a"] * 9, "b")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = peer.ask(*["a"] * 200, *map(str, range(30)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [set(some) for some in peer.asked] == [{"a", "b"}, {"a", *map(str, range(30))}]
    peer.may_answer.set()
    assert set(await asyncio.gather(*early, *late)) == {KeyAnswer(True, False, JUDGED)}
    [alone] = peer.ask("a")
    assert await alone == KeyAnswer(True, True, JUDGED)
    assert len(peer.asked) == 3 and not peer.questions._wanted


async def test_authors_whose_keys_take_too_long_together_are_asked_for_apart():
    peer = SlowPeer()
    peer.may_answer.set()
    peer.most = 1
    for wanted, put in ((64, 64), (8, 8), (2, 1)):
        first, *_ = await asyncio.gather(*peer.ask(*map(str, range(wanted))))
        assert (len(peer.asked[0]), first.is_whole, first.is_alone) == (put, put == 1, put == 1)
        peer.asked.clear()


async def test_a_question_that_fails_and_one_that_is_given_up_disturb_nobody():
    peer = SlowPeer()
    first, second = peer.ask("a", "a")
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    peer.may_answer.set()
    assert (await second).is_whole

    async def ended(authors: tuple[str, ...]) -> Any:
        raise LinkEnded("the link has ended")

    peer.questions = KeyQuestions(ended, peer.spawn)
    with pytest.raises(LinkEnded):
        await peer.questions.ask("a")
    await asyncio.sleep(0)
    assert not peer.tasks
