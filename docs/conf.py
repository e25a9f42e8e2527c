"""The site, built by Sphinx: `make site`."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE.parent),
    str(HERE.parent / "client"),
    str(HERE.parent / "pipeline"),
    str(HERE.parent / "testkit"),
]

project = "Strata"
author = "the relayd authors"
release = metadata.version("strata-sdk")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["requirements/vectors"]
html_theme = "shibuya"
html_title = f"Strata {release}"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"accent_color": "blue", "globaltoc_expand_depth": 0}
html_css_files = ["site.css"]
html_static_path = ["images", "_static"]

myst_heading_anchors = 4
myst_links_external_new_tab = True
nitpicky = False
# A short name such as `Statistics` is public in several places; a type in a signature then stays plain text.
suppress_warnings = ["ref.python", "myst.xref_ambiguous"]

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
default_role = "code"
toc_object_entries_show_parents = "hide"


def public_modules(ring: str) -> list[str]:
    """The modules and packages directly inside a ring that have public names."""
    package = importlib.import_module(ring)
    names = [f"{ring}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]
    shown = [name for name in sorted(names) if not name.rpartition(".")[2].startswith("_")]
    return [name for name in shown if getattr(importlib.import_module(name), "__all__", ())]


def fill_in(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the reference of modules, and the site's order, where a page asks for them."""
    if docname == "index":
        source[0] += contents(source[0])
    source[0] = re.sub(r"<!-- module (\S+) -->", lambda found: automodule(found[1]), source[0])
    source[0] = re.sub(r"<!-- modules of (\S+) -->", lambda found: ring_page(found[1]), source[0])


def ring_page(ring: str) -> str:
    """A part for each module of a ring; a name that several of them have is described in the first."""
    parts = []
    described: set[int] = set()
    for name in public_modules(ring):
        module = importlib.import_module(name)
        things = {each: getattr(module, each) for each in module.__all__}
        again = [each for each, thing in things.items() if callable(thing) and id(thing) in described]
        described.update(map(id, things.values()))
        parts.append(f"## {name}\n\n{automodule(name, again)}")
    return "\n".join(parts)


def automodule(name: str, without: list[str] | None = None) -> str:
    lines = ["```{eval-rst}", f".. automodule:: {name}"]
    lines += ["   :no-index:"] if name == "strata" else []  # each name at the top is indexed in its ring
    lines += [f"   :exclude-members: {', '.join(without)}"] if without else []
    return "\n".join([*lines, "```", ""])


def contents(index: str) -> str:
    """The site's order is that of the contents page: a part for each of its headings."""
    trees = []
    for part in index.split("\n## ")[1:]:
        caption, _, text = part.partition("\n")
        pages = re.findall(r"\]\(([^)#:]+)\.md\)", text)
        trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""]))
    return "\n\n" + "\n".join(trees)


def beside(app: Sphinx, docname: str, source: list[str]) -> None:
    """The README of a folder has the pages beside it: decisions, runbooks."""
    folder, _, name = docname.rpartition("/")
    if folder and name == "README":
        pages = sorted(path.stem for path in (HERE / folder).glob("*.md") if path.stem != name)
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *pages, "```", ""])


def as_restructured_text(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Docstrings are plain text with `code`, lists and indented examples; Sphinx reads reStructuredText."""
    written: list[str] = []
    in_example = False
    for line in lines:
        if line.startswith("    ") and not (written and re.match(r"\s*(- |\d\. )", written[-1])):
            if not in_example and (not written or not written[-1].strip()):
                written += ["::", ""]
                in_example = True
        elif line.strip():
            if in_example and written[-1].strip():
                written.append("")
            in_example = False
        written.append(line if in_example else escape(line))
    lines[:] = written


def escape(line: str) -> str:
    parts = re.split(r"(`+[^`]+`+)", line)
    plain = [re.sub(r"([\\*|]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    code = ["``" + part.strip("`") + "``" for part in parts[1::2]]
    # reStructuredText wants a boundary after code; `events`-like plurals have none.
    joined = plain[0]
    for literal, text in zip(code, plain[1:], strict=True):
        before = "\\ " if joined and (joined[-1].isalnum() or joined[-1] in "*") else ""
        joined += before + literal + ("\\" + " " if text[:1].isalnum() else "") + text
    return joined


def setup(app: Sphinx) -> None:
    os.environ.setdefault("NO_COLOR", "1")
    app.connect("source-read", fill_in)
    app.connect("source-read", beside)
    app.connect("autodoc-process-docstring", as_restructured_text)
