"""How a report shows the measured values."""

from __future__ import annotations

import pytest

from benches.measures import Measure, as_json, print_table


def test_shares_are_bars_for_people_and_numbers_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    measure = Measure("b", "n", 5, "us", details={"rounds": [1, 2], "shares": {"most": 30.0, "some": 10.0}})
    print_table([measure])
    printed = capsys.readouterr().out.splitlines()
    assert "b n: rounds 1 / 2" in printed
    assert f"    most     30.00  {'█' * 30}" in printed
    assert f"    some     10.00  {'█' * 10}" in printed
    assert as_json([measure])[0]["details"]["shares"] == {"most": 30.0, "some": 10.0}


def test_no_share_at_all_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([Measure("b", "n", 5, "us", details={"shares": {"one": 0.0, "other": 0.0}})])
    assert "█" not in capsys.readouterr().out
