"""Promises made in words: what a channel does not do, and what others can see of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[4] / "docs"


def guides() -> str:
    """Everything written for users about channels, as one line in lower case."""
    pages = [page for page in DOCS.rglob("*.md") if "requirements" not in page.parts]
    about = [page.read_text() for page in pages if re.search(r"reliable channel", page.read_text(), re.I)]
    return " ".join(" ".join(about).lower().split())


@pytest.mark.parametrize(
    "phrases",
    [
        pytest.param([r"causal and not total"], marks=pytest.mark.req("C-299"), id="order"),
        pytest.param(
            [
                r"queries show relays what a participant is looking for",
                r"sync and repair messages travel on the same topic",
            ],
            marks=pytest.mark.req("C-301"),
            id="queries",
        ),
        pytest.param(
            [
                r"default store is in memory and forgets everything",
                r"use sqlite wherever a restart must not lose",
            ],
            marks=pytest.mark.req("C-251", "C-252"),
            id="stores",
        ),
        pytest.param([r"private retrieval is not built"], marks=pytest.mark.req("C-175"), id="privacy"),
        pytest.param(
            [r"without a hook nothing", r"message ids", r"index, count and hash"],
            marks=pytest.mark.req("C-245"),
            id="confidential",
        ),
    ],
)
def test_the_guides_say_it(phrases: list[str]) -> None:
    text = guides()
    for phrase in phrases:
        assert re.search(phrase, text), phrase
