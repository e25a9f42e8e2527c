"""The chat over Waku does what it says, on two small Waku nodes."""

from __future__ import annotations

import asyncio
import sys

from tests.support.relay_process import ROOT
from tests.support.waku_rest import WakuNetwork, WakuRest


async def test_the_chat_over_waku_shows_a_message_to_the_others_and_ends_when_they_have_it() -> None:
    network = WakuNetwork()
    rests = [WakuRest(network), WakuRest(network)]
    chats = []
    pipe = asyncio.subprocess.PIPE
    try:
        for rest, name in zip(rests, ("alice", "bob"), strict=True):
            await rest.start()
            program = str(ROOT / "examples/waku_chat.py")
            command = (sys.executable, program, rest.url, name, "--room", "den")
            chats.append(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
        alice, bob = chats
        async with asyncio.timeout(90):
            assert alice.stdin is not None and bob.stdin is not None and bob.stdout is not None
            alice.stdin.write("grüezi\n".encode())
            alice.stdin.close()
            assert await bob.stdout.readline() == "alice: grüezi\n".encode()
            assert await alice.wait() == 0, "it waited for the acknowledgement"
            bob.stdin.close()
            assert await bob.wait() == 0
    finally:
        for chat in chats:
            if chat.returncode is None:
                chat.kill()
                await chat.wait()
        for rest in rests:
            await rest.stop()
