"""The examples do what they say."""

import json
import random
import socket
import subprocess
import sys
from datetime import datetime
from xml.etree import ElementTree

import pytest
from causal_svg import causal_svg

from tests.support.example_program import example
from tests.support.forks import ForkedProcess
from tests.support.relay_process import ROOT, RelayProcess, running


def finish(process: ForkedProcess, said: str = "", timeout: float = 60) -> str:
    """The output of a process that must end successfully."""
    out, err = process.communicate(said.encode(), timeout)
    assert process.returncode == 0, (out + err).decode()
    return out.decode()


def first_lines(process: ForkedProcess, count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().decode().rstrip("\n") for _ in range(count)]


def tell(process: ForkedProcess, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode())
    process.stdin.flush()


def end(process: ForkedProcess) -> None:
    """End a process that runs until it is interrupted."""
    process.kill()
    process.communicate()


@pytest.mark.timeout(400)
def test_the_demo_kills_a_relay_and_loses_nothing():
    """As a reader of its documentation runs it: from the shell, on a data folder that the relay makes."""
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--kills", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] == 2
    assert counts["acknowledged"] > 0 and counts["received"] >= counts["acknowledged"]
    assert (counts["lost"], counts["doubled"], counts["out_of_order"]) == (0, 0, 0)


@pytest.mark.timeout(400)
@pytest.mark.req("R-371", "R-373")
def test_relays_of_different_owners_hold_the_same_after_a_kill_and_a_cut():
    counts = json.loads(finish(example("federation", "--packets", 18, "--json"), timeout=220))
    assert (counts["acknowledged"], counts["missing"]) == (18, 0)
    assert counts["held"] == {"anna": 18, "bert": 18, "cleo": 18}


@pytest.mark.timeout(400)
def test_the_upgrade_renews_workers_under_load_and_nobody_loses_anything():
    counts = json.loads(finish(example("upgrade", "--rounds", 1, "--json"), timeout=110))
    assert counts["workers_renewed"] == 2
    assert counts["acknowledged"] > 0
    assert (counts["lost"], counts["doubled"], counts["out_of_order"]) == (0, 0, 0)


@pytest.mark.timeout(400)
@pytest.mark.req("C-272")
def test_many_relays_survive_the_death_of_one():
    counts = json.loads(finish(example("many_relays"), timeout=110))
    assert counts == {"acknowledged": 100, "received": 100, "lost": 0, "doubled": 0}


def test_the_chat_shows_a_message_to_the_others_and_two_ticks_to_its_author(relay):
    listener = example("chat", relay.ws, "bob", "--room", "den")
    talker = example("chat", relay.ws, "alice", "--room", "den")
    try:
        out = finish(talker, "good morning\n")
        assert first_lines(listener, 1) == ["alice: good morning"]
    finally:
        end(listener)
    assert [line for line in out.splitlines() if line] == ["  ✓ good morning", "  ✓✓ good morning"]


def test_the_chat_shows_when_and_by_whom_a_message_was_sent(relay):
    listener = example("chat", relay.ws, "bob", "--room", "attic", "--times")
    talker = example("chat", relay.ws, "alice", "--room", "attic")
    before = datetime.now().replace(second=0, microsecond=0)
    try:
        finish(talker, "good morning\n")
        (line,) = first_lines(listener, 1)
    finally:
        end(listener)
    day, minute, author, rest = line.split(" ", 3)
    assert before <= datetime.fromisoformat(f"{day}T{minute}") <= datetime.now()
    assert author.startswith("did:strata:") and rest == "as alice: good morning"


def test_an_author_hears_who_has_read_a_message(relay):
    reader = example("read_receipts", relay.ws, "bob")
    author = example("read_receipts", relay.ws, "alice")
    try:
        tell(author, "shall we meet?\n")
        assert first_lines(reader, 1) == ["alice: shall we meet?"]
        (receipt,) = first_lines(author, 1)
    finally:
        end(reader)
        end(author)
    assert receipt.startswith("  bob read at ") and receipt.endswith(": shall we meet?")


def test_the_others_see_that_somebody_is_typing(relay):
    listener = example("typing_notices", relay.ws, "bob")
    talker = example("typing_notices", relay.ws, "alice")
    try:
        tell(talker, "is anybody there?\n")
        assert first_lines(listener, 1) == ["alice: is anybody there?"]
        finish(talker, "I ...\nI am here\n")
        assert first_lines(listener, 2) == ["alice is typing", "alice: I am here"]
    finally:
        end(listener)


def test_a_file_of_several_megabytes_arrives_whole(relay, tmp_path):
    body = random.Random(5).randbytes(3_500_000)
    (tmp_path / "here").mkdir()
    (tmp_path / "photo.raw").write_bytes(body)
    receiver = example("file_transfer", relay.ws, "receive", tmp_path / "here")
    sender = example("file_transfer", relay.ws, "send", tmp_path / "photo.raw")
    out = finish(sender)
    assert "photo.raw has arrived" in out and "100%" in out
    assert f"{len(body)} bytes from send" in finish(receiver)
    assert (tmp_path / "here" / "photo.raw").read_bytes() == body


def test_every_alarm_of_the_telemetry_arrives_and_readings_do_while_somebody_listens(relay):
    dashboard = example("telemetry", relay.ws, "dashboard")
    sensor = example("telemetry", relay.ws, "sensor", "--readings", 30)
    try:
        assert "30 readings sent, 3 alarms delivered" in finish(sensor)
    finally:
        dashboard.kill()
        lines = dashboard.communicate()[0].decode().splitlines()
    assert lines.count("ALARM 95.0") == 3
    assert sum(line.startswith("reading") for line in lines) > 0


def test_what_was_written_without_a_relay_is_delivered_by_a_later_run(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"ws://127.0.0.1:{port}/strata"
    store = ("--store", tmp_path / "outbox.db")
    assert "2 messages wait" in finish(example("offline_outbox", url, "write", "milk", "bread", *store))
    with running(RelayProcess(tmp_path / "relay", port=port)):
        reader = example("offline_outbox", url, "read", *store)
        try:
            out = finish(example("offline_outbox", url, "deliver", *store))
            assert first_lines(reader, 2) == ["milk", "bread"]
        finally:
            end(reader)
    assert "delivering 2 messages" in out and "all delivered" in out


@pytest.mark.timeout(400)
def test_the_channel_demo_converges_over_loss_and_a_killed_relay_and_draws_the_log(tmp_path):
    picture = tmp_path / "log.svg"
    out = finish(example("channel_demo", "--messages", 15, "--json", "--svg", picture), timeout=110)
    counts = json.loads(out)
    assert (counts["participants"], counts["messages"]) == (5, 15)
    assert counts["dropped_by_the_network"] > 0
    assert (counts["lost"], counts["doubled"], counts["logs_that_differ"]) == (0, 0, 0)
    root = ElementTree.fromstring(picture.read_text())
    assert len(root.findall(".//{*}circle")) == 15
    assert len(root.findall(".//{*}polygon")) > 5


def test_the_picture_of_a_log_has_a_column_for_each_sender_and_an_arrow_for_each_known_cause():
    log = [
        ("a", "ann", 10, ()),
        ("b", "bob", 20, ("a",)),
        ("c", "<bob>", 20, ("a", "gone")),
        ("d", "ann", 99, ("b", "a")),
    ]
    root = ElementTree.fromstring(causal_svg(log, "x < y"))
    texts = [each.text for each in root.findall("{*}text")]
    assert {"x < y", "ann", "bob", "<bob>", "+0", "+10", "+89"} <= set(texts)
    circles = root.findall("{*}circle")
    assert circles[0].get("cx") == circles[3].get("cx")
    assert circles[1].get("cy") == circles[2].get("cy")
    assert len(root.findall("{*}polygon")) == 4
    assert causal_svg([]).startswith("<svg")
