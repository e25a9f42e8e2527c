"""The built console, as committed: complete, small, and without anything that a page of ours may not do."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from relayd.http.console import FOLDER, WebConsole

ROOT = Path(__file__).resolve().parents[3]
WEB = ROOT / "web"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
MAX_INITIAL = 45_000
"""Packed bytes before the first packet is shown."""
MAX_LATER = 8192
"""Packed bytes of a part that is fetched on demand."""
MAX_WORKER = 10_240
"""Packed bytes of the script that checks packets: all code that decides whose key counts, in one piece,
because the page itself needs none of it. It is fetched after the first packets, which do not wait for it."""
FORBIDDEN = re.compile(
    r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|srcdoc)\b"
    r"|\beval\s*\(|\bnew Function\b|\bimportScripts\b|javascript:"
)
URL = re.compile(r"(?:https?|wss?):\\?/\\?/[^\s\"'`<>)]*")
NAMESPACES = {
    "http://www.w3.org/2000/svg",
    "http://www.w3.org/1998/Math/MathML",
    "http://www.w3.org/1999/xhtml",
}


def built() -> dict[str, bytes]:
    return {
        path.relative_to(FOLDER).as_posix(): path.read_bytes()
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def packed(content: bytes) -> int:
    return len(gzip.compress(content, 9, mtime=0))


def test_every_file_is_the_one_that_the_manifest_names():
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in built().items()}
    assert hashes == MANIFEST["files"]
    assert all(found[:16] in name for name, found in hashes.items() if name != "index.html")


def test_the_files_were_built_from_the_sources_that_are_here():
    """`make web` rebuilds them."""
    here = {
        name: hashlib.sha256((WEB / name).read_bytes()).hexdigest() for name in MANIFEST["sources"]["files"]
    }
    assert here == MANIFEST["sources"]["files"], "the console is older than web/src: run `make web`"
    locked = json.loads((WEB / "package-lock.json").read_text())["packages"]
    versions = {name: locked[f"node_modules/{name}"]["version"] for name in MANIFEST["sources"]["packages"]}
    assert versions == MANIFEST["sources"]["packages"], (
        "the console is older than its packages: run `make web`"
    )
    used = {path.relative_to(WEB).as_posix() for path in (WEB / "src/console").rglob("*") if path.is_file()}
    assert used <= here.keys(), "a file of the console is used by nobody"


def test_the_console_is_small():
    files = built()
    page = files["index.html"].decode()
    modules = "\n".join(content.decode() for name, content in files.items() if name.endswith(".js"))
    first = {name for name in files if name == "index.html" or name in page}
    for name in list(first):  # what these import eagerly belongs to them
        for part in re.findall(r'(?:from|import)"\./([^"]+)"', files[name].decode()):
            first.add(f"assets/{part}")
    assert sum(packed(files[name]) for name in first) < MAX_INITIAL
    for name in files.keys() - first:
        most = MAX_WORKER if name.startswith("assets/verify-") else MAX_LATER
        assert packed(files[name]) <= most, name
        assert name.removeprefix("assets/") in modules, f"{name} is used by nobody"


@pytest.mark.parametrize("folder", ["client", "console"])
def test_no_text_becomes_a_page_or_a_script(folder):
    for path in (WEB / "src" / folder).rglob("*"):
        if path.suffix in (".ts", ".tsx", ".html"):
            assert not FORBIDDEN.findall(path.read_text()), path


def test_what_is_built_evaluates_nothing_and_knows_no_other_host():
    for name, content in built().items():
        text = content.decode()
        assert not re.search(r"\beval\s*\(|\bnew Function\b|\bFunction\(|importScripts", text), name
        # Preact has one, for a member that none of our sources uses; trusted types also refuse it.
        assert len(re.findall(r"\.innerHTML\s*=(?!=)", text)) <= 1, name
        assert set(URL.findall(text)) <= NAMESPACES, name
        assert "sourceMappingURL" not in text
    page = built()["index.html"].decode()
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", page)


def test_the_relay_serves_exactly_these_files():
    console = WebConsole.read(public_url=None, websocket_path="/strata")
    assert console.paths == {"/" if name == "index.html" else f"/{name}" for name in MANIFEST["files"]}


def test_a_rebuild_gives_the_same_bytes(tmp_path):
    if shutil.which("node") is None or not (WEB / "node_modules").is_dir():
        pytest.skip("a rebuild needs Node, and `npm ci` in web/")
    shutil.copytree(WEB / "src", tmp_path / "web/src")
    for name in ("package.json", "package-lock.json", "build.mjs", "tsconfig.json"):
        shutil.copy(WEB / name, tmp_path / "web" / name)
    (tmp_path / "web/node_modules").symlink_to(WEB / "node_modules")
    subprocess.run(["node", "build.mjs", "console"], cwd=tmp_path / "web", check=True, timeout=100)
    again = tmp_path / "relayd/console"
    assert json.loads((again / "manifest.json").read_text()) == MANIFEST
    for name, content in built().items():
        assert (again / name).read_bytes() == content
