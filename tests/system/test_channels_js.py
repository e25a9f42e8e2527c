"""One of our channels and a participant of the JavaScript package, each losing much of what the other sends.

The package is that of `web/`, or of the folder named by `STRATA_SDS_PEER`. It runs in node, behind pipes;
everything else, including its application, runs here on a virtual clock.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strata.channels.messaging.values import NodeMessageReceived, ReceivedEnvelope
from strata.channels.reliable import make_channel
from strata.channels.sds import SdsMessage
from strata.channels.segmentation.messages import decode_segment, encode_segment
from strata.channels.segmentation.splitting import SegmentationConfig, segment_message
from strata_testkit.sim import Faults, SimNetwork, SimNode, run_virtually

from tests.support.node_package import node_modules_with
from tests.support.relay_process import ROOT

SCRIPT = ROOT / "scripts/record_sds_exchange.mjs"
TOPIC = "/test/1/js/proto"
MESSAGES = 40
LOSS = 0.3


class Package:
    """The package in a separate process: one JSON command a line, one JSON answer."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, command: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Package]:
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
        yield Package(process)
        process.kill()


def wrapped(text: str) -> bytes:
    """The content that our channels put into an SDS message for a short text."""
    (segment,) = segment_message(text.encode(), SegmentationConfig(), request_id=None)
    return encode_segment(segment)


class Application:
    """The tasks of a program around the package: it delivers incoming messages, resends unacknowledged ones,
    and syncs. The package leaves these to it."""

    name = "js"

    def __init__(self, package: Package, network: SimNetwork, clock_offset: float) -> None:
        self._package = package
        self._network = network
        self._clock_offset = clock_offset
        self.unacknowledged: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.delivered: list[str] = []
        self.resent = 0
        self._contents: dict[str, bytes] = {}
        package("open", "room", "js", {"causalHistorySize": 2})
        network.attach(self)

    def send(self, text: str) -> None:
        wire = base64.b64decode(self._package("send", base64.b64encode(wrapped(text)).decode()))
        message = SdsMessage.decode(wire)
        assert message is not None
        self.sent.append(text)
        self.unacknowledged[message.message_id] = wire
        self._publish(wire)

    def _publish(self, wire: bytes) -> None:
        at = int(1_760_000_000 + self._network.time() + self._clock_offset)
        envelope = ReceivedEnvelope(content_topic=TOPIC, payload=wire, timestamp=at)
        event = NodeMessageReceived(self._network.hash_of(wire), envelope)
        self._network.publish(self.name, self._network.relays[0], event, lambda: None)

    async def keep_up(self) -> None:
        while True:
            await asyncio.sleep(5)
            for wire in self.unacknowledged.values():
                self.resent += 1
                self._publish(wire)
            sync = base64.b64decode(self._package("sync"))
            if sync:
                self._publish(sync)

    # Deliveries by the network.

    def hears(self, topic: str) -> bool:
        return topic == TOPIC

    def reach_changed(self) -> None:
        pass

    def arrives(self, event: NodeMessageReceived) -> None:
        wire = event.message.payload
        message = SdsMessage.decode(wire)
        assert message is not None
        if message.sender_id == "js":
            return  # its own message, which every subscriber gets
        if message.content:
            self._contents[message.message_id] = message.content
        assert self._package("receive", base64.b64encode(wire).decode())
        for name, what in self._package("events"):
            if name == "sds:out:message-acknowledged":
                self.unacknowledged.pop(what, None)
            elif name == "sds:in:message-delivered" and what not in self.delivered:
                # A repeat that need not be held back is reported again; the log has it once.
                self.delivered.append(what)

    def texts(self) -> list[str]:
        return [decode_segment(self._contents[each]).payload.decode() for each in self.delivered]


@pytest.mark.req("C-096")
def test_under_loss_each_ends_with_all_of_the_others_messages_once_and_acknowledged(package: Package) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")

    async def exchange() -> None:
        chance = random.Random(seed)
        network = SimNetwork(1, Faults(loss=LOSS), chance)
        # The package dates its messages by the real clock.
        clock_offset = time.time() - 1_760_000_000
        node = SimNode("py", network, clock_offset=clock_offset)
        theirs = Application(package, network, clock_offset)
        # Without a store, a lost message comes again from its sender, or never.
        options = {"retrieve_frequency_ms": 0, "query_on_connect": False, "max_retransmissions": 50}
        ours = make_channel(node, "room", TOPIC, "py", options=options)
        taken: list[str] = []
        ours.message_events.on("message-received", lambda event: taken.append(event.payload.decode()))
        said = [f"from here {number}" for number in range(MESSAGES)]
        async with ours:
            keeping_up = asyncio.create_task(theirs.keep_up())
            for number, text in enumerate(said):
                await ours.send(text.encode())
                theirs.send(f"from there {number}")
                await asyncio.sleep(chance.uniform(0.0, 3.0))
            async with asyncio.timeout(3_600):
                while theirs.unacknowledged or not ours.sync_status().is_synced:  # noqa: ASYNC110
                    await asyncio.sleep(1)
            keeping_up.cancel()
            await asyncio.wait([keeping_up])
            counts = ours.statistics.sds
            print(f"{network.counts}, {counts.retransmissions} and {theirs.resent} sent again")
            assert network.counts["lost_messages"] > MESSAGES // 2
            assert counts.retransmissions > 0 and theirs.resent > 0
            assert counts.undecodable == 0
            assert len(taken) == len(set(taken)) and sorted(taken) == sorted(theirs.sent)
            assert sorted(theirs.texts()) == sorted(said)
            log = package("log")
            assert len(log) == len(set(log)) == 2 * MESSAGES
            assert ours.log() == log, "and in one order"
        node.unplug()

    run_virtually(exchange)
