"""The walls of the house: what may import what, and what the core must not touch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = [
    "relayd/addresses.py",
    "relayd/cursor.py",
    *(f"relayd/access/{name}.py" for name in ("auth", "gate", "limits")),
    *(f"relayd/sessions/{name}.py" for name in ("answers", "liveness", "session")),
    *(f"relayd/feed/{name}.py" for name in ("events", "fanout", "filters", "interest", "subscription")),
    "relayd/admission/checks.py",
    "relayd/policy/policy.py",
    "relayd/policy/rules.py",
    "relayd/store/declined.py",
    "relayd/store/types.py",
    *(
        f"client/strata/{name}.py"
        for name in (
            "auth",
            "backoff",
            "canonical",
            "documents",
            "equivalence",
            "errors",
            "packets",
            "uris",
            "wire",
        )
    ),
    *(f"client/strata/{name}.py" for name in ("curation", "fields", "typed")),
    *(
        f"client/strata/provenance/{name}.py"
        for name in (
            *("attestation", "chains", "history", "judgement", "manifest", "origins", "serving"),
            *("p256", "trust", "verifying", "x509"),
            *(f"evidence/{name}" for name in ("__init__", "apple", "c2pa", "cbor", "jumbf", "play")),
        )
    ),
    *(
        f"client/strata/keys/{name}.py"
        for name in ("chain", "entries", "ledger", "recovery", "roles", "statements", "states")
    ),
    *(
        f"client/strata/conformance/{name}.py"
        for name in ("coverage", "forge", "report", "verdicts", "witness")
    ),
    *(
        f"client/strata/relay/{name}.py"
        for name in (
            "authenticating",
            "connection",
            "inspection",
            "keyring",
            "options",
            "publishing",
            "subscribing",
            "values",
        )
    ),
    *(
        f"client/strata/pool/{name}.py"
        for name in (
            *("membership", "merging", "options", "presence", "probes", "profiles", "publishing"),
            *("reputation", "sweeping", "values"),
        )
    ),
    *(
        f"client/strata/channel/{name}.py"
        for name in ("addresses", "codecs", "errors", "frames", "framing", "receiving", "sending")
    ),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "client/strata/sds").glob("*.py"))),
    *(f"client/strata/segmentation/{name}.py" for name in ("instances", "messages", "parity", "splitting")),
    "client/strata/segmentation/reassembly.py",
    *(f"client/strata/rate_limit/{name}.py" for name in ("budget", "limiter", "values")),
    *(f"client/strata/persistence/{name}.py" for name in ("records", "state")),
    *(f"client/strata/messaging/{name}.py" for name in ("binding", "values")),
    *(
        f"client/strata/reliable/{name}.py"
        for name in (
            *("catching_up", "codec", "config", "engine", "errors", "events", "inbox", "requests"),
            *("retrieval", "sizes", "values"),
        )
    ),
]
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


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("name", CORE)
def test_the_core_has_no_io_clock_or_randomness(name):
    path = ROOT / name
    assert not {module.partition(".")[0] for module in imports(path)} & IO_MODULES
    assert not any(
        isinstance(n, ast.AsyncFunctionDef | ast.Await) for n in ast.walk(ast.parse(path.read_text()))
    )


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


def test_sql_stays_in_the_store():
    for path in (ROOT / "relayd").rglob("*.py"):
        if "store" not in path.parts:
            used = {module.partition(".")[0] for module in imports(path)}
            assert not used & {"asyncpg", "sqlalchemy", "alembic"}, path


@pytest.mark.parametrize("package", ["client/strata", "relayd"])
def test_every_public_module_says_what_it_exports(package):
    for path in (ROOT / package).rglob("*.py"):
        if path.name.startswith("_") or "_migrations" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        exported = [
            node
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        ]
        assert exported, f"{path} has no __all__"
        assert ast.get_docstring(tree), f"{path} has no docstring"


@pytest.mark.req("R-327")
def test_the_relay_has_nothing_to_decrypt_with():
    """No cipher is imported and nothing in it is named so; what it verifies with lives in `strata.ids`."""
    ciphers = ("nacl.secret", "nacl.public", "nacl.bindings", "cryptography.fernet", "Crypto.Cipher")
    for path in (ROOT / "relayd").rglob("*.py"):
        text = path.read_text()
        assert not any(module.startswith(ciphers) or ".ciphers" in module for module in imports(path)), path
        assert "decrypt" not in text, path
