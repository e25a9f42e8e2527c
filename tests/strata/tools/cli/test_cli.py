"""The `strata` command line as a whole: help, version, completion, and where wrong names lead."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import strata
import typer
from strata.tools.cli import app
from typer.testing import CliRunner

SOURCES = str(Path(strata.__file__).parent.parent)


def cli(*arguments: str, **environment: str):
    return CliRunner().invoke(app, arguments, prog_name="strata", env=environment)


def commands(group, *path: str):
    """Yield the path of every command and group below a group."""
    for name, command in getattr(group, "commands", {}).items():
        yield (*path, name)
        yield from commands(command, *path, name)


ALL = [(), *commands(typer.main.get_command(app))]


def test_version():
    assert cli("--version").stdout == f"{version('relayd')}\n"
    done = subprocess.run(
        [sys.executable, "-m", "strata.tools.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )
    assert done.stdout == f"{version('relayd')}\n"


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_is_whole(words):
    shown = cli(*words, "--help")
    assert shown.exit_code == 0 and shown.stdout == cli(*words, "-h").stdout
    assert "  -h, --help" in shown.stdout and "[[" not in shown.stdout
    assert "..." not in shown.stdout.partition("\nCommands:\n")[2], "a summary is cut"


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["publsh"], "'publish'"),
        (["context", "lst"], "'list'"),
        (["subscribe", "--limt", "1"], "--limit"),
        (["publish", "--authenticate", "alway"], "always"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(words, nearest):
    done = cli(*words)
    assert done.exit_code == 2 and nearest in done.stderr and not done.stdout


def test_a_shell_can_complete_commands_and_options():
    def completed(words: str) -> list[str]:
        count = str(words.count(" "))
        done: str = cli(_STRATA_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count).stdout
        return done.split()

    assert completed("strata sub") == ["subscribe"]
    assert completed("strata context re") == ["remove"]
    assert completed("strata subscribe --context nowhere --li") == ["--limit", "--live"]
    assert "_STRATA_COMPLETE" in cli(_STRATA_COMPLETE="source_bash").stdout


def test_completion_loads_no_more_than_the_command_line():
    code = "import sys, strata.tools.cli as c; sys.argv = ['strata']\n"
    code += "try: c.main()\nexcept SystemExit: pass\nprint(*sys.modules, file=sys.stderr)"
    environment = {
        **os.environ,
        "PYTHONPATH": SOURCES,
        "_STRATA_COMPLETE": "complete_bash",
        "COMP_WORDS": "strata subscribe --re",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["--relay"]
    assert not {"asyncio", "websockets", "nacl", "msgspec"} & set(done.stderr.split())
