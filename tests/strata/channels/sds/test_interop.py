"""With the JavaScript package: a recorded exchange, and a live one where the package is available.

The live exchange uses the package of `web/`, or of the folder that `STRATA_SDS_PEER` names.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strata.channels.sds import (
    Acknowledged,
    Delivered,
    MissingFound,
    Participant,
    PossiblyAcknowledged,
    SdsConfig,
    SdsMessage,
    SendSync,
)

from tests.support.node_package import node_modules_with

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "scripts/record_sds_exchange.mjs"
EXCHANGE = json.loads((Path(__file__).parent / "vectors/exchange.json").read_text())


@pytest.mark.req("C-096", "C-103", "C-115", "C-118", "C-134")
def test_a_listener_follows_a_recorded_exchange() -> None:
    now = time_of(EXCHANGE["steps"][0])
    carol = Participant("room", "carol", now_ms=now, random=lambda: 0.5)
    delivered, missed = [], []
    for step in EXCHANGE["steps"]:
        if step["lost"]:
            continue
        carol.receive(zlib.decompress(base64.b64decode(step["zlib"])), now)
        for event in carol.events():
            if isinstance(event, Delivered):
                delivered.append(event.content.decode())
            elif isinstance(event, MissingFound):
                missed += [entry.message_id for entry in event.entries]
    assert delivered == [
        "one",
        "two",
        "three",
        "four, lost",
        "five, which waits for four",
        "six, also waiting",
        "seven",
    ]
    assert [entry.message_id for entry in carol.log()] == EXCHANGE["alice"] == EXCHANGE["bob"]
    assert missed == [EXCHANGE["alice"][3]]
    assert carol.missing() == []


def time_of(step: dict[str, Any]) -> int:
    message = SdsMessage.decode(zlib.decompress(base64.b64decode(step["zlib"])))
    assert message is not None and message.lamport_timestamp is not None
    return message.lamport_timestamp


class LivePeer:
    """A participant of the package, in a separate process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, command: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def send(self, text: str) -> bytes:
        return base64.b64decode(self("send", base64.b64encode(text.encode()).decode()))

    def sync(self) -> bytes:
        return base64.b64decode(self("sync"))

    def receive(self, data: bytes) -> bool:
        return bool(self("receive", base64.b64encode(data).decode()))


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[LivePeer]:
    (tmp_path / "node_modules").symlink_to(node_modules_with("@waku/sds", "STRATA_SDS_PEER"))
    shutil.copy(SCRIPT, tmp_path)
    with subprocess.Popen(
        ["node", SCRIPT.name, "live"],
        cwd=tmp_path,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        yield LivePeer(process)
        process.kill()


def now() -> int:
    return int(time.time() * 1_000)


def test_both_sides_understand_each_other_live(peer: LivePeer) -> None:
    peer("open", "room", "js", {"causalHistorySize": 2})
    ours = Participant("room", "py", SdsConfig(), now_ms=now(), random=lambda: 0.5)

    def say(text: str) -> SdsMessage:
        message = ours.wrap(text.encode(), now(), time.time_ns())
        ours.dispatched(message.message_id, now(), bytes(32))
        return message

    first = say("hello from here")
    assert peer.receive(first.encode())
    assert peer("events") == [["sds:in:message-delivered", first.message_id]]
    ours.receive(peer.send("hello from there"), now())
    acknowledged, delivered = ours.events()
    assert isinstance(acknowledged, Acknowledged)
    assert isinstance(delivered, Delivered) and delivered.content == b"hello from there"

    # Ours acknowledges theirs; what follows a lost message is held, and delivered once that message arrives.
    lost, second = say("lost at first"), say("waits for it")
    assert peer.receive(second.encode())
    names = [event for event, _ in peer("events")]
    assert "sds:out:message-acknowledged" in names and "sds:in:message-missing" in names
    assert peer.receive(lost.encode())
    assert [name for name, _ in peer("events")].count("sds:in:message-delivered") == 2

    # Theirs lists two of our five messages: the others are acknowledged because these two follow them.
    chunks = [say(f"chunk {number}") for number in range(5)]
    for message in chunks:
        assert peer.receive(message.encode())
    ours.receive(peer.sync(), now())
    assert {event.message_id for event in ours.events() if isinstance(event, Acknowledged)} >= {
        message.message_id for message in chunks
    }
    assert ours.outgoing() == {}

    # Their filter alone is a possible acknowledgement, and they accept our sync.
    theirs = peer.send("the last word")
    ours.receive(theirs, now())
    ours.handle_timer(now() + 2_600)
    (sync,) = [event for event in ours.events() if isinstance(event, SendSync | PossiblyAcknowledged)]
    assert isinstance(sync, SendSync) and peer.receive(sync.data)
    assert "sds:out:message-acknowledged" in [name for name, _ in peer("events")]
    assert [entry.message_id for entry in ours.log()] == peer("log")
