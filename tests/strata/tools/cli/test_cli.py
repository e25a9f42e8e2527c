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
from strata.protocol.ids import Identity
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


ID = "0x" + "ab" * 32
NEEDED = {
    "publish": ["--text", "hello"],
    "get": [ID],
    "channel": ["room", "--topic", "/chat/1/room/proto"],
    "identity create": ["--output", "new.json"],
    "identity document": ["--recovery-key", "me.json"],
    "identity rotate": ["--output", "new.json"],
    "identity revoke": ["key"],
    "identity approve": [ID],
    "context add": ["home"],
    "moderate ban": ["did:strata:zA", "--reason", "spam"],
    "moderate unban": ["did:strata:zA"],
    "moderate close": ["1", "--reason", "idle"],
}
"""What a command needs besides a relay."""


def of_a_relay() -> list[tuple[str, list[str]]]:
    """Every command that takes a relay, with arguments that name a wrong one."""
    found = []
    for words in ALL:
        command = typer.main.get_command(app)
        for word in words:
            command = command.commands[word]  # type: ignore[attr-defined]
        of_relay = [each for each in command.params if each.name in ("relay", "url")]
        for each in of_relay:
            wrong = ["--relay", "nonsense"] if each.param_type_name == "option" else ["nonsense"]
            found.append((" ".join(words), [*words, *NEEDED.get(" ".join(words), []), *wrong]))
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an identity, which commands find."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    Identity.generate().save(tmp_path / "me.json")
    monkeypatch.setenv("STRATA_IDENTITY", "me.json")
    return tmp_path


@pytest.mark.parametrize("words", [words for _, words in of_a_relay()], ids=" ".join)
def test_what_is_no_relay_url_is_wrong_usage_for_every_command(words, home):
    done = cli(*words)
    assert done.exit_code == 2 and "not a relay URL" in done.stderr and not done.stdout
    assert sorted(path.name for path in home.iterdir()) == ["me.json"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["get", "0x12"], "not a packet id: '0x12'"),
        (["identity", "approve", "0x12"], "not a packet id: '0x12'"),
        (["identity", "show", "bob"], "not a DID: 'bob'"),
    ],
)
def test_a_name_of_the_wrong_form_is_refused_before_a_relay_is_asked(words, problem, home):
    done = cli(*words)
    assert done.exit_code == 2 and problem in done.stderr


def test_an_empty_home_is_no_home_folder(home):
    done = cli("keygen", HOME="")
    assert done.exit_code == 2 and "this user has no home folder" in done.stderr
