from __future__ import annotations

import pickle
import tomllib
from pathlib import Path

import pytest

from relayd.config import HARD_MAX_PACKET_BYTES, ConfigurationError, Settings, load, reloaded, setting_table
from relayd.manual import describe_type, sample_file, settings_page, toml_value

ROOT = Path(__file__).parents[2]
SECRET = "ab" * 32


def problems(*args, **kwargs) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load(*args, **kwargs)
    return list(caught.value.problems)


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "relayd.toml"
        path.write_text(text)
        return path

    return write


def test_defaults_are_valid():
    assert load() == Settings()


def test_command_line_beats_environment_beats_file_beats_default(toml):
    path = toml("port = 1\nhost = 'file'\npath = '/file'")
    settings = load(path, {"RELAYD_PORT": "2", "RELAYD_HOST": "env"}, {"port": 3, "workers": None})
    assert (settings.port, settings.host, settings.path, settings.workers) == (3, "env", "/file", 1)


def test_every_setting_can_be_given_in_each_way(toml):
    given = {
        "public_url": "wss://relay.example/strata",
        "tls_cert": "c.pem",
        "tls_key": "k.pem",
        "metrics_listen": "[::1]:9000",
        "database_url": "postgresql://u:p@h/d",
        "read_database_url": "postgres://u:p@r/d",
        "identity_seed": SECRET,
        "bootstrap_file": "bootstrap.json",
        "archive_manifests": "lake/_manifests",
        "blocked_authors": ["did:strata:z6MkvDqGT54cXesYGvABpF1UapVNwjCqRcafi4Px6Thv5T3Z"],
        "blocked_packet_ids": ["0x" + "0" * 64, "0x" + "1" * 64],
        "blocked_media_hashes": ["0x" + "2" * 64],
    }
    for name, row in setting_table().items():
        given.setdefault(name, str(row.default) if isinstance(row.default, Path) else row.default)
    from_file = load(
        toml("\n".join(f"{name} = {toml_value(_tuple(value))}" for name, value in given.items()))
    )
    environ = {setting_table()[name].variable: _text(value) for name, value in given.items()}
    from_environment = load(None, environ)
    assert from_file == from_environment
    assert from_file.blocked_packet_ids == tuple(given["blocked_packet_ids"])
    assert from_file.data_dir == Path("./.relayd")


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _text(value: object) -> str:
    return (
        ",".join(value)
        if isinstance(value, list | tuple)
        else str(value).lower()
        if value in (True, False)
        else str(value)
    )


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
    ("environ", "problem"),
    [
        ({"RELAYD_TLS_CERT": "c.pem"}, "tls_cert and tls_key"),
        ({"RELAYD_TLS_KEY": "k.pem"}, "tls_cert and tls_key"),
        ({"RELAYD_DEFAULT_LIMIT": "501"}, "default_limit (501) is above max_limit (500)"),
        ({"RELAYD_PUBLIC_URL": "https://relay.example"}, "public_url: expected a ws://"),
        ({"RELAYD_PUBLIC_URL": "ws://"}, "public_url: expected a ws://"),
        ({"RELAYD_PUBLIC_URL": "ws://[bad"}, "public_url: expected a ws://"),
        ({"RELAYD_DATABASE_URL": "mysql://h/d"}, "database_url: expected a postgresql://"),
        ({"RELAYD_READ_DATABASE_URL": "postgresql://h/d"}, "read_database_url needs database_url"),
        ({"RELAYD_METRICS_LISTEN": "9000"}, "metrics_listen: expected host:port"),
        ({"RELAYD_METRICS_LISTEN": "h:99999"}, "metrics_listen: expected host:port"),
        ({"RELAYD_PATH": "strata"}, "RELAYD_PATH: "),
        ({"RELAYD_BLOCKED_AUTHORS": "nobody"}, "blocked_authors: nobody is not a DID"),
        ({"RELAYD_BLOCKED_PACKET_IDS": "0xAB"}, "RELAYD_BLOCKED_PACKET_IDS: "),
        ({"RELAYD_READ_TIMEOUT": "0"}, "RELAYD_READ_TIMEOUT: expected `float` > 0"),
        ({"RELAYD_ALLOW_UNSAFE_DATABASE": "maybe"}, "RELAYD_ALLOW_UNSAFE_DATABASE: "),
        (
            {"RELAYD_RETENTION_REQUIRES_ARCHIVE": "true"},
            "retention_requires_archive needs archive_manifests: the folder _manifests",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(environ, problem):
    (found,) = problems(None, environ)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("path_text", "problem"),
    [(None, "No such file"), ("port = ", "Invalid value"), ("port = '1'", "port: expected")],
)
def test_a_file_that_cannot_be_read_is_named(toml, tmp_path, path_text, problem):
    path = tmp_path / "missing.toml" if path_text is None else toml(path_text)
    (found,) = problems(path)
    assert found.startswith(f"{path}: ")
    assert problem in found


def test_an_id_is_never_forgotten_while_its_packet_could_be_taken_again():
    (found,) = problems(None, {"RELAYD_DEDUP_WINDOW_SECONDS": "3600"})
    assert found == "dedup_window_seconds (3600) is below max_packet_age_seconds (86400)"


@pytest.mark.req("R-118", "R-120")
def test_packets_up_to_256_kib_by_default_and_less_if_asked():
    assert load().max_packet_bytes == 262_144
    assert load(None, {"RELAYD_MAX_PACKET_BYTES": "4096"}).max_packet_bytes == 4096


@pytest.mark.req("R-119")
def test_no_setting_admits_more_than_one_mebibyte():
    settings = load(None, {"RELAYD_MAX_PACKET_BYTES": str(4 * 2**20)})
    assert settings.max_packet_bytes == HARD_MAX_PACKET_BYTES == 1_048_576
    assert settings.warnings == ("max_packet_bytes 4194304 is above the hard limit; using 1048576",)
    assert load(None, {"RELAYD_MAX_PACKET_BYTES": "1048576"}).warnings == ()


@pytest.mark.req("R-123")
def test_a_frame_has_room_for_escapes_and_the_envelope():
    assert load(None, {"RELAYD_MAX_PACKET_BYTES": "10000"}).max_frame_bytes == 2 * 10_000 + 65_536


def test_the_defaults_that_the_requirements_name():
    settings = load()
    assert settings.path == "/strata"
    assert (settings.ping_interval, settings.ping_misses) == (30.0, 2)
    assert (settings.malformed_limit, settings.malformed_window) == (20, 60.0)


@pytest.mark.req("R-270", "R-271", "R-272")
def test_a_challenge_lives_for_one_to_ten_minutes():
    assert load().challenge_lifetime == 120
    assert load(None, {"RELAYD_CHALLENGE_LIFETIME": "60"}).challenge_lifetime == 60
    (found,) = problems(None, {"RELAYD_CHALLENGE_LIFETIME": "59"})
    assert found == "challenge_lifetime (59) is below 60"
    long = load(None, {"RELAYD_CHALLENGE_LIFETIME": "3600"})
    assert long.challenge_lifetime == 600
    assert long.warnings == ("challenge_lifetime 3600 is above what clients accept; using 600",)
    assert load(None, {"RELAYD_CHALLENGE_LIFETIME": "600"}).warnings == ()


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("MEMBERS", "alice", "members: alice is not a DID"),
        ("REPLICATION_PEERS", "did:strata:a,b", "replication_peers: b is not a DID"),
        (
            "TRUSTED_PROXIES",
            "proxy.local",
            "trusted_proxies: proxy.local is not a network such as 192.0.2.0/24",
        ),
        ("UNLIMITED_ADDRESSES", "1.2.3", "unlimited_addresses: 1.2.3 is not a network such as 192.0.2.0/24"),
        (
            "ALLOWED_ORIGINS",
            "https://a.example/",
            "allowed_origins: https://a.example/ is not an origin such as https://example.org",
        ),
    ],
)
def test_who_may_come_in_is_checked_at_start(variable, value, problem):
    assert problems(None, {f"RELAYD_{variable}": value}) == [problem]


@pytest.mark.parametrize("origin", ["https://a.example", "http://a.example:8080", "https://[::1]:1", "null"])
def test_what_is_an_origin(origin):
    assert load(None, {"RELAYD_ALLOWED_ORIGINS": origin}).allowed_origins == (origin,)


def test_a_limit_that_does_nothing_on_the_spot_is_warned_about(toml):
    (warning,) = load(None, {"RELAYD_PUBLISH_LIMIT": "5"}).warnings
    assert warning == "publish_limit: no limit holds for 127.0.0.0/8, ::1/128 (unlimited_addresses)"
    assert load(toml("publish_limit = 5\nunlimited_addresses = []")).warnings == ()
    assert load(None, {"RELAYD_PORT": "1"}).warnings == ()


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


def test_no_secret_is_ever_printed(tmp_path):
    environ = {
        "RELAYD_IDENTITY_SEED": SECRET,
        "RELAYD_DATABASE_URL": "postgresql://u:hunter2@h/d",
        "RELAYD_READ_DATABASE_URL": "postgresql://u:hunter2@r/d",
    }
    settings = load(None, environ)
    for text in (repr(settings), str(settings), f"{settings.shown()}"):
        assert "hunter2" not in text
        assert SECRET not in text
        assert "********" in text
    bad = {"RELAYD_IDENTITY_SEED": SECRET[:-1], "RELAYD_DATABASE_URL": "hunter2"}
    assert not any("hunter2" in problem or "abab" in problem for problem in problems(None, bad))


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


def test_a_reload_reads_secret_files_again_and_never_tells_what_they_hold(tmp_path):
    path = tmp_path / "url"
    path.write_text("postgresql://u:hunter2@h/d")
    settings = load(None, {"RELAYD_DATABASE_URL_FILE": str(path)})
    path.write_text("postgresql://u:hunter3@h/d")
    found = reloaded(settings)
    assert found.restart_needed == ("database_url",)
    assert found.settings.database_url == "postgresql://u:hunter2@h/d"
    assert "hunter" not in repr(found)


@pytest.mark.parametrize("address", ["127.0.0.1:7447", "0.0.0.0:7447", "[::]:7447"])
def test_metrics_have_an_address_of_their_own(address):
    said = "metrics_listen is the relay's own address; choose another port, or leave it out"
    assert problems(None, {"RELAYD_METRICS_LISTEN": address}) == [said]
    everywhere = {"RELAYD_METRICS_LISTEN": "127.0.0.1:7447", "RELAYD_HOST": "0.0.0.0"}
    assert problems(None, everywhere) == [said]
    load(None, {"RELAYD_METRICS_LISTEN": address.replace("7447", "7448")})
    load(None, {"RELAYD_METRICS_LISTEN": "127.0.0.2:7447"})
    load(None, {"RELAYD_METRICS_LISTEN": "127.0.0.1:0", "RELAYD_PORT": "0"})


def test_settings_travel_to_worker_processes():
    settings = load(None, {"RELAYD_IDENTITY_SEED": SECRET}, {"port": 0})
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_every_setting_is_documented():
    for row in setting_table().values():
        assert row.doc.endswith("."), row.name
        assert describe_type(row.type), row.name
        if describe_type(row.type).startswith(("integer", "number")) and row.name != "port":
            assert row.unit, row.name


def test_the_reference_page_and_the_sample_file_are_in_step():
    assert (ROOT / "docs" / "reference" / "settings.md").read_text() == settings_page(), "run `make docs`"
    assert (ROOT / "deploy" / "relayd.toml").read_text() == sample_file(), "run `make docs`"


def test_the_sample_file_states_the_defaults(toml):
    lines = [line.removeprefix("# ") for line in sample_file().splitlines() if " = " in line]
    sample = tomllib.loads("\n".join(lines))
    assert sample.keys() == setting_table().keys()
    kept = {name: value for name, value in sample.items() if value != ""}
    assert (
        load(toml("\n".join(f"{name} = {toml_value(_tuple(value))}" for name, value in kept.items())))
        == Settings()
    )
