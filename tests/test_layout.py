"""The rules of the layout: what may import what, and what the core must not touch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["client/strata", "relayd", "pipeline/strata_pipeline", "testkit/strata_testkit"]
CORE_MARK = "# Core: no I/O, no clock, no randomness (held by tests/test_layout.py)."
IO_MODULES = {
    "asyncio",
    "socket",
    "time",
    "random",
    "secrets",
    "threading",
    "subprocess",
    "os",
    "asyncpg",
    "ssl",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


@cache
def imports(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return frozenset(found)


def core_modules() -> list[str]:
    """Every module that declares itself core."""
    return [
        str(path.relative_to(ROOT))
        for folder in ("client", "relayd", "testkit")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if CORE_MARK in path.read_text().splitlines()
    ]


@pytest.mark.parametrize("name", core_modules())
def test_the_core_has_no_io_clock_or_randomness(name):
    path = ROOT / name
    assert not {module.partition(".")[0] for module in imports(path)} & IO_MODULES
    assert not any(isinstance(n, ast.AsyncFunctionDef | ast.Await) for n in nodes(path))


def arrows(package: str, folder: Path) -> dict[str, set[str]]:
    """For each folder of a package, the others that its modules import, in functions and for types too."""
    rooms = [path for path in sorted(folder.iterdir()) if (path / "__init__.py").exists()]
    names = {room.name for room in rooms}
    found: dict[str, set[str]] = {}
    for room in rooms:
        modules = {module for path in room.rglob("*.py") for module in imports(path)}
        assert package not in modules, f"{room.name} imports {package} itself, which is outside every ring"
        inside = {module.split(".")[1] for module in modules if module.startswith(f"{package}.")}
        found[room.name] = (inside & names) - {room.name}
    return found


def test_the_library_is_rings_and_relayd_rests_on_the_innermost():
    """Each ring imports only the rings inside it: an import outwards would close a circle."""
    rings = arrows("strata", ROOT / "client/strata")
    TopologicalSorter(rings).prepare()  # raises CycleError, with the circle
    (innermost,) = [ring for ring, inside in rings.items() if not inside]
    for room in sorted({path.parent for path in (ROOT / "relayd").rglob("*.py")}):
        used = {module for path in room.glob("*.py") for module in imports(path)}
        # A relay that reads from others is their client: the one folder that also uses the second ring.
        allowed = {innermost, "relays"} if room.name == "federation" else {innermost}
        assert {module.split(".")[1] for module in used if module.startswith("strata.")} <= allowed, room
    assert rings["relays"] == {innermost}


def test_relayd_knows_the_format_of_lakes_in_one_module_that_is_imported_on_demand():
    """It is an extra: a relay that archives nothing does without the pipeline."""
    homes = {path: imports(path) for path in (ROOT / "relayd").rglob("*.py")}
    needs = {
        path.relative_to(ROOT).as_posix(): {one for one in found if one.startswith("strata_pipeline")}
        for path, found in homes.items()
    }
    found = {path: modules for path, modules in needs.items() if modules}
    assert found == {"relayd/store/archived.py": {"strata_pipeline.lake_format"}}
    code = "import relayd.cli, relayd.store, sys; assert 'strata_pipeline' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_format_of_lakes_needs_no_spark_and_no_arrow():
    heavy = "{'pyspark', 'pyarrow', 'pandas', 'numpy'}"
    code = f"import strata_pipeline.lake_format, sys; assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
    for path in (ROOT / "pipeline/strata_pipeline/lake_format").glob("*.py"):
        ours = [one for one in imports(path) if one.startswith("strata")]
        assert all(one.startswith(("strata.protocol", "strata_pipeline.lake_format")) for one in ours), path


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_modules_need_each_other(package):
    """Not even for types or inside a function."""
    folder = ROOT / package
    modules = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(folder.rglob("*.py"))
    }
    needs = {}
    for name, path in modules.items():
        taken = [
            f"{node.module}.{alias.name}"
            for node in nodes(path)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        homes = {each if each in modules else each.rpartition(".")[0] for each in taken}
        needs[name] = homes & modules.keys() - {name}
    TopologicalSorter(needs).prepare()  # raises CycleError, with the circle


def test_only_one_module_of_relayd_loads_structlog():
    """It loads structlog without the unused parts, which are a quarter of a start."""
    own = [str(path) for path in (ROOT / "relayd").rglob("*.py") if "structlog" in imports(path)]
    assert own == [str(ROOT / "relayd" / "logs.py")]


def test_the_library_imports_nothing_of_the_daemon():
    server_side = {"relayd", "strata_pipeline", "sqlalchemy", "asyncpg", "alembic", "structlog", "uvloop"}
    asked_for = {"metrics.py": {"prometheus_client"}}
    server_side.add("prometheus_client")
    for path in (ROOT / "client").rglob("*.py"):
        found = {module.partition(".")[0] for module in imports(path)} & server_side
        assert found == asked_for.get(path.name, set()), path


@pytest.mark.req("R-010")
def test_canonical_form_is_made_in_one_module():
    for path in [*(ROOT / "client").rglob("*.py"), *(ROOT / "relayd").rglob("*.py")]:
        if path.name != "canonical.py":
            assert "rfc8785" not in imports(path), path


def test_no_handle_of_a_loop_is_asked_for_its_time():
    """If the time is now, uvloop gives a handle without a time: an error once in many days."""
    for path in [*(ROOT / "client").rglob("*.py"), *(ROOT / "relayd").rglob("*.py")]:
        asked = [
            node.lineno
            for node in nodes(path)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "when"
            and not (node.args or node.keywords)
        ]
        assert not asked, (path, asked)


def test_nothing_is_waited_for_in_a_way_that_forgets_to_end():
    """Before Python 3.12 `wait_for` loses a cancellation that comes in the step in which its wait ends."""
    for path in [*(ROOT / "client").rglob("*.py"), *(ROOT / "relayd").rglob("*.py")]:
        used = [
            node.lineno
            for node in nodes(path)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func) == "asyncio.wait_for"
        ]
        assert not used, (path, used)


def test_sql_stays_in_the_store():
    for path in (ROOT / "relayd").rglob("*.py"):
        if "store" not in path.parts:
            used = {module.partition(".")[0] for module in imports(path)}
            assert not used & {"asyncpg", "sqlalchemy", "alembic"}, path


@pytest.mark.parametrize("package", ["client/strata", "relayd", "testkit/strata_testkit"])
def test_every_public_module_says_what_it_exports(package):
    for path in (ROOT / package).rglob("*.py"):
        if path.name.startswith("_") or "_migrations" in path.parts:
            continue
        exported = [
            node
            for node in tree(path).body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        ]
        assert exported, f"{path} has no __all__"
        assert ast.get_docstring(tree(path)), f"{path} has no docstring"


@pytest.mark.req("R-327")
def test_the_relay_has_nothing_to_decrypt_with():
    """No cipher is imported and nothing in it has such a name; it verifies with `strata.protocol.ids`."""
    ciphers = ("nacl.secret", "nacl.public", "nacl.bindings", "cryptography.fernet", "Crypto.Cipher")
    for path in (ROOT / "relayd").rglob("*.py"):
        text = path.read_text()
        assert not any(module.startswith(ciphers) or ".ciphers" in module for module in imports(path)), path
        assert "decrypt" not in text, path


def homes_of_classes(folder: str) -> dict[str, list[str]]:
    """Where each public class of a folder is defined."""
    homes: dict[str, list[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return homes


def test_a_public_class_has_a_name_of_its_own():
    """One name is one thing in all packages. Only `Closed` is two: an error, and a frame of Tx/Rx."""
    homes: dict[str, list[str]] = {}
    for package in PACKAGES:
        for name, found in homes_of_classes(package).items():
            homes.setdefault(name, []).extend(found)
    assert {name: found for name, found in homes.items() if len(found) > 1 and name != "Closed"} == {}


def test_no_literal_is_unpacked_where_its_elements_could_stand():
    """`f(*(a, b))` is `f(a, b)`: that a formatter would use more lines is no reason."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("client", "relayd", "pipeline", "testkit", "tests", "benches", "examples", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "*(" in (text := path.read_text()) or "*[" in text  # few need to be parsed
        for node in nodes(path)
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("tests", "package"),
    [
        ("strata", "client/strata"),
        ("relayd", "relayd"),
        ("pipeline", "pipeline/strata_pipeline"),
        ("testkit", "testkit/strata_testkit"),
    ],
)
def test_tests_stand_where_their_modules_stand(tests, package):
    """In the folder of the same name, and none with a module's name in a folder above that module's."""
    for path in sorted((ROOT / "tests" / tests).rglob("test_*.py")):
        folder = ROOT / package / path.parent.relative_to(ROOT / "tests" / tests)
        name = path.name.removeprefix("test_")
        assert folder.is_dir(), path
        assert (folder / name).exists() or not [*folder.glob(f"*/**/{name}")], path


def test_no_public_function_of_the_library_takes_or_returns_any():
    """`Any` would switch off the type checker in the program that calls. Tools are programs themselves."""
    harmless = ("Task[Any]", "Coroutine[Any, Any, ")  # what a task returns, and what nobody sends to it
    for path in sorted((ROOT / "client/strata").rglob("*.py")):
        if "tools" in path.relative_to(ROOT).parts:
            continue
        public = [node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
        homes: list[ast.Module | ast.ClassDef] = [tree(path), *public]
        for node in [inner for home in homes for inner in home.body]:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            written = f"{ast.unparse(node.args)} {ast.unparse(node.returns) if node.returns else ''}"
            for each in harmless:
                written = written.replace(each, "")
            assert not re.search(r"\bAny\b", written), f"{path.relative_to(ROOT)}:{node.lineno}"
