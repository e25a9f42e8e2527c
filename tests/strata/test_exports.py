"""What `import strata` offers, and what it costs."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import strata

MODULES = ["strata.errors", "strata.ids", "strata.packets", "strata.relay"]


def test_every_name_can_be_had_from_the_package_and_is_public_where_it_lives():
    for name in strata.__all__:
        home = importlib.import_module(strata._HOME_OF[name])
        assert getattr(strata, name) is getattr(home, name)
        assert name in home.__all__
    assert set(strata._HOME_OF) == set(strata.__all__)


@pytest.mark.parametrize("module", ["strata.errors", "strata.relay"])
def test_these_modules_are_offered_whole(module):
    assert set(importlib.import_module(module).__all__) <= set(strata.__all__)


def test_every_module_says_what_is_public():
    for info in pkgutil.walk_packages(strata.__path__, "strata."):
        if info.name.rpartition(".")[2] == "__main__":
            continue
        module = importlib.import_module(info.name)
        assert all(hasattr(module, name) for name in module.__all__), info.name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        strata.nonsense  # noqa: B018
    assert "connect" in dir(strata)


@pytest.mark.parametrize(
    ("statement", "spared"),
    [
        ("import strata", {"asyncio", "websockets", "nacl", "msgspec"}),
        ("import strata.cli", {"asyncio", "websockets", "nacl", "msgspec", "rich.progress"}),
        ("import strata.wire, strata.packets", {"asyncio", "websockets"}),
    ],
)
def test_importing_one_part_costs_no_other(statement, spared):
    code = f"import sys; sys.path.insert(0, {str(Path(strata.__file__).parent.parent)!r}); {statement}"
    code += "; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not spared & set(loaded.stdout.split())


@pytest.mark.req("R-334", "R-335")
def test_the_notice_names_what_relays_see_and_promises_nothing():
    notice = strata.WHAT_RELAYS_SEE
    for seen in ("network address", "filters", "author, type, time", "size", "authenticate", "limit"):
        assert seen in " ".join(notice.split())
    assert "does not make your metadata private" in " ".join(notice.split())
