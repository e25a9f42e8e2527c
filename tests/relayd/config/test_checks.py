"""Faults of settings that no type can express."""

from __future__ import annotations

import importlib.util

import pytest

from relayd.config import ConfigurationError, load
from tests.relayd.settings_files import problems


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"RELAYD_TLS_CERT": "c.pem"}, "tls_cert and tls_key"),
        ({"RELAYD_TLS_KEY": "k.pem"}, "tls_cert and tls_key"),
        ({"RELAYD_DEFAULT_LIMIT": "501"}, "default_limit (501) is above max_limit (500)"),
        ({"RELAYD_PUBLIC_URL": "https://relay.example"}, "public_url: expected a ws://"),
        ({"RELAYD_ANNOUNCE_SECONDS": "3600"}, "announce_seconds needs public_url"),
        ({"RELAYD_ANNOUNCE_SECONDS": "5", "RELAYD_PUBLIC_URL": "wss://h/s"}, "announce_seconds is below 600"),
        ({"RELAYD_PUBLIC_URL": "ws://"}, "public_url: expected a ws://"),
        ({"RELAYD_PUBLIC_URL": "ws://[bad"}, "public_url: expected a ws://"),
        ({"RELAYD_DATABASE_URL": "mysql://h/d"}, "database_url: expected a postgresql://"),
        ({"RELAYD_DATABASE_URL": "postgresql://u:se/cret@h/d"}, "database_url: not a URL; write characters"),
        ({"RELAYD_DATABASE_URL": "postgresql://u:1#cret@h/d"}, "database_url: not a URL; write characters"),
        ({"RELAYD_DATABASE_URL": "postgresql://u:se[cret@h/d"}, "database_url: not a URL; write characters"),
        ({"RELAYD_DATABASE_URL": "postgresql://u@one,two:x/d"}, "database_url: not a URL; write characters"),
        ({"RELAYD_READ_DATABASE_URL": "postgresql://h/d"}, "read_database_url needs database_url"),
        ({"RELAYD_BUS_URL": "http://h:4222"}, "bus_url: expected a nats:// or tls:// URL"),
        ({"RELAYD_TRACING_URL": "grpc://h:4317"}, "tracing_url: expected an http:// or https:// URL"),
        ({"RELAYD_TRACING_RATIO": "2"}, "RELAYD_TRACING_RATIO: "),
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


def test_an_extra_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    environ = {"RELAYD_RETENTION_REQUIRES_ARCHIVE": "true", "RELAYD_ARCHIVE_MANIFESTS": "/lake/_manifests"}
    (found,) = problems(None, environ)
    assert "install relayd[archive]" in found


def test_an_empty_host_is_no_wish_to_listen_on_every_interface(toml):
    for file, options in ((toml('host = ""'), {}), (None, {"host": ""})):
        with pytest.raises(ConfigurationError, match="host is empty"):
            load(file, {}, options)
    assert load(None, {"RELAYD_HOST": ""}).host == "127.0.0.1"  # compose files pass empty variables


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://",
        "postgres://u:p@x:y@h:5432/d?sslmode=require",
        "postgresql://u:%2F%23@[::1]:5432,[fe80::1%25eth0],other:1/d",
        "postgresql://u:p@one:1,[::1]:2/d",
        "postgresql://relayd@/relayd?host=/run/postgres&port=5432",
    ],
)
def test_every_form_of_a_database_url_is_taken(url):
    assert load(None, {"RELAYD_DATABASE_URL": url}).database_url == url


def test_an_id_is_never_forgotten_while_its_packet_could_be_taken_again():
    (found,) = problems(None, {"RELAYD_DEDUP_WINDOW_SECONDS": "3600"})
    assert found == "dedup_window_seconds (3600) is below max_packet_age_seconds (86400)"


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


@pytest.mark.parametrize(
    "origin",
    ["https://*.a.example", "https://a..example", "https://me@a.example", "https://a.example:99999",
     "https://1.2.3", "https://straße.example", "wss://a.example", "https://[::g]", "https://[1.2.3.4]:1"],
)  # fmt: skip
def test_an_origin_that_no_browser_sends_is_refused(origin):
    said = f"allowed_origins: {origin} is not an origin such as https://example.org"
    assert problems(None, {"RELAYD_ALLOWED_ORIGINS": origin}) == [said]


@pytest.mark.parametrize(
    "origin",
    ["https://a.example", "http://a.example:8080", "https://[::1]:1", "null", "https://bücher.example:443",
     "http://10.0.0.1", "http://localhost:3000", "https://my_app.example"],
)  # fmt: skip
def test_what_is_an_origin(origin):
    assert load(None, {"RELAYD_ALLOWED_ORIGINS": origin}).allowed_origins == (origin,)


def test_a_limit_that_does_nothing_on_the_spot_is_warned_about(toml):
    (warning,) = load(None, {"RELAYD_PUBLISH_LIMIT": "5"}).warnings
    assert warning == "publish_limit: no limit holds for 127.0.0.0/8, ::1/128 (unlimited_addresses)"
    assert load(toml("publish_limit = 5\nunlimited_addresses = []")).warnings == ()
    assert load(None, {"RELAYD_PORT": "1"}).warnings == ()


@pytest.mark.parametrize("address", ["127.0.0.1:7447", "0.0.0.0:7447", "[::]:7447"])
def test_metrics_have_an_address_of_their_own(address):
    said = "metrics_listen is the relay's own address; choose another port, or leave it out"
    assert problems(None, {"RELAYD_METRICS_LISTEN": address}) == [said]
    everywhere = {"RELAYD_METRICS_LISTEN": "127.0.0.1:7447", "RELAYD_HOST": "0.0.0.0"}
    assert problems(None, everywhere) == [said]
    load(None, {"RELAYD_METRICS_LISTEN": address.replace("7447", "7448")})
    load(None, {"RELAYD_METRICS_LISTEN": "127.0.0.2:7447"})
    load(None, {"RELAYD_METRICS_LISTEN": "127.0.0.1:0", "RELAYD_PORT": "0"})
