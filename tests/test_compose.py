"""The promises of docker-compose.yml, as far as they show without a container: settings, passwords, proxy."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from relayd.config import load, setting_table
from tests.relayd.settings_files import problems

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = (ROOT / "docker-compose.yml").read_text()


def _service(name: str) -> str:
    [body] = re.findall(
        rf"^  {name}:\n((?:    .*\n|\n)+)", COMPOSE.partition("\nservices:\n")[2], re.MULTILINE
    )
    return str(body)


def _example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text()
    return dict(re.findall(r"^([A-Z_]+)=(.*)$", lines, re.MULTILINE))


def test_every_line_of_env_reaches_the_relay():
    relay = _service("relay")
    assert "env_file:\n      - path: ${RELAY_ENV_FILE:-.env}\n        required: false\n" in relay
    # Names in `environment` take precedence over the file, so each must refer to the same name.
    named = dict(re.findall(r"^      (RELAYD_[A-Z_]+): (.*)$", relay, re.MULTILINE))
    assert len(named) > 10
    for name, value in named.items():
        assert re.match(rf"\$\{{{name}(:?-)", value), name
    known = {row.variable for row in setting_table().values()} | {"RELAYD_DATABASE_URL_FILE", "RELAYD_CONFIG"}
    assert set(named) <= known
    # The passwords of other services do not.
    for name in ("POSTGRES_PASSWORD", "STRATA_READER_PASSWORD", "GRAFANA_ADMIN_PASSWORD"):
        assert f'      {name}: ""\n' in relay
    assert "- ${RELAY_CONFIG:-./config}:/etc/relayd:ro" in relay


def test_a_line_that_reaches_nobody_is_an_error_by_name():
    example = {name: text for name, text in _example().items() if name.startswith("RELAYD_")}
    load(None, example)
    assert problems(None, example | {"RELAYD_BLOCKED_AUTHOR": "did:strata:x"}) == [
        "unknown environment variable RELAYD_BLOCKED_AUTHOR; the nearest is RELAYD_BLOCKED_AUTHORS"
    ]


def test_every_image_can_be_pinned_by_a_line_of_env():
    images = dict(re.findall(r"^ +image: \$\{([A-Z]+_IMAGE):-(\S+)\}$", COMPOSE, re.MULTILINE))
    built = set(re.findall(r"^ +image: ([a-z-]+)$", COMPOSE, re.MULTILINE))
    assert built == {"relayd", "strata-pipeline"}
    assert len(re.findall(r"^ +image: ", COMPOSE, re.MULTILINE)) == COMPOSE.count("_IMAGE:-") - 1 + len(built)
    dockerfile = (ROOT / "Dockerfile").read_text()
    [base] = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) == {"${PYTHON_IMAGE}"}
    assert f"PYTHON_IMAGE: ${{PYTHON_IMAGE:-{base}}}\n" in COMPOSE
    example = {name: text for name, text in _example().items() if name.endswith("_IMAGE")}
    assert example == images | {"PYTHON_IMAGE": base}
    assert all(re.fullmatch(r"[a-z/]+:[a-z0-9.-]+", image) for image in example.values())


def _relay_environment(**env: str) -> dict[str, str]:
    """The settings that the relay gets from a `.env` with these lines, except for its folder of settings."""
    named = re.findall(r"^      (RELAYD_[A-Z_]+): (.*)$", _service("relay"), re.MULTILINE)
    named = [(name, text) for name, text in named if not name.endswith(("_CONFIG", "_FILE"))]

    def filled(text: str) -> str:
        while (found := re.search(r"\$\{([A-Z_]+):?-([^${}]*)\}", text)) is not None:  # the innermost first
            text = text.replace(found[0], env.get(found[1]) or found[2])
        return text

    return {name: text for name, text in env.items() if name.startswith("RELAYD_")} | {
        name: filled(text) for name, text in named
    }


def test_what_the_settings_file_says_holds_unless_compose_needs_another_value(tmp_path):
    assert _relay_environment(RELAY_PORT="1")["RELAYD_PUBLIC_URL"] == "wss://127.0.0.1:1/strata"
    lines = ["workers = 4", "retention_days = 0", "log_level = 'warning'", "log_format = 'console'"]
    lines += ["metrics_listen = '0.0.0.0:9464'", "require_auth = ['publish']"]
    (tmp_path / "config.toml").write_text(
        "\n".join([*lines, "public_url = 'wss://relay.example.net/strata'"])
    )
    example = {name: text for name, text in _example().items() if not name.endswith("_CONFIG")}
    for env in ({}, example):
        settings = load(tmp_path, _relay_environment(**env))
        assert (settings.workers, settings.retention_days, settings.log_level) == (4, 0, "warning")
        assert (settings.log_format, settings.metrics_listen) == ("console", "0.0.0.0:9464")
        assert settings.require_auth == ("publish",)
        (warning,) = settings.warnings
        assert warning.startswith("public_url in ") and "RELAYD_PUBLIC_URL" in warning
    assert load(tmp_path, _relay_environment(RELAYD_WORKERS="2")).workers == 2


def _passwords(folder: Path, **environ: str) -> dict[str, str]:
    """The passwords that the service `passwords` leaves on its volumes."""
    places = {"PASSWORDS": folder / "passwords", "READER": folder / "reader", "PGDATA": folder / "data"}
    for place in places.values():
        place.mkdir(exist_ok=True)
    script = ROOT / "deploy" / "docker" / "passwords.sh"
    environ |= {"PATH": "/usr/bin:/bin", **{name: str(place) for name, place in places.items()}}
    subprocess.run(["bash", script], env=environ, check=True, capture_output=True)
    return {
        f"{place.name}/{file.name}": file.read_text()
        for place in (places["PASSWORDS"], places["READER"])
        for file in place.iterdir()
    }


def test_passwords_are_made_once_and_are_nobody_s_guess(tmp_path):
    first = _passwords(tmp_path)
    assert set(first) == {"passwords/postgres", "passwords/database-url", "reader/password", "reader/url"}
    assert re.fullmatch("[0-9a-f]{48}", first["passwords/postgres"])
    assert first["reader/password"] != first["passwords/postgres"]
    assert (
        first["passwords/database-url"]
        == f"postgresql://relayd:{first['passwords/postgres']}@postgres:5432/relayd"
    )
    assert _passwords(tmp_path) == first
    assert "/run/passwords" not in _service("archive")


def test_a_password_of_the_operator_s_comes_first(tmp_path):
    _passwords(tmp_path)
    given = _passwords(tmp_path, POSTGRES_PASSWORD="chosen", STRATA_READER_PASSWORD="mine")
    assert (given["passwords/postgres"], given["reader/password"]) == ("chosen", "mine")
    assert ":mine@" in given["reader/url"]


@pytest.mark.parametrize(
    "password", ["a/b#c?d@e:f[g]h", "100%41", " 'blank\"$HOME`\\", "schlüssel-€-🔑", "-n", "*"]
)
def test_a_password_may_have_any_character(tmp_path, password):
    given = _passwords(tmp_path, POSTGRES_PASSWORD=password, STRATA_READER_PASSWORD=password)
    assert (given["passwords/postgres"], given["reader/password"]) == (password, password)
    for name, user in (("passwords/database-url", "relayd"), ("reader/url", "strata_reader")):
        parts = urlsplit(given[name])
        assert (parts.username, parts.hostname, parts.path) == (user, "postgres", "/relayd")
        assert unquote(parts.password or "") == password
        assert load(None, {"RELAYD_DATABASE_URL": given[name]}).database_url == given[name]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_the_health_check_asks_where_the_relay_listens_and_no_proxy(host):
    """On `::` nothing listens at 127.0.0.1; and container engines put a proxy into every environment."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        environ = {"PATH": "/usr/bin:/bin", "RELAYD_HOST": host, "RELAYD_PORT": str(server.getsockname()[1])}
        environ["http_proxy"] = "http://127.0.0.1:1"
        done = subprocess.run(
            [sys.executable, ROOT / "deploy" / "docker" / "healthcheck.py"], env=environ, check=False
        )
    assert done.returncode == 0


@pytest.mark.parametrize("version", ["17\n", ""])
def test_a_database_from_before_keeps_the_password_it_was_made_with(tmp_path, version):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "PG_VERSION").write_text(version)
    assert (_passwords(tmp_path)["passwords/postgres"] == "relayd") is bool(version)


def test_the_relay_believes_the_proxy_of_the_profile_and_nobody_else():
    addresses = dict(re.findall(r"\$\{(RELAY_PROXY_[A-Z]+|RELAYD_TRUSTED_PROXIES):-([^}]*)\}", COMPOSE))
    assert addresses["RELAYD_TRUSTED_PROXIES"] == addresses["RELAY_PROXY_ADDRESS"]
    assert "internal: true" in COMPOSE.partition("\n  proxy:\n")[2].partition("\n  outside:")[0]
    assert {
        name for name in re.findall(r"^  ([a-z-]+):$", COMPOSE, re.MULTILINE) if name in ("relay", "caddy")
    } == {name for name in ("relay", "caddy", "postgres", "prometheus") if "proxy" in _networks(name)}


def _networks(name: str) -> str:
    found = re.search(r"^    networks:((?: .*\n)|\n(?:      .*\n)+)", _service(name), re.MULTILINE)
    return found[1] if found else ""
