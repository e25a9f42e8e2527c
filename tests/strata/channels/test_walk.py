"""The path of a message: how many files are called from `send` to the peer's iterator."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType

from strata.channels.messaging import RelayNode
from strata.channels.reliable import make_channel

from tests.support.made_relays import (
    ALICE,
    BOB,
    TOPIC,
    Log,
    MadeRelays,
)
from tests.support.virtual_time import virtually, wall
from tests.test_layout import CORE_MARK

ROOT = Path(__file__).parents[3] / "client" / "strata"
MOST_OF_THE_SHELL = 25
MOST_OF_ALL = 61


@virtually
async def test_a_message_crosses_few_files() -> None:
    """From `send` to the peer's iterator, packets included; the relay itself is in memory.

    The shell consists of the files that may wait. The others are core: each decides one thing.
    """
    log, called = Log(), set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    nodes = [RelayNode(MadeRelays(log), identity=each, wall=wall) for each in (ALICE, BOB)]
    alice, bob = (make_channel(node, "room", TOPIC, name) for node, name in zip(nodes, "ab", strict=True))
    async with nodes[0], nodes[1], alice, bob:
        await alice.send(b"so that both are under way")
        await anext(bob)
        await asyncio.sleep(60)
        sys.setprofile(note)
        try:
            await alice.send(b"hello")
            assert (await anext(bob)).payload == b"hello"
        finally:
            sys.setprofile(None)
    crossed = {Path(name) for name in called if Path(name).is_relative_to(ROOT)}
    crossed = {each for each in crossed if "tools" not in each.relative_to(ROOT).parts}
    shell = sorted(str(each.relative_to(ROOT)) for each in crossed if CORE_MARK not in each.read_text())
    assert len(shell) <= MOST_OF_THE_SHELL, shell
    assert len(crossed) <= MOST_OF_ALL, sorted(str(each.relative_to(ROOT)) for each in crossed)
