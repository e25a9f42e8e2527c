"""Payers of the database's time, alone and together."""

from __future__ import annotations

import pytest

from relayd.store.payers import Payer, Together, Unbilled, line_of


class Account:
    def __init__(self) -> None:
        self.seconds = 0.0

    def used_database(self, seconds: float, now: float) -> None:
        self.seconds += seconds


@pytest.mark.req("R-321")
def test_of_a_question_for_several_each_pays_its_part():
    much, little = Account(), Account()
    Together([much, little, much, much]).used_database(8.0, 0.0)
    assert (much.seconds, little.seconds) == (6.0, 2.0)


def test_questions_for_several_share_a_line_and_everybody_else_has_one():
    one, other = Unbilled(), Account()
    payers: list[Payer | None] = [one, other, None, Together([one]), Together([other])]
    assert len({line_of(each) for each in payers}) == 4
