"""The `relayd` command: its commands, its exit codes, and what it never prints."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer
from strata.protocol import packets
from strata.protocol.ids import Identity
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from relayd import cli
from relayd.cli import console
from relayd.config import Settings
from relayd.process import daemon
from relayd.store.types import StoreUnavailable
from relayd.version import VERSION
from tests.support.waiting import wait_until

SEED = "ab" * 32
DID = "did:strata:zAlice"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("RELAYD_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    yield
    structlog.reset_defaults()


def relayd(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(
        cli.app, [str(argument) for argument in arguments], prog_name="relayd", **options
    )


def test_help_and_version():
    text = relayd("--help").stdout
    for command in (
        "serve",
        "check-config",
        "migrate",
        "doctor",
        "new-epoch",
        "export",
        "import",
        "dev-cert",
        "ban",
        "unban",
        "remove",
        "restore",
        "erase",
        "backup",
        "list",
        "log",
    ):
        assert command in text
    assert relayd("--version").stdout == f"{VERSION}\n"
    assert relayd().exit_code == 2


def test_help_is_whole_and_looks_alike_everywhere():
    text = relayd("-h").stdout
    assert text == relayd("--help").stdout
    assert "…" not in text and "..." not in text.partition("Commands:")[2]
    group = typer.main.get_command(cli.app)
    assert isinstance(group, TyperGroup)
    for command in group.commands:
        shown = relayd(command, "-h").stdout
        assert "  -h, --help" in shown and "[[" not in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["ban", DID, "--reason", "spam"],
        ["unban", DID, "--reason", "spam"],
        ["remove", "0x" + "ab" * 32, "--reason", "spam"],
        ["restore", "0x" + "ab" * 32, "--reason", "spam"],
        ["erase", "--author", DID, "--reason", "spam"],
        ["list"],
        ["log"],
        ["sessions", "list"],
        ["sessions", "close", "5f3a91c2-17", "--reason", "spam"],
        ["peers", "list"],
        ["peers", "pause", DID],
        ["explain", "{}"],
        ["export"],
        ["new-epoch"],
        ["backup", "create", "copy"],
    ],
    ids=" ".join,
)
def test_a_command_about_a_log_makes_no_database_where_there_is_none(tmp_path, arguments):
    """From a folder that is not the relay's, a ban would be reported as in force that no relay knows of."""
    result = relayd(*arguments)
    assert result.exit_code == 3, result.output
    assert "there is no database in .relayd" in result.stderr and "--config" in result.stderr
    assert not list(tmp_path.iterdir())
    (tmp_path / ".relayd").mkdir()
    assert relayd(*arguments).exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "nearest"), [(["sreve"], "'serve'"), (["serve", "--prot", "1"], "--port")]
)
def test_a_wrong_name_is_answered_with_the_nearest(arguments, nearest):
    assert nearest in relayd(*arguments).stderr


def test_a_shell_can_complete_commands_and_options():
    def completed(words: str) -> str:
        asking = {
            "_RELAYD_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        return relayd(env=asking).stdout

    assert completed("relayd ch").split() == ["check-config"]
    assert "--database-url" in completed("relayd serve --d")
    assert "_RELAYD_COMPLETE" in relayd(env={"_RELAYD_COMPLETE": "source_zsh"}).stdout


@pytest.mark.parametrize("command", ["serve", "check-config", "migrate", "doctor", "export", "import"])
def test_bad_settings_are_all_named_and_exit_with_2(command):
    done = relayd(command, env={"RELAYD_PROT": "1", "RELAYD_WORKERS": "0"})
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "relayd: unknown environment variable RELAYD_PROT; the nearest is RELAYD_PORT",
        "relayd: RELAYD_WORKERS: expected `int` >= 1",
    ]


@pytest.mark.parametrize("arguments", [["serve", "--prot", "1"], ["serve", "--port", "x"], ["sreve"]])
def test_bad_usage_exits_with_2(arguments):
    assert relayd(*arguments).exit_code == 2


def test_serve_hands_over_the_settings_and_its_exit_code(monkeypatch):
    seen: list[Settings] = []

    def run(settings: Settings) -> int:
        seen.append(settings)
        return 4

    monkeypatch.setattr(daemon, "run", run)
    flags = [
        "--host",
        "::1",
        "--port",
        "0",
        "--workers",
        "2",
        "--data-dir",
        "d",
        "--tls-cert",
        "c",
        "--tls-key",
        "k",
    ]
    assert relayd("serve", *flags).exit_code == 4
    (settings,) = seen
    assert (settings.host, settings.port, settings.workers) == ("::1", 0, 2)
    assert (settings.data_dir, settings.tls_cert, settings.tls_key) == (Path("d"), Path("c"), Path("k"))
    relayd("serve", "--database-url", "postgresql://h/d")
    assert seen[-1].database_url == "postgresql://h/d"


def test_the_settings_in_effect_are_a_settings_file_without_secrets(tmp_path):
    file = tmp_path / "relayd.toml"
    file.write_text("port = 1234\nretention_days = 7")
    done = relayd("check-config", "--config", file, env={"RELAYD_IDENTITY_SEED": SEED})
    assert done.exit_code == 0
    assert "port = 1234\n" in done.stdout
    assert SEED not in done.stdout
    latin = relayd("check-config", "--json", env={"RELAYD_DATA_DIR": os.fsdecode(b"/caf\xe9")})
    assert json.loads(latin.stdout)["data_dir"] == "/caf?"
    as_json = json.loads(relayd("check-config", "--json", env={"RELAYD_CONFIG": str(file)}).stdout)
    assert (as_json["port"], as_json["retention_days"], as_json["database_url"]) == (1234, 7, None)


def test_a_warning_about_a_setting_goes_to_stderr():
    done = relayd("check-config", env={"RELAYD_MAX_PACKET_BYTES": "4194304"})
    assert done.exit_code == 0
    assert "max_packet_bytes = 1048576" in done.stdout
    assert "warning: max_packet_bytes 4194304" in done.stderr


@pytest.mark.parametrize("command", ["migrate", "doctor", "new-epoch", "export", "import"])
def test_a_database_that_cannot_be_reached_exits_with_3(command):
    done = relayd(command, "--database-url", "postgresql://u:hunter2@127.0.0.1:1/d", input="")
    assert done.exit_code == 3
    assert "hunter2" not in done.output


def test_the_doctor_tells_what_to_do(monkeypatch, tmp_path):
    done = relayd("doctor", "--data-dir", tmp_path / "data")
    assert done.exit_code == 0
    assert "✓ database: embedded" in done.stdout
    done = relayd("doctor", "--json", "--database-url", "postgresql://127.0.0.1:1/d")
    report = json.loads(done.stdout)
    assert (report["ok"], done.exit_code) == (False, 3)
    assert all(check["advice"] for check in report["checks"] if check["verdict"] != "ok")


def test_a_bad_certificate_is_a_matter_of_configuration(tmp_path):
    done = relayd(
        "doctor", "--data-dir", tmp_path, env={"RELAYD_TLS_CERT": "none.pem", "RELAYD_TLS_KEY": "none.pem"}
    )
    assert done.exit_code == 2
    assert "✗ tls: none.pem: No such file" in done.stdout


def test_dev_cert_says_how_to_use_what_it_made(tmp_path):
    done = relayd("dev-cert", "relay.test", "--dir", "certs")
    assert done.exit_code == 0
    assert "relayd serve --tls-cert certs/cert.pem --tls-key certs/key.pem" in done.stdout
    assert "SSL_CERT_FILE=certs/ca.pem" in done.stdout
    again = relayd("dev-cert", "--dir", "certs")
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)


@pytest.mark.slow
def test_a_whole_log_moves_from_one_database_to_another(tmp_path):
    identity = Identity.from_seed(bytes(32))
    made = [
        packets.build(identity, {"type": "POST", "text": str(n)}, timestamp=1_760_000_000 + n)
        for n in range(3)
    ]
    lines = [b'{"packet":%b,"received_at":%d}' % (packet.canonical, packet.timestamp) for packet in made]
    source, again = tmp_path / "log.jsonl", tmp_path / "again.jsonl"
    source.write_bytes(b"\n".join([*lines, b"nonsense"]) + b"\n")
    data = ("--data-dir", tmp_path / "data")

    done = relayd("import", source, *data, "--json", "--quarantine", "refused.jsonl")
    assert done.exit_code == 1
    summary = json.loads(done.stdout)
    assert (summary["stored"], summary["quarantined"]) == (3, 1)
    assert json.loads(Path("refused.jsonl").read_text())["line"] == 4

    done = relayd("export", "-o", again, *data, "--json")
    assert (done.exit_code, json.loads(done.stdout)["packets"]) == (0, 3)
    assert again.read_bytes().splitlines() == lines
    assert json.loads(relayd("export", "-o", again, *data, "--json").stdout)["packets"] == 0

    done = relayd("export", *data)
    assert done.stdout_bytes.splitlines() == lines
    assert "packets 3" in done.stderr


def test_a_file_that_may_not_be_looked_at_is_a_sentence(monkeypatch, tmp_path):
    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    done = relayd("import", tmp_path / "none" / "log.jsonl", "--data-dir", tmp_path)
    assert done.exit_code == 2 and "log.jsonl" in done.stderr


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_relay_without_a_standard_stream_gives_its_number_to_no_socket(tmp_path, number):
    """uvloop ends the whole process if it must close such a socket."""
    opened = tmp_path / "opened"
    program = (
        "import relayd.cli.commands as commands, strata.protocol.programs as programs\n"
        "def command(prog_name):\n"
        f"    with open({str(opened)!r}, 'w') as file: file.write(str(file.fileno()))\n"
        "programs.commands_of = lambda app: command\n"
        "commands.main()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, preexec_fn=lambda: os.close(number))
    assert int(opened.read_text()) > 2


def test_a_relay_that_cannot_tell_where_it_is_serves_all_the_same(monkeypatch):
    from relayd.process.server import print_ready

    forgotten: list[bool] = []
    monkeypatch.setattr("relayd.process.server.forget_stdout", lambda: forgotten.append(True))
    with open("/dev/full", "w") as full, structlog.testing.capture_logs() as lines:
        monkeypatch.setattr(sys, "stdout", full)
        print_ready({"ws": "ws://h/strata"})
        wait_until(lambda: lines, "the warning")
        monkeypatch.undo()
    assert forgotten and [line["event"] for line in lines] == ["ready_not_told"]


@pytest.mark.slow
def test_migrate_is_idempotent(tmp_path):
    for _ in range(2):
        done = relayd("migrate", "--data-dir", tmp_path / "data")
        assert done.exit_code == 0
        assert "the schema is at revision" in done.stdout


def test_an_interrupted_command_says_that_it_may_go_on(monkeypatch):
    async def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as left:
        console.run(interrupted())
    assert left.value.exit_code == 130

    async def lost() -> None:
        raise StoreUnavailable("away")

    with pytest.raises(typer.Exit) as left:
        console.run(lost())
    assert left.value.exit_code == 3


def test_the_module_runs_as_the_command():
    root = Path(cli.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "relayd", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": f"{root}:{root / 'client'}"},
    )
    assert done.stdout == f"{VERSION}\n"
