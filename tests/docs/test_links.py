"""Every path and every anchor that the documentation names exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGE = re.compile(r"\bdocs/(?!\S*NNNN)[\w/.-]+\.(?:md|svg)\b")
SOURCES = (".md", ".py", ".toml", ".yml", ".service", ".timer", "Makefile", "Dockerfile")


def tracked() -> list[Path]:
    """The files of the repository: those known to git, or everything if there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() or [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts
    ]
    return [ROOT / name for name in names if name.endswith(SOURCES) and (ROOT / name).is_file()]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


FILES = tracked()
PAGES = [path for path in FILES if path.suffix == ".md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_the_pages_that_code_names_exist() -> None:
    # Other people's files are written as: owner/repository `path`.
    texts = {path: re.sub(r"[\w.-]+/[\w.-]+ `[^`]+`", "", path.read_text(encoding="utf-8")) for path in FILES}
    named = {(path, name) for path, text in texts.items() for name in PAGE.findall(text)}
    missing = [f"{path.relative_to(ROOT)}: {name}" for path, name in named if not (ROOT / name).exists()]
    assert not missing


def test_every_page_is_on_the_contents_page() -> None:
    """Or on the contents page of its folder, which is on it."""
    index = ROOT / "docs" / "index.md"
    listed = listed_on(index)
    listed |= {page for contents in listed if contents.name == "README.md" for page in listed_on(contents)}
    pages = {page for page in PAGES if page.is_relative_to(index.parent)}
    inside = {page for page in pages if page.parent.name == "python"}
    assert sorted(pages - inside - listed - {index}) == []


def listed_on(contents: Path) -> set[Path]:
    return {(contents.parent / name).resolve() for name in LINK.findall(contents.read_text(encoding="utf-8"))}


def test_the_contents_name_every_page() -> None:
    """The site refuses a page that is neither in the contents nor beside a README that is (docs/conf.py)."""
    docs = ROOT / "docs"
    index = docs / "index.md"
    named = {(docs / link).resolve() for link in re.findall(r"\]\(([^)#:]+\.md)\)", index.read_text("utf-8"))}
    folders = {page.parent for page in named if page.name == "README.md"}
    rings = docs / "reference" / "python"  # its own contents name these
    for page in docs.rglob("*.md"):
        assert page in named | {index} or page.parent in folders | {rings}, page
