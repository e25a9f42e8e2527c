"""`strata channel` and `strata channel-key`: what is typed and shown, and the answers to wrong input.

Conversations between processes are in `tests/system/test_channel_cli.py`.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import strata
from rich.console import Console
from strata.channels.encryption import GroupKey
from strata.channels.reliable import (
    CHANNEL_EVENTS,
    ChunkInfo,
    FailureStage,
    IrretrievableMessage,
    MessageAcknowledged,
    MessagePossiblyAcknowledged,
    MessageReceived,
    MessageSent,
    MessagesUndecryptable,
    ReliableMessageDelivered,
    ReliableMessageDeliveryError,
    ReliableMessageSendError,
    ReliableMessageSent,
    SenderIdConflict,
    SendingMessage,
    SendingMessageIrrecoverableError,
)
from strata.tools.cli.chatscreen import ChatScreen
from strata.tools.cli.chatview import PlainLines, author_of, event_record, sender_of, text_of
from strata.tools.cli.lineeditor import END, LineEditor
from strata.tools.cli.outbox import ChatOutbox, OwnMessage, Stage

SOURCES = str(Path(strata.__file__).parent.parent)
TOPIC = ("--topic", "/chat/1/room/proto")
IDS: dict[str, Any] = {"request_id": "r1", "message_id": "m1"}


def received(payload: bytes = b"hi", sender: str = "bob") -> MessageReceived:
    return MessageReceived(
        request_id="r1",
        message_id="m1",
        sender_id=sender,
        payload=payload,
        content_topic="/t",
        timestamp=1_760_000_000_000,
        hash=b"\x01",
    )


def chunk(kind, index=0, total=1, **more):
    return kind(**IDS, chunk_info=ChunkInfo(index, total), **more)


# Own messages.


def test_a_message_goes_from_waiting_to_delivered():
    own = OwnMessage("m1", line=1, text="x")
    states = [own.state]
    for event in (
        chunk(SendingMessage),
        chunk(MessageSent),
        ReliableMessageSent(**IDS),
        chunk(MessagePossiblyAcknowledged, possible_ack_count=1),
        MessageAcknowledged(**IDS, chunks_acknowledged=(0,), total_chunks=1),
        ReliableMessageDelivered(**IDS),
    ):
        own.apply(event)
        states.append(own.state)
    assert states == [
        "waiting",
        "sending",
        "sending",
        "sent",
        "perhaps received",
        "perhaps received",
        "delivered",
    ]
    assert own.is_settled and own.on_relay


def test_a_message_of_several_chunks_says_how_many():
    own = OwnMessage("m1", line=1, text="x")
    own.apply(chunk(SendingMessage, 0, 3))
    assert own.state == "sending 0/3"
    for index in range(3):
        own.apply(chunk(MessageSent, index, 3))
    own.apply(ReliableMessageSent(**IDS))
    assert own.state == "sent"
    own.apply(MessageAcknowledged(**IDS, chunks_acknowledged=(0, 2), total_chunks=3))
    assert own.state == "acknowledged 2/3"
    own.apply(chunk(SendingMessage, 1, 3))
    assert own.state == "acknowledged 2/3"


def test_a_message_that_is_sent_again_says_so():
    own = OwnMessage("m1", line=1, text="x")
    for event in (
        chunk(SendingMessage),
        chunk(MessageSent),
        ReliableMessageSent(**IDS),
        chunk(SendingMessage),
    ):
        own.apply(event)
    assert own.state == "sending again"
    own.apply(chunk(MessageSent))
    assert own.state == "sent"


@pytest.mark.parametrize(
    "event",
    [
        chunk(SendingMessageIrrecoverableError, error="the reason", code="c"),
        ReliableMessageSendError(**IDS, error="the reason", code="c", stage=FailureStage.DISPATCH),
        ReliableMessageDeliveryError(**IDS, error="the reason", code="c"),
    ],
)
def test_a_failure_gives_the_reason_and_late_delivery_still_counts(event):
    own = OwnMessage("m1", line=1, text="x")
    own.apply(event)
    assert own.state == "failed: the reason" and own.is_settled
    own.apply(ReliableMessageDelivered(**IDS))
    assert own.stage is Stage.DELIVERED


def test_events_find_their_message_even_before_its_request_id_is_known():
    outbox = ChatOutbox()
    first = outbox.begin("m1", 1, "x")
    assert outbox.find(ReliableMessageSent(request_id="other", message_id="m2")) is None
    assert outbox.find(chunk(SendingMessage)) is first
    outbox.bind("r1")
    second = outbox.begin("m1", 2, "x")  # the same text again: the request id tells them apart
    assert outbox.find(chunk(MessageSent)) is first
    assert outbox.find(ReliableMessageSent(request_id="r2", message_id="m1")) is second
    assert outbox.resume("r0", "m0").line is None
    missing = IrretrievableMessage(
        message_id="m1", retrieval_hint=None, sender_id=None, channel_id="c", first_missing_at=0
    )
    assert outbox.find(missing) is None
    first.apply(ReliableMessageDelivered(**IDS))
    assert outbox.unsettled == 2 and first not in outbox.undelivered and len(outbox) == 3


# What is shown.


def test_every_event_becomes_an_object_under_its_own_name():
    made = [
        chunk(SendingMessage),
        received(),
        received(b"\xff"),
        ReliableMessageSendError(**IDS, error="e", code="c", stage=FailureStage.DISPATCH),
        MessageAcknowledged(**IDS, chunks_acknowledged=(0, 1), total_chunks=2),
    ]
    records = [event_record(each) for each in made]
    assert [each["event"] for each in records] == [each.name for each in made]
    assert {each["event"] for each in records} <= set(CHANNEL_EVENTS)
    assert records[1]["text"] == "hi" and "base64" not in records[1] and records[1]["hash"] == "0x01"
    assert base64.b64decode(str(records[2]["base64"])) == b"\xff" and "text" not in records[2]
    assert event_record(made[0], OwnMessage("m1", line=7, text="x"))["line"] == 7
    assert "line" not in event_record(made[0], OwnMessage("m1", line=None, text="x"))


def test_a_chat_that_goes_on_for_months_remembers_what_nobody_has_confirmed_and_little_else():
    outbox = ChatOutbox()
    for number in range(50_000):
        own = outbox.begin(f"m{number}", number, "words")
        outbox.bind(f"r{number}")
        if number % 10_000:
            own.apply(ReliableMessageDelivered(request_id=f"r{number}", message_id=f"m{number}"))
    assert len(list(outbox)) < 10_000 and len(outbox._by_request) < 10_000
    assert len(outbox) == 50_000 and [each.line for each in outbox.undelivered] == [*range(0, 50_000, 10_000)]
    assert outbox.unsettled == 5
    late = ReliableMessageDelivered(request_id="r0", message_id="m0")
    assert outbox.find(late) is outbox.undelivered[0]


PHONE = "did:strata:z6MkAlice00000000000000000000000abcdefgh"


@pytest.mark.parametrize(
    ("sender", "author", "shown"),
    [
        ("bob", None, "bob"),
        ("bob", PHONE, "bob (…abcdefgh)"),
        (PHONE, PHONE, "…abcdefgh"),
        (f"{PHONE}#phone", PHONE, "…abcdefgh#phone"),
        (f"{PHONE}#phone", "did:strata:mallory", "…gh#phone (did:strata:mallory)"),
        ("a\x1b", "did:\x1b[2J", "a  (did: [2J)"),
    ],
)
def test_a_message_is_shown_with_its_author_and_the_time_of_sending(sender, author, shown, capsys):
    message = dataclasses.replace(received(sender=sender), author=author, sent_at=1_759_000_000_000)
    assert author_of(message) == shown
    PlainLines().received(message)
    assert capsys.readouterr().out == f"2025-09-27 19:06:40Z  {shown}  hi\n"
    PlainLines().received(dataclasses.replace(message, sent_at=None))
    PlainLines().received(dataclasses.replace(message, sent_at=-(2**62)))
    assert capsys.readouterr().out.startswith("2025-10-09 08:53:20Z")


def test_with_json_a_message_says_who_when_and_where_it_stands():
    message = dataclasses.replace(
        received(sender=f"{PHONE}#phone"), author=PHONE, sent_at=5, lamport_timestamp=6, sds_id="ab"
    )
    record = event_record(message)
    assert record["timestamp"] == 1_760_000_000_000 and record["sender_id"] == f"{PHONE}#phone"
    assert (record["author"], record["device"], record["sent_at"]) == (PHONE, "phone", 5)
    assert (record["lamport_timestamp"], record["sds_id"], record["order"]) == (6, "ab", (6, "ab"))


def test_another_program_under_the_same_name_is_reported(capsys):
    conflict = SenderIdConflict(sender_id="me", author=None, sds_id="m", detected_at=0, reason="the reason")
    PlainLines().event(conflict, None)
    assert "warning: the reason" in capsys.readouterr().err
    view, out = screen()
    view.event(conflict, None)
    assert "the reason" in out.getvalue()
    assert event_record(conflict)["event"] == "sender-id-conflict"


def test_messages_that_the_key_does_not_open_are_reported(capsys):
    PlainLines().event(MessagesUndecryptable(channel_id="room", count=3, since=0), None)
    assert "warning: messages come in that this key does not open" in capsys.readouterr().err


def test_nothing_that_others_say_can_steer_the_terminal():
    assert "\x1b" not in text_of(b"\x1b[2Jhi\nthere") and "\n" not in text_of(b"a\nb")
    assert text_of(b"\xff\xfe") == "(2 bytes)"
    assert sender_of("a\x1b") == "a " and sender_of("x" * 30 + "12345678") == "…12345678"


def screen() -> tuple[ChatScreen, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=60, height=20, color_system=None, legacy_windows=False
    )
    return ChatScreen(console), out


def test_the_screen_keeps_the_order_and_prints_what_is_settled():
    view, out = screen()
    own = OwnMessage("m1", line=1, text="my words")
    view.own(own)
    view.received(received(b"an answer " + b"x" * 60 + b" in full"))
    own.apply(ReliableMessageDelivered(**IDS))
    view.own(own)
    shown = out.getvalue()
    assert shown.index("my words  ✓✓ delivered") < shown.index("bob an answer") < shown.index("in full")


def test_the_screen_shows_a_message_of_a_time_that_no_calendar_has():
    view, out = screen()
    view.received(dataclasses.replace(received(b"hi"), sent_at=-(2**62)))
    assert "--:-- bob hi" in out.getvalue()


def test_the_screen_tells_of_a_message_that_has_scrolled_away():
    view, out = screen()
    own = OwnMessage("m1", line=1, text="my words")
    view.own(own)
    for number in range(20):
        view.received(received(b"%d" % number))
    assert "my words  · waiting" in out.getvalue() and "✓✓" not in out.getvalue()
    own.apply(ReliableMessageDelivered(**IDS))
    view.own(own)
    assert "my words  ✓✓ delivered" in out.getvalue()


# Editing.


def typed(*pieces: bytes) -> list[str | None]:
    editor = LineEditor()
    return [line for piece in pieces for line in editor.feed(piece)]


def test_keys_edit_the_line():
    assert typed(b"ab\x7fc\r") == ["ac"]
    assert typed(b"bc\x1b[Da\x1b[D\x01x\x05y\n") == ["xbacy"]
    assert typed(b"one two\x17three\n", b"gone\x15left\n") == ["one three", "left"]
    assert typed(b"abc\x1bOD\x1b[3~\x1b[A\x1b[1;5C\n") == ["ab"]
    assert typed(b"two\nlines\n") == ["two", "lines"]
    assert typed("é".encode()[:1], "é\n".encode()[1:]) == ["é"]


def test_control_d_ends_only_an_empty_line():
    assert typed(b"ab\x01\x04\n\x04") == ["b", END]


# The commands.


async def test_channel_key_makes_a_private_file_once_and_never_shows_the_key(run, tmp_path):
    path = tmp_path / "keys" / "group.json"
    code, out, err = await run("channel-key", path, "--json")
    key = GroupKey.load(path)
    assert code == 0 and json.loads(out) == {"key_id": f"0x{key.key_id.hex()}", "path": str(path)}
    assert key.secret.hex() not in out + err
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code, out, err = await run("channel-key", path)
    assert code == 1 and "not replaced" in err and GroupKey.load(path) == key


async def test_wrong_input_is_told_before_anything_is_opened(run, extended, key_file, tmp_path):
    (tmp_path / "notes.txt").write_text("not a store at all")
    (tmp_path / "wrong.json").write_text("{}")
    (tmp_path / "wrong.json").chmod(0o600)
    relay = ("--relay", extended.url)
    for arguments, hint in (
        (("room", "--topic", "chat"), "/chat/1/room/proto"),
        (("", *TOPIC), "NAME must have"),
        (("room", *TOPIC, "--sender", "x" * 257), "--sender must have"),
        (("room", *TOPIC, "--key", tmp_path / "none.json"), "strata channel-key"),
        (("room", *TOPIC, "--key", tmp_path / "wrong.json"), "not a group key file"),
        (("room", *TOPIC, "--identity", tmp_path / "none.json"), "strata keygen"),
        (("room", *TOPIC, "--relay", "http://example"), "ws://"),
        (("room", *TOPIC, "--store", tmp_path / "notes.txt"), "name another file"),
        (("room",), "--topic"),
    ):
        code, out, err = await run("channel", *relay, *arguments)
        assert (code, out) == (2, "") and hint in err, arguments
    assert extended.connections == 0


async def test_a_message_that_nobody_confirms_is_told_and_gives_exit_code_1(run, extended, key_file):
    arguments = ("channel", "room", *TOPIC, "--relay", extended.url, "--timeout", "1")
    code, out, err = await run(*arguments, "--json", stdin=b"hello\n")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and "1 of 1 messages not confirmed" in err and "--store FILE" in err
    assert [each["event"] for each in events] == ["sending-message", "message-sent", "reliable:message:sent"]
    assert all(each["line"] == 1 for each in events)
    assert len(extended.model.log) >= 1


async def test_the_end_of_an_empty_input_is_the_end(run, extended, key_file):
    code, out, _ = await run("channel", "room", *TOPIC, "--relay", extended.url, stdin=b"\n\n")
    assert (code, out) == (0, "")


async def test_a_bad_line_is_told_by_its_number_and_the_rest_goes_on(run, extended, key_file):
    arguments = ("channel", "room", *TOPIC, "--relay", extended.url, "--timeout", "1", "--json")
    code, out, err = await run(*arguments, stdin=b'{"txt":1}\n')
    assert (code, out) == (2, "") and "line 1: " in err
    code, out, err = await run(*arguments, stdin=b"{nonsense\nfine\n")
    assert code == 1 and '"line":2' in out
    code, out, err = await run(*arguments, stdin=b'\xef\xbb\xbf{"txt":1}\r\n')  # the mark hides nothing
    assert (code, out) == (2, "") and "line 1: " in err


async def test_ctrl_c_ends_at_once_and_says_what_is_left(extended, key_file, tmp_path):
    arguments = ("channel", "room", *TOPIC, "--relay", extended.url, "--store", tmp_path / "s.db")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "strata.tools.cli",
        *map(str, arguments),
        env={**os.environ, "PYTHONPATH": SOURCES, "STRATA_IDENTITY": str(key_file)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Children of a test run in the background would ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdin and process.stdout and process.stderr
    async with asyncio.timeout(60):
        process.stdin.write(b"hello\n")
        while b"sent" not in await process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        await process.stdout.read()
        err = (await process.stderr.read()).decode()
        code = await process.wait()
    assert "Traceback" not in err, err
    assert code == 130 and "1 of 1 messages not confirmed" in err and "the same command goes on" in err


async def test_an_unreachable_relay_ends_it_without_a_store(run, key_file):
    code, _, err = await run("channel", "room", *TOPIC, "--relay", "ws://127.0.0.1:1/strata", stdin=b"x\n")
    assert code == 1 and "error: " in err


async def test_with_a_store_one_writes_without_a_relay_and_a_later_run_goes_on(
    run, extended, key_file, tmp_path
):
    arguments = ("channel", "room", *TOPIC, "--store", tmp_path / "s.db", "--timeout", "1")
    code, out, err = await run(*arguments, "--relay", "ws://127.0.0.1:1/strata", stdin=b"hello\n")
    assert code == 1 and "[1] waiting  hello" in out and "no relay can be reached" in err
    assert "0 of them are on a relay" in err
    code, out, err = await run(*arguments, "--relay", extended.url)
    assert code == 1 and "[-] sent" in out and "all of them are on a relay" in err
    assert len(extended.model.log) >= 1
