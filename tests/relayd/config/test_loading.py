"""Where values come from, at the start and at a reload."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from relayd.config import ConfigurationError, Settings, load, reloaded, setting_table
from relayd.manual import toml_value
from tests.relayd.settings_files import SECRET, as_text, as_tuple, problems


def test_command_line_beats_environment_beats_file_beats_default(toml):
    path = toml("port = 1\nhost = 'file'\npath = '/file'")
    settings = load(path, {"RELAYD_PORT": "2", "RELAYD_HOST": "env"}, {"port": 3, "workers": None})
    assert (settings.port, settings.host, settings.path, settings.workers) == (3, "env", "/file", 1)


def test_a_line_of_the_file_that_the_environment_puts_aside_is_told(toml):
    path = toml("port = 1\nworkers = 2\nmax_limit = 400\nidentity_seed = '" + "0" * 64 + "'")
    environ = {"RELAYD_PORT": "2", "RELAYD_WORKERS": "2", "RELAYD_IDENTITY_SEED": SECRET, "RELAYD_HOST": "::"}
    assert load(path, environ).warnings == (
        f"port in {path} counts for nothing: the environment has another (RELAYD_PORT)",
        f"identity_seed in {path} counts for nothing: the environment has another (RELAYD_IDENTITY_SEED)",
    )
    assert load(path, {"RELAYD_PORT": "2"}, {"port": 3}).warnings == (), "somebody has said what counts"


def test_every_setting_can_be_given_in_each_way(toml):
    given = {
        "public_url": "wss://relay.example/strata",
        "tls_cert": "c.pem",
        "tls_key": "k.pem",
        "metrics_listen": "[::1]:9000",
        "database_url": "postgresql://u:p@h/d",
        "read_database_url": "postgres://u:p@r/d",
        "bus_url": "nats://bus:4222",
        "tracing_url": "http://collector:4318/v1/traces",
        "identity_seed": SECRET,
        "bootstrap_file": "bootstrap.json",
        "archive_manifests": "lake/_manifests",
        "log_guard": "log-guard",
        "peers_file": "peers.toml",
        "blocked_authors": ["did:strata:z6MkvDqGT54cXesYGvABpF1UapVNwjCqRcafi4Px6Thv5T3Z"],
        "blocked_packet_ids": ["0x" + "0" * 64, "0x" + "1" * 64],
        "blocked_media_hashes": ["0x" + "2" * 64],
    }
    for name, row in setting_table().items():
        given.setdefault(name, str(row.default) if isinstance(row.default, Path) else row.default)
    from_file = load(
        toml("\n".join(f"{name} = {toml_value(as_tuple(value))}" for name, value in given.items()))
    )
    environ = {setting_table()[name].variable: as_text(value) for name, value in given.items()}
    from_environment = load(None, environ)
    assert from_file == from_environment
    assert from_file.blocked_packet_ids == tuple(given["blocked_packet_ids"])
    assert from_file.data_dir == Path("./.relayd")


def test_all_problems_are_reported_at_once_each_with_its_place(toml):
    path = toml("prot = 1\nretention_days = -1")
    found = problems(path, {"RELAYD_WORKER": "1", "RELAYD_PORT": "70000"}, {"log_level": "loud"})
    assert found == [
        f"{path}: unknown setting prot; the nearest is port",
        f"{path}: retention_days: expected `int` >= 0",
        "unknown environment variable RELAYD_WORKER; the nearest is RELAYD_WORKERS",
        "RELAYD_PORT: expected `int` <= 65535",
        "--log-level: invalid enum value 'loud'",
    ]


@pytest.mark.parametrize(
    ("path_text", "problem"),
    [
        (None, "No such file"),
        ("port = ", "Invalid value"),
        ("port = '1'", "port: expected"),
        ("port = " + "[" * 5000, "recursion"),
        ("port = " + "1" * 5000, "digits"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(toml, tmp_path, path_text, problem):
    path = tmp_path / "missing.toml" if path_text is None else toml(path_text)
    (found,) = problems(path)
    assert found.startswith(f"{path}: ")
    assert problem in found


def test_files_of_windows_are_read(tmp_path):
    file, secret = tmp_path / "c.toml", tmp_path / "secret"
    file.write_bytes(b'\xef\xbb\xbfport = 1\r\nhost = "a"\r\n')
    secret.write_bytes(b"\xef\xbb\xbfpostgresql://h/d\r\n")
    settings = load(file, {"RELAYD_DATABASE_URL_FILE": str(secret)})
    assert (settings.port, settings.host, settings.database_url) == (1, "a", "postgresql://h/d")
    file.write_text("port = 1", encoding="utf-16")
    secret.write_text("postgresql://h/d", encoding="utf-16")
    said = "the text is UTF-16; save it as UTF-8 (PowerShell: Out-File -Encoding utf8)"
    assert problems(file, {"RELAYD_DATABASE_URL_FILE": str(secret)}) == [
        f"{file}: {said}",
        f"RELAYD_DATABASE_URL_FILE: cannot read {secret}: {said}",
    ]


def test_a_file_that_is_not_utf_8_is_said_to_be_none(tmp_path):
    (tmp_path / "relayd.toml").write_bytes(b"\xff")
    assert problems(tmp_path / "relayd.toml") == [f"{tmp_path}/relayd.toml: not UTF-8"]


@pytest.mark.parametrize("asked", ["is_dir", "iterdir"])
def test_a_folder_that_may_not_be_read_is_no_empty_one(tmp_path, monkeypatch, asked):
    """With the defaults, clients that the file excludes would be admitted."""
    (tmp_path / "config.toml").write_text("require_auth = ['subscribe']")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, asked, refuse)
    assert problems(tmp_path) == [f"{tmp_path}: Permission denied"]


def test_an_empty_variable_counts_as_absent_and_foreign_ones_are_ignored():
    environ = {"RELAYD_PORT": "", "RELAYD_CONFIG": "x", "RELAYD_TEST_DATABASE_URL": "x", "HOME": "/"}
    assert load(None, environ) == Settings()


def test_a_secret_may_come_from_a_file(tmp_path):
    path = tmp_path / "url"
    path.write_text("postgresql://u:p@h/d\n")
    assert load(None, {"RELAYD_DATABASE_URL_FILE": str(path)}).database_url == "postgresql://u:p@h/d"


def test_only_secrets_may_come_from_a_file_and_only_once(tmp_path):
    path = tmp_path / "value"
    path.write_text("1")
    assert problems(None, {"RELAYD_PORT_FILE": str(path)})[0].startswith("unknown environment variable")
    both = {"RELAYD_IDENTITY_SEED": SECRET, "RELAYD_IDENTITY_SEED_FILE": str(path)}
    assert problems(None, both) == ["RELAYD_IDENTITY_SEED_FILE and RELAYD_IDENTITY_SEED exclude each other"]
    missing = {"RELAYD_IDENTITY_SEED_FILE": str(tmp_path / "none")}
    assert problems(None, missing)[0].endswith("No such file or directory")


def test_a_data_dir_on_the_command_line_asks_for_the_embedded_server():
    environ = {"RELAYD_DATABASE_URL": "postgresql://h/d"}
    assert load(None, environ, {"data_dir": Path("x")}).database_url is None
    both = {"data_dir": Path("x"), "database_url": "postgresql://h/d"}
    assert problems(None, {}, both) == ["--database-url and --data-dir exclude each other"]


def test_a_reload_takes_over_what_needs_no_restart_and_nothing_else(toml):
    path = toml("port = 1\ntls_cert = 'old.pem'\ntls_key = 'old.key'")
    settings = load(path, {}, {"host": "::1"})
    assert (reloaded(settings).changed, reloaded(settings).restart_needed) == ((), ())
    toml("port = 2\ntls_cert = 'new.pem'\ntls_key = 'new.key'")
    found = reloaded(settings)
    assert found.changed == ("tls_cert", "tls_key")
    assert found.restart_needed == ("port",)
    after = found.settings
    assert (after.tls_cert, after.tls_key) == (Path("new.pem"), Path("new.key"))
    assert (after.port, after.host) == (1, "::1")
    assert reloaded(after).changed == ()
    assert reloaded(after).restart_needed == ("port",), "until the restart"
    toml("tls_cert = 'alone.pem'")
    with pytest.raises(ConfigurationError):
        reloaded(after)


@pytest.mark.parametrize("on_at_start", [True, False])
def test_tls_is_switched_on_and_off_by_a_restart_alone(toml, on_at_start):
    texts = ["", "tls_cert = 'a.pem'\ntls_key = 'a.key'"]
    settings = load(toml(texts[on_at_start]))
    toml(texts[not on_at_start] + "\nblocked_types = ['TEXT']")
    found = reloaded(settings)
    assert (found.settings.tls_cert, found.settings.tls_key) == (settings.tls_cert, settings.tls_key)
    assert (found.changed, found.restart_needed) == (("blocked_types",), ("tls_cert", "tls_key"))


@pytest.mark.parametrize("kind", ["config", "secret"])
def test_a_reload_reads_nothing_from_a_pipe(tmp_path, kind):
    """It was read at the start; now it is empty, or its reader would wait for a writer."""
    pipe = tmp_path / "pipe"
    pipe.write_text("blocked_types = ['X']" if kind == "config" else "postgresql://u@h/d")
    settings = load(pipe) if kind == "config" else load(None, {"RELAYD_DATABASE_URL_FILE": str(pipe)})
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(ConfigurationError) as found:
        reloaded(settings)
    (problem,) = found.value.problems
    assert problem.startswith(f"{pipe}: not a regular file") and "restart the relay" in problem


def test_a_reload_of_no_settings_at_all_is_no_error():
    assert reloaded(load(Path("/dev/null"))).changed == ()


def test_a_reload_reads_secret_files_again_and_never_tells_what_they_hold(tmp_path):
    path = tmp_path / "url"
    path.write_text("postgresql://u:hunter2@h/d")
    settings = load(None, {"RELAYD_DATABASE_URL_FILE": str(path)})
    path.write_text("postgresql://u:hunter3@h/d")
    found = reloaded(settings)
    assert found.restart_needed == ("database_url",)
    assert found.settings.database_url == "postgresql://u:hunter2@h/d"
    assert "hunter" not in repr(found)


def test_a_folder_stands_for_the_file_in_it_which_may_be_missing(tmp_path):
    assert load(tmp_path).port == Settings().port
    (tmp_path / "config.toml").write_text("port = 1234")
    assert load(tmp_path).port == 1234
    (tmp_path / "relayd.toml").write_text("port = 4321")
    assert problems(tmp_path) == [f"{tmp_path / 'relayd.toml'} is not read: the settings file is config.toml"]


@pytest.mark.parametrize("problems", [[], ["one"], ["one", "another"]])
def test_what_is_wrong_can_be_told_to_another_process(problems):
    error = pickle.loads(pickle.dumps(ConfigurationError(problems)))
    assert (error.problems, str(error)) == (tuple(problems), "\n".join(problems))
