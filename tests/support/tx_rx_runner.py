"""One end of a channel, as a separate process: `receive ADDRESS COUNT` or `send ADDRESS COUNT`.

The receiver prints the address it serves, then what has arrived; the sender prints what it has done. Messages
are their own numbers, so that the receiver can check at each one whether it is the next.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from struct import Struct

import uvloop
from strata.txrx import TxRxSettings, dial, serve

__all__: list[str] = []

NUMBER = Struct(">Q")
SETTINGS = TxRxSettings(message_delivery_timeout=100.0)


async def receive(address: str, count: int) -> None:
    real, rx = await serve(address, bytes, settings=SETTINGS)
    print(real, flush=True)
    async with rx:
        for expected in range(count):
            (number,) = NUMBER.unpack(await rx.recv())
            if number != expected:
                sys.exit(f"{number} came where {expected} was expected")
        print(json.dumps(asdict(rx.statistics())), flush=True)
        # The last acknowledgement may be lost on the way: stay until the sender has it and has disconnected.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        if rx.unread:
            sys.exit(f"{rx.unread} messages too many")


async def send(address: str, count: int) -> None:
    async with await dial(address, bytes, settings=SETTINGS) as tx:
        for number in range(count):
            tx.post(NUMBER.pack(number))
            if number % 1_000 == 0:
                await tx.drain(most=20_000)
        await tx.drain()
        print(json.dumps(asdict(tx.statistics())), flush=True)


if __name__ == "__main__":
    run = receive if sys.argv[1] == "receive" else send
    uvloop.run(run(sys.argv[2], int(sys.argv[3])))
