"""A line through the latter half: growth is seen, and mere variation is not."""

from __future__ import annotations

import random

import pytest

from benches.slopes import fit, trend


def test_a_line_is_found():
    line = fit([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0), (3.0, 7.0)])
    assert line.slope == pytest.approx(2.0)
    assert line.error == pytest.approx(0.0)


def test_what_grows_is_told_from_what_varies():
    chance = random.Random(7)
    noise = [(float(at), 100 + chance.uniform(-10, 10)) for at in range(200)]
    leaking = [(at, value + at / 5) for at, value in noise]
    assert trend(noise).least < 1.0
    assert trend(leaking).least == pytest.approx(20, abs=8)


def test_warming_up_is_no_growth():
    assert trend([(float(at), min(at, 50.0)) for at in range(101)]).least == pytest.approx(0.0)


def test_what_falls_has_not_grown():
    assert trend([(float(at), -float(at)) for at in range(10)]).least == 0.0
