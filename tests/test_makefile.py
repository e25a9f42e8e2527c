"""The targets: each installs only the stage that it needs, and a stage is installed once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def pins(lock: str) -> set[tuple[str, str]]:
    """The packages of a lock file with their versions; a package may have several, for different machines."""
    return set(re.findall(r"^(\S+)==([^\s;]+)", (ROOT / "locks" / lock).read_text(), re.M))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the Makefile reads, and an installer that only records its requests."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("client", "relayd", "pipeline", "testkit"):
        (tmp_path / folder).mkdir()
        shutil.copy(ROOT / folder / "pyproject.toml", tmp_path / folder)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv").mkdir()
    installer = tmp_path / "scripts/install.sh"
    installer.write_text('#!/bin/sh\necho "$1" >> installed\n')
    installer.chmod(0o755)
    return tmp_path


def make(checkout: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    command = ["make", f"PYTHON={sys.executable}", *targets]
    # Under `make test` these would make it a part of that make, which prints the folders that it enters.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, timeout=60)


def installed(checkout: Path) -> list[str]:
    """The stages installed since the last call."""
    record = checkout / "installed"
    stages = record.read_text().split() if record.exists() else []
    record.unlink(missing_ok=True)
    return stages


@pytest.mark.parametrize(
    ("target", "stage"),
    [
        ("run", "relay"),
        ("demo", "relay"),
        ("pipeline", "pipeline"),
        *(
            (target, "dev")
            for target in ("test", "unit", "coverage", "lint", "types", "fmt", "bench", "docs", "wheel")
        ),
    ],
)
def test_a_target_installs_what_it_needs(checkout, target, stage):
    listed = make(checkout, "--dry-run", target).stdout
    assert re.findall(r"scripts/install\.sh (\w+)", listed) == [stage]


def test_a_stage_is_installed_once_and_again_when_its_lock_changes(checkout):
    stamp = checkout / ".venv/.relay"
    make(checkout, ".venv/.relay")
    make(checkout, ".venv/.relay")
    assert installed(checkout) == ["relay"]
    later = stamp.stat().st_mtime + 1
    os.utime(checkout / "locks/relay.txt", (later, later))
    make(checkout, ".venv/.relay")
    assert installed(checkout) == ["relay"]


def test_the_packages_for_development_hold_the_others(checkout):
    make(checkout, ".venv/.dev")
    assert installed(checkout) == ["dev"]
    make(checkout, ".venv/.relay", ".venv/.pipeline")
    assert installed(checkout) == []


@pytest.mark.parametrize("stage", ["relay", "pipeline"])
def test_the_packages_for_development_are_those_of_the_other_stages_and_more(stage):
    """In the same versions: otherwise the stages would replace each other's packages in their environment."""
    assert set() < pins(f"{stage}.txt") <= pins("dev.txt")


def test_what_builds_the_project_has_the_versions_of_development():
    building, developing = pins("build.txt"), pins("dev.txt")
    names = {name for name, _ in developing}
    assert {(name, version) for name, version in building if name in names} <= developing


def test_a_failed_installation_leaves_no_stamp(checkout):
    (checkout / "scripts/install.sh").write_text("#!/bin/sh\nexit 1\n")
    assert make(checkout, "run").returncode != 0
    assert list((checkout / ".venv").iterdir()) == []


def test_what_an_interrupted_installation_left_is_thrown_away(checkout):
    """A package may look complete and not be. The interpreter here records its arguments and fails."""
    shutil.copy(ROOT / "scripts/install.sh", checkout / "scripts")
    python = checkout / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {checkout}/installed\nexit 1\n')
    python.chmod(0o755)
    (checkout / ".venv/.unfinished").touch()
    assert make(checkout, "run", f"PYTHON={python}").returncode != 0
    assert installed(checkout) == ["-m", "venv", "--clear", "--without-pip", ".venv"]


def test_check_is_what_the_machine_checks(checkout):
    assert re.search(r"^check: lint types ##.*\n\t@\$\(MAKE\) test \|\| {", MAKEFILE, re.M)
    again = MAKEFILE.partition("\ncheck:")[2].partition("\n\n")[0].split("||")[1]
    assert "--last-failed --last-failed-no-failures none" in again, "nothing new passes there"
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make check"


def test_help_has_a_line_for_each_target(checkout):
    phony = re.findall(r"^\.PHONY:(.*)$", MAKEFILE.replace("\\\n", " "), re.M)
    named = {target for targets in phony for target in targets.split()}
    lines = make(checkout, "help").stdout.splitlines()
    assert {line.split()[1] for line in lines} == named
    assert all(re.match(r"  make [a-z-]+ +(?<=^.{22})[A-Z]", line) and len(line) <= 110 for line in lines)
