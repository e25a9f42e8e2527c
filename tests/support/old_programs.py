"""The program as it was before the newest schema, from the project's own history."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory

from relayd.store.upgrade import alembic_config
from tests.support.relay_process import ROOT

__all__ = ["program_of_schema_before"]


def program_of_schema_before(folder: Path) -> tuple[str, Path]:
    """The revision before the newest, and its earliest sources, extracted into `folder`.

    The earliest are used so that the programs are as far apart as possible. Skips the test if there is no
    history.
    """
    scripts = ScriptDirectory.from_config(alembic_config())
    newest = scripts.get_revision("head")
    assert newest is not None
    if newest.down_revision is None:
        pytest.skip("the schema has one revision, so there is no program of one before")
    assert isinstance(newest.down_revision, str)
    before = scripts.get_revision(newest.down_revision)
    assert before is not None and before.path is not None
    migration = Path(before.path).relative_to(ROOT).as_posix()
    commits = _git("log", "--diff-filter=A", "--format=%H", "--", migration).split()
    if not commits or _git("rev-parse", "--is-shallow-repository").strip() == b"true":
        pytest.skip(
            "the history of this checkout does not reach back to the schema before: no .git, or shallow"
        )
    commit = commits[-1].decode()
    sources = _git("archive", commit, "relayd", "client", "migrations")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=sources, check=True)
    return before.revision, folder


def _git(*arguments: str) -> bytes:
    """The output of git; empty if there is no git or no repository."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return b""
