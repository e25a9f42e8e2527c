from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from strata.protocol.ids import Identity

from tests.support.strata_command import run_strata


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Awaitable[tuple[int, str, str]]]:
    """Runs `strata` for a person whose identity is that of `key_file`, if the test has it."""
    return partial(run_strata, STRATA_IDENTITY=tmp_path / "me.json")


@pytest.fixture
def key_file(tmp_path: Path, identities: tuple[Identity, Identity]) -> Path:
    identities[0].save(tmp_path / "me.json")
    return tmp_path / "me.json"
