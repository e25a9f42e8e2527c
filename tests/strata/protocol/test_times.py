"""Times and durations as users type them."""

from __future__ import annotations

import pytest
from strata.protocol.times import duration, moment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", 1000_000),
        ("90s", 999_910),
        ("2h", 992_800),
        ("3d", 740_800),
        ("1w", 395_200),
        ("999999999w", 0),
        ("1760000000", 1_760_000_000),
        ("2025-10-09", 1_759_968_000),
        ("2025-10-09T08:53:20Z", 1_760_000_000),
        ("2025-10-09T08:53:20", 1_760_000_000),
        ("2025-10-09T10:53:20+02:00", 1_760_000_000),
        ("1966-05-01", 0),
        ("0001-01-01T00:00:00+14:00", 0),
    ],
)
def test_moments(text, expected):
    assert moment(text, 1000_000.5) == expected


@pytest.mark.parametrize("text", ["", "soon", "-5", "5y", "１２", "9" * 5000, "9999999999w"])
def test_no_moments(text):
    with pytest.raises(ValueError, match="not a time"):
        moment(text, 0)


def test_durations():
    assert [duration(text) for text in ("90s", "30m", "12h", "7d", "2w")] == [
        90,
        1800,
        43_200,
        604_800,
        1_209_600,
    ]


@pytest.mark.parametrize("text", ["", "0s", "12", "h", "-1h", "1.5h", "１h", "9999999999s"])
def test_no_durations(text):
    with pytest.raises(ValueError, match=r"not a duration: .*; try 90s, 30m"):
        duration(text)
