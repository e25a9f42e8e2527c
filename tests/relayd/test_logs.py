from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, TextIO

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


def written(stream: io.StringIO) -> str:
    for handler in logging.getLogger().handlers:
        handler.flush()
    return stream.getvalue()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written(stream).splitlines()]


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
    assert not written(stream).startswith("{")
    assert "second" in written(stream)


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
    assert "MARKER" not in written(stream)
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
        assert written(stream) == ""
    logs.get_logger("relayd.test").info("kept")
    assert [line["event"] for line in lines(stream)] == ["kept", "log_lines_dropped"]
    assert lines(stream)[1]["lines"] == 1
    assert (logs.dropped_lines(), logs.dropped_lines()) == (1, 0)
    assert capsys.readouterr().err == ""


@pytest.fixture
def pipe(stream) -> Iterator[tuple[int, TextIO]]:
    """The reading end of a pipe, and a stream into it."""
    reader, writer = os.pipe()
    with open(writer, "w") as into:
        yield reader, into
        os.close(reader)


def test_a_reader_that_does_not_read_holds_up_nobody_and_is_told_what_is_missing(pipe, monkeypatch):
    monkeypatch.setattr(logs, "_MAX_WAITING_BYTES", 100_000)
    monkeypatch.setattr(logs, "_FLUSH_SECONDS", 0.1)
    reader, into = pipe
    logs.configure("json", "info", into)
    logger = logs.get_logger("relayd.test")
    for number in range(2000):
        logger.info("line", number=number, text="x" * 100)
    logging.getLogger().handlers[0].flush()  # it gives up
    dropped = logs.dropped_lines()
    assert 0 < dropped < 2000
    found: list[dict[str, Any]] = []
    with open(reader, closefd=False) as reading:
        for text in reading:
            found.append(json.loads(text))
            if found[-1]["event"] == "log_lines_dropped":
                break
        logger.info("after")
        assert json.loads(reading.readline())["event"] == "after"
    assert [line["number"] for line in found[:-1]] == list(range(2000 - dropped))
    gap = found[-1]
    assert (gap["lines"], gap["level"], gap["logger"]) == (dropped, "warning", "relayd.logs")
    assert gap["at"].endswith("Z")


@pytest.mark.parametrize("is_read", [True, False])
def test_the_last_words_reach_a_reader_and_the_end_waits_for_nobody(tmp_path, is_read):
    """Nor does the interpreter end in an error because a thread holds a stream."""
    code = (
        "from relayd import logs\n"
        "logs.configure('json', 'info')\n"
        "for number in range(3000):\n"
        "    logs.get_logger('relayd.test').info('line', number=number, text='x' * 100)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.readlines() if is_read else []
        assert process.wait(30) == 0
    assert [json.loads(line)["number"] for line in said] == (list(range(3000)) if is_read else [])


def test_a_relay_is_named(stream):
    """The field that may hold an address elsewhere holds the DID of a peer."""
    logs.configure("json", "info", stream)
    logs.get_logger("relayd.test").info("peer_not_read", peer="did:strata:zA")
    assert lines(stream)[0]["peer"] == "did:strata:zA"


def test_what_others_say_steers_no_terminal_and_makes_no_line(stream):
    logs.configure("console", "info", stream)
    logs.get_logger("relayd.test").info("peer_not_read", problem="no\x1b[2J\nlevel=error")
    logging.getLogger("strata.relay").warning("refused: %s", "no\x1b[2J\nlevel=error")
    ours, theirs = written(stream).splitlines()
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
    said = written(stream)
    assert "RuntimeError" in said and "in fails" in said
    assert "hunter222" not in said


@pytest.mark.slow
def test_a_relay_does_not_load_what_draws_tracebacks():
    code = "import sys, relayd.process.workers; print('structlog' in sys.modules, 'rich' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["True", "False"]
