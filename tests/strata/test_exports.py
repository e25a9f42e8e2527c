"""What `import strata` offers, and what it costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import strata

ROOT = Path(__file__).parent.parent.parent


def test_every_name_can_be_had_from_the_package_and_is_public_where_it_lives():
    for name in strata.__all__:
        home = importlib.import_module(strata._HOME_OF[name])
        assert getattr(strata, name) is getattr(home, name)
        assert name in home.__all__
    assert set(strata._HOME_OF) == set(strata.__all__)


@pytest.mark.parametrize("module", ["strata.protocol.errors", "strata.relays.connection"])
def test_these_modules_are_offered_whole(module):
    offered_by_another_name = {"PacketRelay"}  # as `Relay`, with channels
    assert set(importlib.import_module(module).__all__) - offered_by_another_name <= set(strata.__all__)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "client/strata").rglob("__init__.py")), ids=lambda path: path.parent.name
)
def test_a_type_checker_sees_every_name_and_no_other(path):
    """A module-level `__getattr__` would give each misspelt name any type: `strata.conect(…)` would pass."""
    tree = ast.parse(path.read_text())
    assert "__getattr__" not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


BOTH = set(
    "open close publish post subscribe fetch get find channel node "
    "is_connected seats max_packet_bytes latest_time statistics".split()
)
OF_A_RELAY = {"authenticate", "head", "url", "announced", "session", "relay_id"}
OF_A_POOL = {"add", "heads", "remove", "relays", "profile", "unsettled"}


@pytest.mark.parametrize(
    ("made", "surface"),
    [
        (strata.connect("ws://127.0.0.1/strata"), BOTH | OF_A_RELAY),
        (strata.connect_pool(["ws://127.0.0.1/strata"]), BOTH | OF_A_POOL),
    ],
    ids=["Relay", "Pool"],
)
def test_a_relay_and_a_pool_show_what_a_program_needs_and_no_plumbing(made, surface):
    assert {name for name in dir(made) if not name.startswith("_")} == surface


OPTIONS_OF_CHANNELS = {"Pool.channel(options)", "Relay.channel(options)", "create_reliable_channel(options)"}


def annotations_of(name, value):
    """Yield the annotations of a function, or of a class's public members."""
    if inspect.isfunction(value):
        yield from ((f"{name}({of})", text) for of, text in value.__annotations__.items())
    if not inspect.isclass(value):
        return
    for base in value.__mro__:
        if not base.__module__.startswith("strata."):
            continue
        fields = inspect.get_annotations(base)
        yield from ((f"{name}.{of}", text) for of, text in fields.items() if not of.startswith("_"))
        for of, member in vars(base).items():
            if of == "__init__" or not of.startswith("_"):
                member = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if inspect.isfunction(member):
                    yield from annotations_of(f"{name}.{of}", member)


def public_names():
    yield from ((name, getattr(strata, name)) for name in strata.__all__)
    for info in pkgutil.walk_packages(strata.__path__, "strata."):
        if info.name.startswith(("strata.protocol.", "strata.relays.")):
            module = importlib.import_module(info.name)
            for name in module.__all__:
                value = getattr(module, name)
                if getattr(value, "__module__", None) == info.name:
                    yield f"{info.name}.{name}", value


def test_no_public_signature_says_any():
    """Content that others wrote is `object`; options that a program types are a TypedDict."""
    said = {
        where
        for name, value in public_names()
        for where, text in annotations_of(name, value)
        if re.search(r"\bAny\b", str(text))
    }
    assert said <= OPTIONS_OF_CHANNELS


def test_every_module_says_what_is_public():
    for info in pkgutil.walk_packages(strata.__path__, "strata."):
        if info.name.rpartition(".")[2] == "__main__":
            continue
        module = importlib.import_module(info.name)
        assert all(hasattr(module, name) for name in module.__all__), info.name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(strata, "nonsense")  # noqa: B009
    assert "connect" in dir(strata)


@pytest.mark.parametrize(
    ("statement", "spared"),
    [
        ("import strata", {"asyncio", "websockets", "nacl", "msgspec"}),
        ("import strata.tools.cli", {"asyncio", "websockets", "nacl", "msgspec", "rich.progress"}),
        ("import strata.protocol.wire, strata.protocol.packets", {"asyncio", "websockets"}),
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
