"""What the pages name exists: commands and their options, metrics, log lines, extras."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.guides import blocks

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "runbooks").glob("*.md")),
    ROOT / "README.md",
]
OPERATORS_PAGES = ("operations", "moderation", "scaling", "federation", "limits")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAMES_OF_CONNECTIONS = {"relayd pages"}  # as PostgreSQL shows them
PROMPT = re.compile(r"^(?:\w+=\S+ )*")


@cache
def programs() -> dict[str, Any]:
    from strata.protocol.programs import commands_of
    from strata.tools.cli import app as strata
    from strata_pipeline.cli import app as pipeline

    from relayd.cli import app as relayd

    apps = {"relayd": relayd, "strata": strata, "strata-pipeline": pipeline}
    return {name: commands_of(app) for name, app in apps.items()}


def commands_of(page: Path) -> list[str]:
    """Every command line of ours on a page: in its shell blocks, and inside its sentences."""
    text = page.read_text(encoding="utf-8")
    lines = [
        piece.strip()
        for language, block in blocks(text)
        if language == "sh"
        for line in block.replace("\\\n", " ").splitlines()
        for piece in re.split(r"\s\|\s", line)
    ]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    lines += [piece for span in INLINE.findall(prose) for piece in span.split(" | ")[:1]]
    without_variables = [PROMPT.sub("", line) for line in lines]
    ours = [line for line in without_variables if re.match(r"(relayd|strata|strata-pipeline) [a-z]", line)]
    return [line for line in ours if line not in NAMES_OF_CONNECTIONS]


def fault_of(line: str, command: Any) -> str | None:
    """The part of a command line that does not exist; arguments and the values of options may be anything."""
    context = typer.Context(command)
    for word in shlex.split(line, comments=True)[1:]:
        name = word.partition("=")[0]
        if name.startswith("-") and not name.strip("-").isdigit():
            options = {opt for each in command.params for opt in (*each.opts, *each.secondary_opts)}
            if name not in options | {"-h", "--help", "--version", "-"}:
                return f"no option {name}"
        elif hasattr(command, "get_command"):
            found = command.get_command(context, word)
            if found is None:
                return f"no command {word}"
            command, context = found, typer.Context(found, parent=context)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_options_of_a_page_exist(page: Path) -> None:
    of_program = programs()
    faults = {line: fault_of(line, of_program[line.split()[0]]) for line in commands_of(page)}
    assert {line: fault for line, fault in faults.items() if fault} == {}


def below(command: Any, context: Any) -> Iterator[Any]:
    """The context of a command, and of all commands below it."""
    yield context
    for name, each in getattr(command, "commands", {}).items():
        yield from below(each, typer.Context(each, info_name=name, parent=context))


COMMANDS = [
    context
    for name, program in programs().items()
    for context in below(program, typer.Context(program, info_name=name))
]
PLACEHOLDER = re.compile(r"[A-Z][A-Z_:=]*(\.\.\.)?|<\w+(\|\w+)+>")


@pytest.mark.parametrize("context", COMMANDS, ids=lambda context: context.command_path)
def test_the_help_of_all_programs_is_of_one_hand(context: Any) -> None:
    command = context.command
    summary, _, more = (command.help or "").partition("\n")
    assert re.match(r"[A-Z].*\.$", summary), "a summary, then the rest"
    assert not more or more.startswith("\n")
    for parameter in command.params:
        names, meaning = parameter.get_help_record(context)
        placeholder = names.rpartition("  ")[2].rpartition(" ")[2] if " " in names else names
        is_flag = getattr(parameter, "is_flag", False)
        assert is_flag or PLACEHOLDER.fullmatch(placeholder), names
        meaning = parameter.help.partition("  [default: ")[0]
        assert meaning[0].isupper() or meaning[0].isdigit(), names
        assert meaning.endswith("."), names
        assert not getattr(parameter, "multiple", False) or "may repeat" in meaning, names


def test_an_invented_command_or_option_is_found_out() -> None:
    relayd = programs()["relayd"]
    assert fault_of("relayd ban did:x --reason y --for 7d", relayd) is None
    assert fault_of("relayd bann did:x", relayd) == "no command bann"
    assert fault_of("relayd peers list --jsn", relayd) == "no option --jsn"


@pytest.mark.parametrize("name", OPERATORS_PAGES)
def test_what_is_to_be_typed_stands_in_a_block_that_says_for_what(name: str) -> None:
    """Otherwise no test would see it."""
    text = (ROOT / "docs" / "guides" / f"{name}.md").read_text(encoding="utf-8")
    prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S)
    assert not [line for line in prose.splitlines() if re.match(r" {4,}\S", line)]
    assert all(language for language, _ in blocks(text))


@cache
def sources() -> str:
    folders = ("relayd", "pipeline/strata_pipeline", "client/strata", "testkit/strata_testkit")
    return "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_metrics_that_pages_and_rules_name_exist() -> None:
    rules = sorted((ROOT / "deploy").rglob("*alerts.yml"))
    named = {
        (path.name, name)
        for path in (*PAGES, *rules)
        for name in re.findall(
            r"(?<![\w/.-])relayd_[a-z][a-z_]+[a-z](?![\w-])", path.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 60
    made = set(re.findall(r'"(relayd_[a-z_]+)"', sources()))
    known = made | {f"{name}{end}" for name in made for end in ("_total", "_bucket", "_count", "_sum")}
    assert sorted(each for each in named if each[1] not in known) == []


SECTIONS = {"critical": "Errors", "error": "Errors", "exception": "Errors", "warning": "Warnings"}


def logged(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The section of the page and the event, for each event that a call of a logger may have."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="_log" | "_logger"), attr=level), args=[event, *_]
        ) if level in SECTIONS:
            events = [event.body, event.orelse] if isinstance(event, ast.IfExp) else [event]
            for each in events:
                yield SECTIONS[level], ast.literal_eval(each)


def test_every_line_that_the_relay_logs_as_a_warning_or_an_error_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/log-lines.md").read_text(encoding="utf-8")
    rows = {
        (title, event)
        for title, section in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S)
        for event in re.findall(r"^\| `(\w+)` \|", section, re.M)
    }
    made = {
        each
        for path in (ROOT / "relayd").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for each in logged(node)
    }
    assert len(made) > 50
    made.add(("Warnings", "log_lines_dropped"))  # it stands in for other lines, and no logger makes it
    assert rows == made


def test_lines_of_info_that_the_guide_lists_exist() -> None:
    text = (ROOT / "docs/guides/operations.md").read_text(encoding="utf-8")
    [row] = re.findall(r"^\| info \| (.*) \|$", text, re.M)
    assert len(events := INLINE.findall(row)) > 5
    assert sorted(name for name in events if f'"{name}"' not in sources()) == []


def test_extras_that_pages_install_exist() -> None:
    folders = {"relayd": "relayd", "strata-sdk": "client", "strata-pipeline": "pipeline"}
    known = {
        name: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        for name, folder in folders.items()
    }
    named = {
        (name, extra)
        for page in PAGES
        for name, listed in re.findall(
            r"(relayd|strata-[a-z]+)\[([\w,-]+)\]", page.read_text(encoding="utf-8")
        )
        for extra in listed.split(",")
    }
    assert {("relayd", "bus"), ("relayd", "tracing")} <= named
    assert {(name, extra) for name, extra in named if extra not in known[name]} == set()
