"""One of our channels and the ReliableChannel of js-waku in one room, over a network that loses messages.

To run it, `npm install @waku/sdk@0.0.36` in some folder and name that in `STRATA_WAKU_SDK`. The class runs in
node, on a stand-in for a Waku node; its clock and ours are the virtual one of the test.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strata.channels.messaging.values import NodeMessageReceived, ReceivedEnvelope
from strata.channels.persistence import MemoryPersistence
from strata.channels.reliable import ReliableChannel, ReliableMessageDelivered, make_channel
from strata_testkit.sim import Faults, SimNetwork, SimNode, run_virtually

from tests.support.relay_process import ROOT

SCRIPT = ROOT / "scripts/waku_channel_peer.mjs"
PEER = os.environ.get("STRATA_WAKU_SDK")
START_MS = 1_760_000_000_000
TOPIC = "/test/1/room/proto"
TICK_MS = 250
LOSS = 0.2


class Waku:
    """The class in a separate process, and its place on the network."""

    name = "js"

    def __init__(self, process: subprocess.Popen[str], network: SimNetwork) -> None:
        self._process = process
        self._network = network
        self.sent: list[str] = []
        self.acknowledged: set[str] = set()
        self.received: list[str] = []
        network.attach(self)

    def __call__(self, command: str, *parameters: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, *parameters]) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        assert "error" not in told, told["error"]
        for payload, message_hash in told["out"]:
            at = int(START_MS / 1000 + self._network.time())
            envelope = ReceivedEnvelope(
                content_topic=TOPIC, payload=base64.b64decode(payload), timestamp=at, author="js"
            )
            event = NodeMessageReceived(base64.b64decode(message_hash), envelope)
            self._network.publish(self.name, self._network.relays[0], event, lambda: None)
        for name, what in told["events"]:
            if name == "message-acknowledged":
                self.acknowledged.add(what)
            elif name == "message-received":
                self.received.append(base64.b64decode(what).decode())
            assert name != "sending-message-irrecoverable-error", what
        return told["answer"]

    def open(self) -> None:
        """Begin a life; the class keeps nothing beyond it."""
        now = START_MS + int(self._network.time() * 1000)
        self("open", TOPIC, "room", "js", {"causalHistorySize": 2}, now)

    def send(self, text: str) -> str:
        self.sent.append(text)
        return str(self("send", base64.b64encode(text.encode()).decode()))

    async def live(self) -> None:
        while True:
            await asyncio.sleep(TICK_MS / 1000)
            self("tick", TICK_MS)

    # Deliveries by the network.

    def hears(self, topic: str) -> bool:
        return topic == TOPIC

    def reach_changed(self) -> None:
        pass

    def arrives(self, event: NodeMessageReceived) -> None:
        if event.message.author != "js":
            payload, message_hash = event.message.payload, event.message_hash
            self("receive", base64.b64encode(payload).decode(), base64.b64encode(message_hash).decode())


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    if PEER is None or shutil.which("node") is None:
        pytest.skip("the conversation with js-waku needs node, and @waku/sdk in $STRATA_WAKU_SDK")
    (tmp_path / "node_modules").symlink_to(Path(PEER) / "node_modules")
    shutil.copy(SCRIPT, tmp_path)
    with subprocess.Popen(
        ["node", SCRIPT.name],
        cwd=tmp_path,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as running:
        yield running
        running.kill()


class Ours:
    """Our program through all its lives, on one store."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network
        self._store = MemoryPersistence()
        self.taken: list[str] = []
        self.delivered: set[str] = set()
        self.channel: ReliableChannel
        self._node: SimNode

    async def open(self) -> None:
        self._node = SimNode("py", self._network)
        self.channel = make_channel(
            self._node,
            "room",
            TOPIC,
            "py",
            persistence=self._store,
            segmentation="auto",
            max_retransmissions=50,
        )
        self.channel.message_events.on(
            "message-received", lambda event: self.taken.append(event.payload.decode())
        )
        self.channel.message_events.on(
            ReliableMessageDelivered.name, lambda event: self.delivered.add(event.request_id)
        )
        await self.channel.open()

    async def close(self) -> None:
        await self.channel.close()
        self._node.unplug()


@pytest.mark.parametrize("loss", [0.0, LOSS])
def test_both_hear_all_that_the_other_says_through_loss_and_restarts(
    process: subprocess.Popen[str], loss: float
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")

    async def converse() -> None:
        chance = random.Random(seed)
        network = SimNetwork(1, Faults(loss=loss), chance)
        waku, ours = Waku(process, network), Ours(network)
        waku.open()
        await ours.open()
        living = asyncio.create_task(waku.live())
        said: list[str] = []
        requests: list[str] = []
        expected: list[str] = []

        async def talk(part: str) -> None:
            for number in range(10):
                said.append(f"{part}: from here {number}")
                requests.append(await ours.channel.send(said[-1].encode()))
                expected.append(waku.send(f"{part}: from there {number}"))
                await asyncio.sleep(chance.uniform(0.0, 3.0))

        async def agree() -> None:
            async with asyncio.timeout(3_600):
                while (  # noqa: ASYNC110
                    not set(expected) <= waku.acknowledged
                    or not ours.channel.sync_status().is_synced
                    or not set(said) <= set(waku.received)
                ):
                    await asyncio.sleep(1)

        await talk("first")
        await ours.close()
        waku.send("while you were away")  # the relay keeps it, or the sender repeats it
        expected.append(waku("send", base64.b64encode(b"and more").decode()))
        waku.sent.append("and more")
        await asyncio.sleep(20)
        await ours.open()
        await agree()
        waku.open()  # with nothing under way: messages not yet delivered to it would be forgotten
        await talk("second")
        await agree()
        await ours.channel.send_ephemeral(b"typing")
        await asyncio.sleep(5)
        living.cancel()
        await asyncio.wait([living])
        assert sorted(ours.taken) == sorted(waku.sent), "each once"
        # Its new life does not know the messages of the previous one, and accepts them from us as another's.
        assert set(said) <= set(waku.received) <= {*said, *waku.sent, "typing"}, "payloads, without segments"
        assert set(requests) <= ours.delivered
        assert ours.channel.statistics.sds.undecodable == 0
        assert loss or "typing" in waku.received
        await ours.close()

    run_virtually(converse)
