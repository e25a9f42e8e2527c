"""Which sessions a question selects, and how the answers of several processes are combined."""

from __future__ import annotations

import json

import pytest

from relayd.roll import Answers, OpenSession, Question, SessionSelection, parts_of

ALICE, BOB = "did:strata:zAlice", "did:strata:zBob"
ONE, TWO = "0000000a", "7fffffff"


def opened(process: str, number: int, identity: str | None = None, address: str = "192.0.2.1") -> OpenSession:
    return OpenSession(f"{process}-{number}", 1_790_000_000, address, identity, 1, 2, 3, 4)


def numbers(question: Question, *sessions: OpenSession) -> list[int]:
    """The sessions of a process that a question selects, by their numbers."""
    selection = SessionSelection(question)
    for session in sessions:
        selection.add(session)
    assert selection.total == len(sessions)
    return [int(session.id.partition("-")[2]) for session in selection.page()]


def test_a_question_is_about_all_sessions_or_those_of_somebody():
    sessions = (
        opened(ONE, 10, BOB),
        opened(ONE, 9, ALICE, "2001:db8::7"),
        opened(ONE, 2),
    )
    assert numbers(Question(), *sessions) == [2, 9, 10], "numbers, and not their digits, are in order"
    assert numbers(Question(identity=ALICE), *sessions) == [9]
    assert numbers(Question(network="192.0.2.0/24"), *sessions) == [2, 10]
    assert numbers(Question(network="2001:db8::/32", identity=BOB), *sessions) == []
    assert numbers(Question(session=f"{ONE}-10"), *sessions) == [10]
    assert numbers(Question(limit=1), *sessions) == [2]
    assert numbers(Question(after=f"{ONE}-2", limit=1), *sessions) == [9]
    assert numbers(Question(after=f"{TWO}-1"), *sessions) == []
    nowhere = OpenSession(f"{ONE}-1", 0, None, None, 0, 0, 0, 0)
    assert numbers(Question(network="0.0.0.0/8"), nowhere) == []


@pytest.mark.parametrize(
    "members",
    [
        {"after": "x"},
        {"session": "7-1"},
        {"limit": 201},
        {"network": "here"},
        {"network": "fe80::1%" + "x" * 2000},
        {"identity": "somebody"},
        {"identity": "did:strata:z" + "A" * 2000},
    ],
)
def test_a_question_that_makes_no_sense_is_not_asked(members: dict[str, object]):
    with pytest.raises(ValueError):
        Question(**members)  # type: ignore[arg-type]


def test_the_answers_of_all_processes_are_one_page():
    question = Question(limit=3)
    answers = Answers(question, frozenset({ONE, TWO}))
    for part in parts_of(TWO, 2, [opened(TWO, 1), opened(TWO, 2)]):
        answers.receive(part.decode())
    assert (answers.roll().silent, answers.roll().total, answers.roll().next) == (1, 2, None)
    for part in parts_of(ONE, 40, [opened(ONE, 5), opened(ONE, 7)]):
        answers.receive(part.decode())
    answers.receive("what is no answer")
    for part in parts_of(ONE, 40, [opened(ONE, 5), opened(ONE, 7)]):  # it was asked twice
        answers.receive(part.decode())
    roll = answers.roll()
    assert [session.id for session in roll.sessions] == [f"{ONE}-5", f"{ONE}-7", f"{TWO}-1"]
    assert (roll.silent, roll.total, roll.next) == (0, 42, f"{TWO}-1")


def test_only_the_process_of_a_session_is_waited_for():
    assert Answers(Question(session=f"{ONE}-1"), frozenset({TWO})).awaited == (), "it has gone"
    answers = Answers(Question(session=f"{ONE}-1"), frozenset({ONE, TWO}))
    assert answers.roll().silent == 1
    for part in parts_of(ONE, 3, []):
        answers.receive(part.decode())
    assert answers.awaited == ()


def test_an_answer_fits_into_notifications():
    sessions = [opened(ONE, number + 1, ALICE * 20) for number in range(200)]
    parts = list(parts_of(ONE, 200, sessions))
    assert len(parts) > 1
    assert max(map(len, parts)) < 8000
    assert [json.loads(part)[2] for part in parts] == [False] * (len(parts) - 1) + [True]
    answers = Answers(Question(), frozenset({ONE}))
    for part in parts:
        answers.receive(part.decode())
    assert answers.roll().sessions == sessions
