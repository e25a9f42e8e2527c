"""Errors in words."""

from __future__ import annotations

import errno

import pytest
from strata.protocol.sentences import sentence


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "keys"),
            "keys: No such file or directory",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (ConnectionError("the relay went away"), "the relay went away"),
        (ValueError("not a time"), "not a time"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_is_told_without_its_number(error, text):
    assert sentence(error) == text
