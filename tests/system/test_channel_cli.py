"""Conversations of `strata channel` processes over real relays."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strata import Identity
from strata.channels.encryption import GroupKey

from tests.support.forks import STRATA, ForkedProcess
from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess, environment, running
from tests.support.waiting import wait_until

TIMEOUT = 40.0


def topic_of(folder: Path) -> str:
    """A separate topic for the test."""
    return f"/test/1/{folder.name}/proto"


class Chat:
    """A `strata channel` process; a test can wait for lines of its output."""

    def __init__(
        self, folder: Path, relays: list[str], name: str, *arguments: object, json: bool = True
    ) -> None:
        key_file = folder / f"{name}.json"
        if not key_file.exists():
            Identity.generate().save(key_file)
        relay_options = [part for url in relays for part in ("--relay", url)]
        command = ["channel", "room", "--topic", topic_of(folder), "--identity", str(key_file)]
        command += ["--sender", name, *relay_options, *map(str, arguments)]
        self.json = json
        self.lines: list[str] = []
        self._new: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = ForkedProcess(
            STRATA, command + ["--json"] * json, env=environment({}), stdin=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._new.put(line.decode().rstrip("\n"))

    def type(self, *lines: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self.process.stdin.flush()

    def wait_for(self, *parts: str) -> str:
        """The next line that contains all of these."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                line = self._new.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{parts} not in:\n" + "\n".join(self.lines)) from None
            self.lines.append(line)
            if all(part in line for part in parts):
                return line

    def hear(self) -> dict[str, Any]:
        """The next message received."""
        heard: dict[str, Any] = json.loads(self.wait_for('"message-received"'))
        return heard

    def end(self) -> tuple[int, str]:
        """End the input; returns the exit code and stderr."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self._finish()

    def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        return self._finish()

    def _finish(self) -> tuple[int, str]:
        assert self.process.stderr is not None
        code = self.process.wait(TIMEOUT)
        self._reader.join()
        while not self._new.empty():
            self.lines.append(self._new.get())
        err = self.process.stderr.read().decode()
        assert "Traceback" not in err, err
        return code, err

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Any]:
    """Starts chats, and ends those still running."""
    with contextlib.ExitStack() as stack:

        def start(relays: list[str], name: str, *arguments: object, json: bool = True) -> Chat:
            made = Chat(tmp_path, relays, name, *arguments, json=json)
            stack.callback(made.kill)
            return made

        yield start


@pytest.mark.req("C-046", "C-052")
def test_two_talk_and_each_learns_that_its_message_has_arrived(relay, tmp_path, chat):
    group = tmp_path / "group.json"
    GroupKey.generate().save(group)
    bob = chat([relay.ws], "bob", "--key", group)
    alice = chat([relay.ws], "alice", "--key", group)
    alice.type("hello", '{"base64": "AP8="}')
    first, second = bob.hear(), bob.hear()
    assert (first["sender_id"], first["text"], second["base64"]) == ("alice", "hello", "AP8=")
    bob.type('{"text": "hi\\nthere"}')
    assert alice.hear()["text"] == "hi\nthere"
    bob.wait_for("reliable:message:delivered")
    (code, err) = alice.end()
    assert code == 0, err
    names = [json.loads(line)["event"] for line in alice.lines if '"line":1' in line]
    assert names[:3] == ["sending-message", "message-sent", "reliable:message:sent"]
    assert names[-2:] == ["message-acknowledged", "reliable:message:delivered"]
    assert names.count("reliable:message:delivered") == 1
    assert sum('"message-received"' in line for line in [*bob.lines, *alice.lines]) == 3
    assert bob.end()[0] == 0
    secret = GroupKey.load(group).secret.hex()
    assert all(secret not in line for line in [*alice.lines, *bob.lines, err])


def test_plain_lines_show_the_state_as_it_moves(relay, tmp_path, chat):
    chat([relay.ws], "bob", "--listen")
    alice = chat([relay.ws], "alice", json=False)
    alice.type("hello")
    assert alice.end()[0] == 0
    states = [
        re.sub(r"^.*\[1\] (.*)  hello$", r"\1", line) for line in alice.lines if line.endswith("  hello")
    ]
    assert states[:3] == ["waiting", "sending", "sent"] and states[-1] == "delivered"


@pytest.mark.req("C-257")
def test_what_was_written_while_the_relay_was_away_is_delivered_by_a_later_run(tmp_path, chat):
    port = free_port()
    url = f"ws://127.0.0.1:{port}/strata"
    store = ("--store", tmp_path / "alice.db")
    alice = chat([url], "alice", *store, "--timeout", 1)
    alice.type("written without a relay")
    code, err = alice.end()
    assert code == 1 and "the same command goes on with them" in err
    with running(RelayProcess(tmp_path / "relay", port=port)):
        bob = chat([url], "bob")
        assert chat([url], "alice", *store).end()[0] == 0
        assert bob.hear()["text"] == "written without a relay"


def test_a_relay_that_is_killed_and_comes_back_costs_nothing(tmp_path, chat):
    port = free_port()
    url = f"ws://127.0.0.1:{port}/strata"
    relay = RelayProcess(tmp_path / "relay", port=port)
    with running(relay):
        bob, alice = chat([url], "bob"), chat([url], "alice")
        alice.type("before")
        assert bob.hear()["text"] == "before"
        relay.kill()
        alice.type("meanwhile")
        relay.start()
        assert bob.hear()["text"] == "meanwhile"
        code, err = alice.end()
        assert code == 0 and "no relay can be reached" in err and "connected again" in err


def test_ctrl_c_lets_what_was_typed_out(tmp_path, chat):
    port = free_port()
    url = f"ws://127.0.0.1:{port}/strata"
    relay = RelayProcess(tmp_path / "relay", port=port)
    with running(relay):
        bob, alice = chat([url], "bob"), chat([url], "alice", json=False)
        alice.type("before")
        assert bob.hear()["text"] == "before"
        relay.kill()
        alice.type("last words")
        alice.wait_for("waiting", "last words")
        alice.process.send_signal(signal.SIGINT)
        relay.start()
        code, err = alice._finish()
        assert code == 130 and "sending what was typed; Ctrl-C ends at once" in err
        assert bob.hear()["text"] == "last words"


def test_a_second_ctrl_c_ends_the_wait_in_good_order(tmp_path, chat):
    port = free_port()
    url = f"ws://127.0.0.1:{port}/strata"
    relay = RelayProcess(tmp_path / "relay", port=port)
    with running(relay):
        alice = chat([url], "alice", json=False)
        alice.type("first")
        alice.wait_for("sent", "first")
        relay.kill()
        alice.type("last words")
        alice.wait_for("waiting", "last words")
        alice.process.send_signal(signal.SIGINT)
        assert alice.process.stderr is not None
        read = b""
        while b"Ctrl-C ends at once" not in read:
            read += alice.process.stderr.readline()
        assert alice.interrupt()[0] == 130


def test_several_relays_are_used_as_one(tmp_path, chat):
    with (
        running(RelayProcess(tmp_path / "a")) as a,
        running(RelayProcess(tmp_path / "b")) as b,
    ):
        bob, alice = chat([a.ws, b.ws], "bob"), chat([b.ws, a.ws], "alice")
        alice.type("by either")
        assert bob.hear()["text"] == "by either"
        a.kill()
        alice.type("by the other")
        assert bob.hear()["text"] == "by the other"
        assert alice.end()[0] == 0


def test_who_has_no_key_hears_nothing_and_is_told_why(relay, tmp_path, chat):
    for name in ("one", "two"):
        GroupKey.generate().save(tmp_path / f"{name}.key")
    alice = chat([relay.ws], "alice", "--key", tmp_path / "one.key", "--timeout", 5)
    wrong = chat([relay.ws], "bob", "--key", tmp_path / "two.key", json=False)
    none = chat([relay.ws], "cy", json=False)
    alice.type("secret")
    assert alice.end()[0] == 1
    assert "is --key the one that the others have?" in wrong.end()[1]
    assert "add --key FILE" in none.end()[1]
    assert not any("secret" in line for line in [*wrong.lines, *none.lines])


def test_on_a_terminal_states_change_in_place_and_the_terminal_is_left_as_it_was(relay, tmp_path, chat):
    import termios

    main, terminal = pty.openpty()
    try:
        bob = chat([relay.ws], "bob")
        bob.type("from bob")
        bob.wait_for("reliable:message:sent")
        Identity.generate().save(tmp_path / "alice.json")
        before = termios.tcgetattr(terminal)
        command = [sys.executable, "-m", "strata.tools.cli", "channel", "room", "--topic", topic_of(tmp_path)]
        command += ["--relay", relay.ws, "--identity", str(tmp_path / "alice.json"), "--sender", "alice"]
        process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment({}) | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
        )
        shown = _Shown(main)
        shown.wait_for("from bob")
        os.write(main, b"helo\x7flo\r")
        assert bob.hear()["text"] == "hello"
        shown.wait_for("✓✓ delivered")
        os.write(main, b"\x04")
        wait_until(lambda: shown.read() is None or process.poll() is not None, "the end of the chat")
        assert process.wait(TIMEOUT) == 0
        assert "hello" in shown.text and "Traceback" not in shown.text
        assert termios.tcgetattr(terminal) == before
    finally:
        os.close(main)
        os.close(terminal)


class _Shown:
    """The output of a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._data = b""

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._data.decode(errors="replace"))

    def read(self) -> bool:
        """Read what is available."""
        if select.select([self._descriptor], [], [], 0.05)[0]:
            self._data += os.read(self._descriptor, 65_536)
        return True

    def wait_for(self, part: str) -> None:
        wait_until(lambda: self.read() and part in self.text, part, TIMEOUT)
