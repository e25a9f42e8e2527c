"""The process that parses expensive packets: it agrees with `Packet.parse`, and may be lost at any time."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet
from structlog.testing import capture_logs

from relayd.admission import parsing_apart
from relayd.admission.parsing_apart import ApartParser, ParserLost
from tests.relayd.admission.admission_rig import ALICE, made, signed, tampered
from tests.support.waiting import wait_until

Begun = Callable[[], set[psutil.Process]]

LIMITS = "max_bytes=65_536, max_depth=64, max_values=4_096"


def parsed_here(raw: bytes) -> Packet:
    return Packet.parse(raw, max_bytes=65_536, max_depth=64, max_values=4_096)


@pytest.fixture
def apart() -> Iterator[ApartParser]:
    parser = ApartParser(max_bytes=65_536, max_depth=64, max_values=4_096)
    yield parser
    parser.close()


def nested(depth: int) -> bytes:
    inner: object = []
    for _ in range(depth):
        inner = [inner]
    return signed(ALICE, {"type": "POST", "deep": inner}).canonical


def outcome(parse: Callable[[bytes], Packet | InvalidPacket], raw: bytes) -> object:
    """The result of parsing a packet, in values that can be compared."""
    try:
        found = parse(raw)
    except InvalidPacket as error:
        found = error
    if isinstance(found, InvalidPacket):
        return found.code, found.reason, found.detail, found.max_bytes
    return [getattr(found, name) for name in Packet.__struct_fields__]


@pytest.fixture
def begun() -> Begun:
    """The processes that this one has started during the test."""
    this = psutil.Process()
    before = set(this.children())
    return lambda: set(this.children()) - before


@pytest.mark.parametrize(
    "raw",
    [
        made(1, padding=20_000),
        made(2).replace(b",", b" , "),
        signed(ALICE, {"type": "POST", "ü": [0.1 * n for n in range(3_000)], "\U0001f600": 1e22}).canonical,
        nested(50),
        nested(60).replace(b"[[]]", b"[[[[[[]]]]]]"),
        tampered(made(3)).replace(b'"text":""', b'"text":"x"'),
        made(4, padding=70_000),
        b"[" + b"1," * 5_000 + b"1]",
        b'{"a":1,"a":2}',
        b'{"n":1e400}',
        b"\xff",
        b"",
    ],
    ids=[
        "large", "spaces", "numbers", "deep", "too deep", "another id", "too large", "too many values",
        "twice the same member", "beyond doubles", "not UTF-8", "nothing",
    ],
)  # fmt: skip
def test_it_finds_what_parsing_here_finds(apart: ApartParser, raw: bytes):
    assert outcome(lambda text: apart.parse(text).packet, raw) == outcome(parsed_here, raw)


def test_one_process_serves_one_thread_after_the_other_and_tells_its_cost(apart: ApartParser, begun: Begun):
    found = [apart.parse(made(number, padding=20_000)) for number in range(5)]
    assert all(each.seconds > 0 for each in found)
    (child,) = begun()
    assert child.nice() > psutil.Process().nice()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_while_the_relay_drains(apart: ApartParser, begun: Begun, number: signal.Signals):
    apart.parse(made(1))
    (child,) = begun()
    child.send_signal(number)
    assert isinstance(apart.parse(made(2)).packet, Packet)
    assert begun() == {child}


def test_a_process_that_is_killed_takes_one_packet_along(apart: ApartParser, begun: Begun):
    apart.parse(made(1))
    (child,) = begun()
    child.suspend()
    with ThreadPoolExecutor(1) as thread:
        parsed = thread.submit(apart.parse, made(2))
        wait_until(lambda: bool(apart._busy))
        child.kill()
        assert isinstance(parsed.exception(30), ParserLost)
    assert isinstance(apart.parse(made(3)).packet, Packet)
    assert child not in begun()


def test_a_process_that_is_killed_while_it_has_nothing_to_do_takes_none_along(
    apart: ApartParser, begun: Begun
):
    apart.parse(made(1))
    (child,) = begun()
    child.kill()
    wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert isinstance(apart.parse(made(2)).packet, Packet)
    assert child not in begun()


def test_one_that_says_nothing_is_ended(apart: ApartParser, begun: Begun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parsing_apart, "_PATIENCE", 0.2)
    while True:
        try:
            apart.parse(made(1))
            break
        except ParserLost:  # it had not started yet
            monkeypatch.setattr(parsing_apart, "_PATIENCE", 2 * parsing_apart._PATIENCE)
    (child,) = begun()
    child.suspend()
    with pytest.raises(ParserLost):
        apart.parse(made(2))
    assert not begun()


def test_closing_ends_it_also_amid_a_packet(apart: ApartParser, begun: Begun):
    apart.parse(made(1))
    (child,) = begun()
    child.suspend()
    with ThreadPoolExecutor(1) as thread:
        parsed = thread.submit(apart.parse, made(2))
        apart.close()
        assert isinstance(parsed.exception(30), ParserLost)
    assert not begun()
    with pytest.raises(ParserLost):
        apart.parse(made(3))


def test_without_another_process_packets_are_parsed_here(apart: ApartParser, monkeypatch: pytest.MonkeyPatch):
    def refused(*arguments: object, **named: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with capture_logs() as logs:
        for raw in (made(1), made(2).replace(b",", b" , "), b"{}"):
            assert outcome(lambda text: apart.parse(text).packet, raw) == outcome(parsed_here, raw)
    assert [entry["event"] for entry in logs] == ["no_process_apart"]


def test_it_ends_with_a_relay_that_is_killed(tmp_path: Path):
    program = f"""
import sys, time
from relayd.admission.parsing_apart import ApartParser
apart = ApartParser({LIMITS})
apart.parse(b"nothing")
print("ready", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as relay:
        assert relay.stdout is not None
        assert relay.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(relay.pid).children()
        relay.kill()
    wait_until(lambda: not child.is_running())


def test_a_process_gives_way_to_others_before_it_has_read_its_own_code(
    apart: ApartParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "niceness"
    package = tmp_path / "relayd"
    package.mkdir()
    note = f"import os, pathlib; pathlib.Path({str(noted)!r}).write_text(str(os.nice(0)))"
    (package / "__init__.py").write_text(note)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ParserLost):  # that code is no parser
        apart.parse(made(1))
    assert int(noted.read_text()) > psutil.Process().nice()
