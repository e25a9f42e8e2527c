"""How a sender connects: attempts that coincide with their own timeout, and hosts that no system looks up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop
from strata.txrx import TcpAddress, TxRxIOError, TxRxSettings, dial, dialing, serve


@pytest.mark.req("T-062")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_is_made_as_its_time_is_over_is_the_only_one(
    new_loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, slow = dialing._Connection.__init__, [0.2]

    def make_slowly(connection: Any, owner: Any) -> None:
        make(connection, owner)
        if slow:  # the program blocks the loop just when the system has connected
            time.sleep(slow.pop())

    monkeypatch.setattr(dialing._Connection, "__init__", make_slowly)

    async def exchange() -> list[Any]:
        faults: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        settings = TxRxSettings(connect_timeout=0.1, backoff_base=0.01)
        address, rx = await serve(f"unix:{tmp_path}/here", bytes, settings=settings)
        async with rx, await dial(address, bytes, settings=settings) as tx:
            await tx.send(b"one")
            await asyncio.sleep(0.3)
            await tx.send(b"two")
            assert [await rx.recv(), await rx.recv()] == [b"one", b"two"]
            assert len(rx._hub.connections) == 1  # type: ignore[attr-defined]
        return faults

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(exchange()) == []


@pytest.mark.req("T-062", "T-088")
@pytest.mark.parametrize("host", ["a" * 64, "a..org", "\u00e4" * 64])
async def test_a_host_that_no_system_looks_up_is_named_as_the_reason(host: str) -> None:
    address = TcpAddress(host, 1)  # as text it is refused at once
    with pytest.raises(TxRxIOError, match="cannot be served"):
        await serve(address, bytes)
    settings = TxRxSettings(message_delivery_timeout=0.5, session_timeout=1.0)
    async with await dial(address, bytes, settings=settings) as tx:
        error = await tx.try_post(b"message")
        assert error is not None and "last attempt to connect" in error.reason
