"""How the programs look and end, shown by one of three commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO, Annotated

import pytest
import strata
import typer
from strata.protocol.programs import commands_of, run_program

SOURCES = str(Path(strata.__file__).parent.parent)

app = typer.Typer(rich_markup_mode=None)


@app.command()
def show(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="What to show.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="How many.")] = 3,
) -> None:
    """Show names."""
    for _ in range(20_000):
        typer.echo("a name of twenty chars")


@app.command()
def take(place: Annotated[str, typer.Argument(metavar="PLACE", help="Where it is.")]) -> None:
    """Take a thing."""
    raise ModuleNotFoundError(name=place)


@app.command()
def drop(place: str = "here", file: Path = Path("x")) -> None:
    """Drop a thing."""


def help_of(command: str) -> str:
    group = commands_of(app)
    return group.commands[command].get_help(typer.Context(group.commands[command], info_name=command))


def test_help_shows_an_argument_by_its_name_and_no_type():
    assert "show [OPTIONS] [NAME]...\n" in help_of("show")
    assert "  NAME...  What to show." in help_of("show")
    assert "--limit N" in help_of("show")
    assert "take [OPTIONS] PLACE\n" in help_of("take")
    assert "  PLACE  Where it is.  [required]" in help_of("take")


def run(*arguments: str, stdout: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
    code = "import test_programs as t; t.run_program(t.app, 'toy', says='toy', install='pip install toys')"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={"PYTHONPATH": f"{Path(__file__).parent}:{SOURCES}"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_program_whose_reader_has_gone_away_ends_quietly_as_by_sigpipe():
    with run("show") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "a name of twenty chars\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_told_and_not_shown_as_a_traceback():
    with open("/dev/full", "w") as full, run("show", stdout=full) as process:
        assert process.stderr is not None
        assert process.stderr.read() == "toy: No space left on device\n"
        assert process.wait(60) == 1


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it():
    with run("take", "asyncpg") as process:
        _, problem = process.communicate(timeout=60)
    assert problem == "toy: asyncpg is not installed; toy needs: pip install toys\n"
    assert process.returncode == 2


def test_a_missing_module_of_our_own_is_a_bug_and_shown_as_one(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["toy", "take", "strata.lost"])
    with pytest.raises(ModuleNotFoundError):
        run_program(app, "toy", says="toy", install="pip install toys")
