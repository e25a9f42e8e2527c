from __future__ import annotations

import asyncio
import gc
import math

import pytest
from strata.protocol.errors import Closed, RequestTimeout, StrataError
from strata.relays.author_questions import Answers, AuthorQuestions

MOST = 64


class SlowRelay:
    """A relay that answers when the test lets it, wholly about no more than `most` authors, and not at all
    about more than `takes`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.may_answer = asyncio.Event()
        self.most = self.takes = 1000
        self.failure: Exception | None = None
        self.questions = AuthorQuestions(self.put, most=MOST, at_once=4, name="questions")

    async def put(self, authors: tuple[str, ...]) -> Answers[str]:
        self.asked.append(authors)
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        if len(authors) > self.takes:
            return False, {}
        return len(authors) <= self.most, dict.fromkeys(authors, f"{len(authors)}")

    async def answer(self, author: str) -> str:
        return await self.questions.answer(author, since=math.inf)

    def ask(self, *authors: str) -> list[asyncio.Task[str]]:
        return [asyncio.create_task(self.answer(author)) for author in authors]


async def begun() -> None:
    for _ in range(2):  # who asks, and the task that puts the question
        await asyncio.sleep(0)


@pytest.fixture
async def relay():
    relay = SlowRelay()
    yield relay
    await relay.questions.close()


@pytest.mark.req("R-381")
async def test_packets_that_wait_share_questions_put_after_they_came(relay):
    """Else a stranger's packets that fit no key any more would hold up the others of an honest peer."""
    early = relay.ask(*["a"] * 9, "b")
    await begun()
    late = relay.ask(*["a"] * 200, *map(str, range(30)))
    await begun()
    assert [set(some) for some in relay.asked] == [{"a", "b"}, {"a", *map(str, range(30))}]
    relay.may_answer.set()
    assert set(await asyncio.gather(*early)) == {"2"} and set(await asyncio.gather(*late)) == {"31"}
    assert await relay.answer("a") == "1"
    assert len(relay.asked) == 3 and not relay.questions._wanted and not relay.questions._under_way


async def test_a_question_under_way_answers_those_who_need_none_put_later(relay):
    now = asyncio.get_running_loop().time()
    first = relay.questions.answer("a", since=now)
    await begun()
    relay.questions.want("a")
    second = relay.questions.answer("a", since=now)
    relay.may_answer.set()
    assert (await first, await second) == ("1", "1") and len(relay.asked) == 1


async def test_authors_whose_keys_take_too_long_together_are_asked_for_apart(relay):
    relay.may_answer.set()
    relay.most = 1
    for wanted, put in ((64, 64), (8, 8), (2, 1)):
        first, *_ = await asyncio.gather(*relay.ask(*map(str, range(wanted))))
        assert (len(relay.asked[0]), first) == (put, str(put))
        relay.asked.clear()


async def test_authors_without_an_answer_are_asked_about_again_with_those_who_came_since(relay):
    relay.questions = AuthorQuestions(relay.put, most=MOST, at_once=1, name="one question")
    relay.takes = 10
    early = relay.ask(*map(str, range(64)))
    await begun()
    late = relay.ask("0", "new")
    await begun()
    relay.may_answer.set()
    answers = await asyncio.gather(*early, *late)
    assert answers[0] == answers[64] == "8", "and both by one question"
    assert [len(some) for some in relay.asked[:4]] == [64, 8, 16, 2]


async def test_a_question_that_fails_and_one_that_is_given_up_disturb_nobody(relay):
    first, second = relay.ask("a", "a")
    await begun()
    first.cancel()
    await asyncio.wait([first])
    relay.may_answer.set()
    assert await second == "1"
    relay.failure = RequestTimeout("the question", 1)
    with pytest.raises(RequestTimeout):
        await relay.answer("a")
    relay.failure = None
    assert await relay.answer("a") == "1"
    await asyncio.sleep(0)
    assert not relay.questions._tasks


async def test_who_gives_up_is_forgotten_while_the_question_lasts(relay):
    """A question may last half a minute, and a reader with a shorter deadline asks again and again."""
    relay.questions = AuthorQuestions(relay.put, most=MOST, at_once=1, name="one question")
    now = asyncio.get_running_loop().time()
    first = relay.questions.answer("a", since=now)
    await begun()
    given_up = [relay.questions.answer(author, since) for author in "ab" for since in (now, math.inf) * 50]
    for each in given_up:
        each.cancel()
    await asyncio.sleep(0)
    (question,) = relay.questions._under_way
    assert list(question.everyone) == [first]
    assert not any(relay.questions._wanted.values())
    relay.may_answer.set()
    assert await first == "1"


async def test_closing_ends_every_wait(relay):
    waiting = relay.ask(*map(str, range(6)))
    await begun()
    waiting += relay.ask("0", "unasked")
    await asyncio.sleep(0)
    await relay.questions.close()
    assert {type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {Closed}


@pytest.mark.parametrize(
    ("failure", "is_reported"), [(ValueError("a bug"), True), (StrataError("no"), False)]
)
async def test_an_error_of_ours_that_nobody_waits_for_is_reported(relay, failure, is_reported):
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: reported.append(told["exception"]))
    relay.failure = failure
    relay.may_answer.set()
    relay.questions.want("a")
    await begun()
    await asyncio.sleep(0)
    gc.collect()
    assert reported == [failure] * is_reported
