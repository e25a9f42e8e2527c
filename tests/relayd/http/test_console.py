"""The console's files over HTTP, with fake files."""

from __future__ import annotations

import gzip

import pytest
from websockets.datastructures import Headers

from relayd.http.api import HttpApi
from relayd.http.console import WebConsole

PAGE = b'<meta name="strata-socket" content="%socket%"><meta name="strata-public" content="%public%">'
FILES = {"index.html": PAGE, "assets/app-0a.js": b"let a = 1;" * 100, "assets/icon-0b.svg": b"<svg/>"}


def made(public_url: str | None = None, websocket_path: str = "/strata") -> WebConsole:
    return WebConsole(FILES, public_url=public_url, websocket_path=websocket_path)


def ask(path: str = "/", console: WebConsole | None = None, **headers: str):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return (console or made()).page(path, Headers(named))


def policy(**headers: str) -> dict[str, str]:
    console = made(headers.pop("public_url", None))
    text = ask(console=console, **headers).headers["Content-Security-Policy"]
    return dict(part.strip().partition(" ")[::2] for part in text.split(";"))


def test_the_page_knows_where_the_websocket_is():
    assert ask().body == PAGE.replace(b"%socket%", b"strata").replace(b"%public%", b"")
    console = made('wss://relay.example/a"b', "/")
    assert b'content=""' in ask(console=console).body
    assert b'content="wss://relay.example/a&quot;b"' in ask(console=console).body


def test_other_paths_are_left_to_others():
    for path in ("/strata", "/assets/", "/assets/app.js", "/index.html", "/assets/../index.html", "//", ""):
        assert ask(path) is None
    assert ask("/?x=1").status == 200


def test_files_may_be_kept_for_ever_and_the_page_is_asked_for_again():
    file, page = ask("/assets/app-0a.js"), ask()
    assert file.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    assert page.headers["Cache-Control"] == "no-cache"
    assert (file.content_type, page.content_type) == (
        "text/javascript; charset=utf-8",
        "text/html; charset=utf-8",
    )
    for tag in (page.headers["ETag"], f'"x", W/{page.headers["ETag"]}'):
        again = ask(If_None_Match=tag)
        assert (again.status, again.body) == (304, b"")
        assert again.headers["Content-Security-Policy"] == page.headers["Content-Security-Policy"]
    assert ask(If_None_Match='"other"').status == 200
    assert ask(console=made(websocket_path="/x"), If_None_Match=page.headers["ETag"]).status == 200


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        ("gzip", True),
        ("br, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("gzip;Q=0.0", False),
        ("gzip; q = 0", False),
        ("gzip;q=0.001", True),
        ("identity", False),
        ("x" * 10_000, False),
    ],
)
def test_files_are_packed_for_those_who_take_that(accepted, packed):
    answer = ask("/assets/app-0a.js", Accept_Encoding=accepted)
    assert answer.status == 200 and ("Content-Encoding" in answer.headers) is packed
    assert (gzip.decompress(answer.body) if packed else answer.body) == FILES["assets/app-0a.js"]
    assert answer.headers["Vary"] == "Accept-Encoding"


def test_the_policy_allows_nothing_from_elsewhere():
    rules = policy()
    assert rules.pop("connect-src") == "'self'"
    assert rules.pop("trusted-types") == "strata"
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert rules["default-src"] == "'none'"
    assert set(rules.values()) == {"'none'", "'self'"}
    for name in ("/", *(f"/{name}" for name in FILES if name != "index.html")):
        said = ask(name).headers
        assert said["Content-Security-Policy"] == ask().headers["Content-Security-Policy"]
        assert said["Referrer-Policy"] == "no-referrer"
        assert said["Cross-Origin-Opener-Policy"] == "same-origin"


@pytest.mark.parametrize("host", ["relay.example", "localhost:7447", "192.0.2.1:80", "[2001:db8::1]:7447"])
def test_older_browsers_are_told_the_url_of_the_websocket(host):
    assert policy(Host=host)["connect-src"] == f"'self' ws://{host} wss://{host}"


@pytest.mark.parametrize(
    "host",
    ["", "a b", "a;script-src *", "*", "*.example", "a/b", "'unsafe-inline'", "a:b", "a,b", "x" * 300, "é"],
)
def test_a_host_that_is_none_is_left_out(host):
    assert policy(Host=host)["connect-src"] == "'self'"


def test_the_public_url_is_allowed_and_nothing_else_of_it():
    assert (
        policy(public_url="wss://relay.example:8443/a;b")["connect-src"] == "'self' wss://relay.example:8443"
    )
    assert policy(public_url="wss://u:p@relay.example/x")["connect-src"] == "'self' wss://relay.example"
    assert policy(public_url="wss://a;b/x")["connect-src"] == "'self'"
    two = made().page("/", Headers([("Host", "a"), ("Host", "b")]))
    assert two is not None
    assert "connect-src 'self';" in two.headers["Content-Security-Policy"]


def test_an_api_without_a_console_has_no_pages():
    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=None)  # type: ignore[arg-type]
    assert api.page("/", Headers()) is None
