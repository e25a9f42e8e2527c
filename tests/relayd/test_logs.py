from __future__ import annotations

import errno
import io
import json
import logging
import subprocess
import sys
from typing import Any

import pytest
import structlog

from relayd import logs
from relayd.logs import truncated_address


@pytest.fixture
def stream():
    """The output of `configure`; the tests' own logging is restored afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object(stream):
    logs.configure("json", "info", stream)
    logs.get_logger("relayd.test").info("opened", subscriptions=2)
    (line,) = lines(stream)
    assert line.pop("at").endswith("Z")
    assert line == {"event": "opened", "subscriptions": 2, "level": "info", "logger": "relayd.test"}


def test_auto_is_json_where_nobody_looks_and_console_on_a_terminal(stream, monkeypatch):
    logs.configure("auto", "info", stream)
    logs.get_logger("relayd.test").info("first")
    assert lines(stream)[0]["event"] == "first"
    stream.seek(0)
    stream.truncate()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    logs.configure("auto", "info", stream)
    logs.get_logger("relayd.other").info("second")
    assert not stream.getvalue().startswith("{")
    assert "second" in stream.getvalue()


def test_other_libraries_lines_take_the_same_form(stream):
    logs.configure("json", "info", stream)
    logging.getLogger("somewhere").warning("careful %s", "now")
    (line,) = lines(stream)
    assert (line["event"], line["logger"]) == ("careful now", "somewhere")


def test_less_severe_lines_are_left_out(stream):
    logs.configure("json", "warning", stream)
    logs.get_logger("relayd.test").info("quiet")
    logs.get_logger("relayd.test").warning("loud")
    logging.getLogger("websockets.server").info("connection open")
    assert [line["event"] for line in lines(stream)] == ["loud"]


@pytest.mark.req("R-328")
@pytest.mark.parametrize(
    "field", ["packet", "body", "content", "payload", "signature", "seed", "database_url"]
)
def test_content_and_keys_are_struck_out_whatever_a_caller_does(stream, field):
    logs.configure("json", "debug", stream)
    logs.get_logger("relayd.test").debug("event", **{field: "MARKER"})
    assert "MARKER" not in stream.getvalue()
    assert lines(stream)[0][field] == "[withheld]"


@pytest.mark.req("R-330")
def test_an_address_is_logged_without_its_host(stream):
    logs.configure("json", "info", stream)
    logs.get_logger("relayd.test").info("opened", peer="203.0.113.77")
    assert lines(stream)[0]["peer"] == "203.0.113.0/24"


@pytest.mark.req("R-330")
@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("203.0.113.77", "203.0.113.0/24"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/48"),
        ("::ffff:203.0.113.77", "203.0.113.0/24"),
        ("", "?"),
        ("a host", "?"),
    ],
)
def test_the_network_of_an_address(address, network):
    assert truncated_address(address) == network


def test_an_exception_is_told_on_its_line(stream):
    logs.configure("json", "info", stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logs.get_logger("relayd.test").exception("failed")
    (line,) = lines(stream)
    assert "ValueError: broken" in str(line["exception"])


def test_a_stream_that_takes_nothing_costs_the_line_and_nothing_else(stream, monkeypatch, capsys):
    logs.configure("json", "info", stream)

    def full(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(stream, "write", full)
        logs.get_logger("relayd.test").info("lost")
    logs.get_logger("relayd.test").info("kept")
    assert [line["event"] for line in lines(stream)] == ["kept"]
    assert capsys.readouterr().err == ""


def test_a_relay_is_named(stream):
    """The field that may hold an address elsewhere holds the DID of a peer."""
    logs.configure("json", "info", stream)
    logs.get_logger("relayd.test").info("peer_not_read", peer="did:strata:zA")
    assert lines(stream)[0]["peer"] == "did:strata:zA"


def test_what_others_say_steers_no_terminal_and_makes_no_line(stream):
    logs.configure("console", "info", stream)
    logs.get_logger("relayd.test").info("peer_not_read", problem="no\x1b[2J\nlevel=error")
    logging.getLogger("strata.relay").warning("refused: %s", "no\x1b[2J\nlevel=error")
    ours, theirs = stream.getvalue().splitlines()
    for line in ours, theirs:
        assert "[2J" in line and "level=error" in line and "\x1b" not in line


@pytest.mark.req("R-328")
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_values_of_variables(stream, log_format):
    def fails(seed: str) -> None:
        raise RuntimeError("it failed")

    logs.configure(log_format, "info", stream)
    try:
        fails("hunter" + "2" * 3)
    except RuntimeError:
        logs.get_logger("relayd.test").exception("caught")
    said = stream.getvalue()
    assert "RuntimeError" in said and "in fails" in said
    assert "hunter222" not in said


@pytest.mark.slow
def test_a_relay_does_not_load_what_draws_tracebacks():
    code = "import sys, relayd.process.workers; print('structlog' in sys.modules, 'rich' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["True", "False"]
