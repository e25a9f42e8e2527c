"""The runner of guides notices the faults that it exists to find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.guides import Guide

PAGE = """
Prose with `echo nothing`.

```sh
echo "to NAME…"      # a comment
```

```text
to somebody at 12:00
```

1. An item:

   ```sh
   cat one \\
     > two
   helm install
   ```

```toml
port = 1
```
"""


@pytest.fixture
def guide(tmp_path: Path) -> Callable[..., Guide]:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (tmp_path / "one").write_text("from here")

    def make(**options: Any) -> Guide:
        words = {"NAME…": "somebody at noon", "12:00": "…"}
        return Guide(
            str(page), tmp_path, {}, **{"words": words, "elsewhere": {"helm": "no cluster"}} | options
        )

    return make


def test_a_page_is_followed_to_its_end(guide, tmp_path):
    followed = guide()
    assert followed.run("echo") == "to somebody at noon\n"
    followed.run("cat one")
    assert (tmp_path / "two").read_text() == "from here"
    assert followed.block("toml", "port") == "port = 1"
    followed.finish()


def test_what_nobody_runs_is_found_out(guide):
    followed = guide()
    followed.run("echo")
    with pytest.raises(AssertionError, match="next comes this"):
        followed.block("toml", "port")
    with pytest.raises(AssertionError, match="nobody runs"):
        guide().finish()


def test_words_and_reasons_that_stand_for_nothing_are_found_out(guide):
    for options in (
        {"words": {"NAME…": "somebody at noon", "12:00": "…", "gone": "x"}},
        {"elsewhere": {"helm": "no cluster", "gone": "x"}},
    ):
        followed = guide(**options)
        followed.run("echo")
        followed.run("cat")
        followed.block("toml", "port")
        with pytest.raises(AssertionError, match="gone"):
            followed.finish()


def test_a_placeholder_that_nobody_fills_in_and_another_output_are_found_out(guide):
    with pytest.raises(AssertionError, match="leaves something out"):
        guide(words={}).run("echo")
    with pytest.raises(AssertionError, match="the page shows"):
        guide(words={"NAME…": "nobody"}).run("echo")
