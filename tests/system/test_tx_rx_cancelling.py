"""Cancelling at every await (T-058, T-060): no message lost or duplicated, no task or socket leaked.

A coroutine is driven step by step, and its task cancelled at its first await, at its second, and so on until
it ends before it is cancelled. Each await is cancelled in two ways: while it waits, and in the same tick in
which its result has arrived.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import types
from collections.abc import AsyncIterator, Coroutine, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop
from strata.txrx import (
    DeliveryStatus,
    Rx,
    SendError,
    Tx,
    TxRxClosed,
    TxRxSettings,
    dial,
    serve,
)
from strata.txrx.serving import NetRx

from tests.support.tx_rx_proxy import TxRxProxy, listening, open_sockets
from tests.support.waiting import until

_names = iter(range(10**9))


@pytest.fixture(params=["asyncio", "uvloop"], autouse=True)
def event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "uvloop":
        monkeypatch.setattr(asyncio.get_event_loop_policy(), "_loop_factory", uvloop.new_event_loop)


@pytest.fixture(params=["waiting", "woken"])
def moment(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["tcp", "unix", "metatls"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, TxRxSettings]:
    """An address to serve, and the settings of both ends."""
    if request.param == "metatls":
        authority, leaf = trustme.CA(), tmp_path / "leaf.pem"
        authority.cert_pem.write_to_path(tmp_path / "authority.pem")
        authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(leaf)
        files = TxRxSettings(tls_certificate=leaf, tls_key=leaf, tls_authorities=tmp_path / "authority.pem")
        return "metatls:localhost:0", files
    return ("tcp:localhost:0" if request.param == "tcp" else f"unix:{tmp_path}/s"), TxRxSettings()


@pytest.fixture(autouse=True)
async def nothing_is_left_behind(event_loop_kind: None) -> AsyncIterator[None]:
    tasks, sockets = asyncio.all_tasks(), open_sockets()
    yield
    await until(lambda: asyncio.all_tasks() <= tasks | {asyncio.current_task()})
    await until(lambda: open_sockets() <= sockets)


@types.coroutine
def _stepped(coroutine: Coroutine[Any, Any, Any], step: int, moment: str) -> Generator[Any, Any, Any]:
    """Run a coroutine, and cancel its task at await number `step`."""
    task = asyncio.current_task()
    assert task is not None
    resume, argument = coroutine.send, None
    for number in itertools.count():
        try:
            awaited = resume(argument)
        except StopIteration as stop:
            return stop.value
        if number == step:
            if moment == "woken" and awaited is not None:
                awaited.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        try:
            argument = yield awaited
            resume = coroutine.send
        except BaseException as error:
            resume, argument = coroutine.throw, error


async def _as_coroutine(coroutine: Coroutine[Any, Any, Any], step: int, moment: str) -> Any:
    return await _stepped(coroutine, step, moment)


def cancelling(coroutine: Coroutine[Any, Any, Any], step: int, moment: str) -> asyncio.Task[Any]:
    """A task that is cancelled at that await, if it gets there."""
    return asyncio.create_task(_as_coroutine(coroutine, step, moment))


async def outcome(task: asyncio.Task[Any]) -> Any:
    """The result or exception of a task; `CancelledError` if it was cancelled."""
    async with asyncio.timeout(20):
        await asyncio.wait([task])
    return asyncio.CancelledError if task.cancelled() else task.exception() or task.result()


def is_blocked(rx: Rx[bytes], tx: Tx[bytes]) -> bool:
    """Whether one message fills the queue and two wait for it."""
    return rx.unread == 1 and tx.pending == 2


async def both_ends(where: tuple[str, TxRxSettings]) -> tuple[Rx[bytes], Tx[bytes]]:
    address, settings = where
    real, rx = await serve(address, bytes, settings=settings)
    return rx, await dial(real, bytes, settings=settings)


@pytest.mark.req("T-058")
async def test_cancelling_recv_loses_nothing(where: tuple[str, TxRxSettings], moment: str) -> None:
    rx, tx = await both_ends(where)
    cancelled = 0
    async with rx, tx:
        for number in range(20):
            task = cancelling(rx.recv(), 0, moment)
            await asyncio.sleep(0)
            await tx.send(b"%d" % number)
            assert await outcome(task) is asyncio.CancelledError
            cancelled += 1
            assert await rx.recv() == b"%d" % number
        assert rx.unread == 0 and cancelled == 20
        # With a message in the queue it need not wait.
        await tx.send(b"there")
        assert await outcome(cancelling(rx.recv(), 0, moment)) == b"there"


@pytest.mark.req("T-058")
async def test_who_is_woken_and_cancelled_leaves_the_message_to_another(
    where: tuple[str, TxRxSettings], moment: str
) -> None:
    rx, tx = await both_ends(where)
    async with rx, tx:
        first = cancelling(rx.recv(), 0, moment)
        await asyncio.sleep(0)
        second = asyncio.create_task(rx.recv())
        await asyncio.sleep(0)
        await tx.send(b"1")
        assert await outcome(first) is asyncio.CancelledError
        assert await outcome(second) == b"1"


@pytest.mark.req("T-060")
async def test_cancelling_send_ends_the_waiting_alone(where: tuple[str, TxRxSettings], moment: str) -> None:
    rx, tx = await both_ends(where)
    async with rx, tx:
        sent = 0
        for step in itertools.count():
            result = await outcome(cancelling(tx.send(b"%d" % sent), step, moment))
            sent += 1
            if result is not asyncio.CancelledError:
                break
        assert result is None and sent > 1
        await tx.drain()
        assert [await rx.recv() for _ in range(sent)] == [b"%d" % number for number in range(sent)]
        assert rx.unread == 0 and not tx.status().value.closed


async def test_cancelling_drain_ends_the_waiting_alone(where: tuple[str, TxRxSettings], moment: str) -> None:
    rx, tx = await both_ends(where)
    async with rx, tx:
        posted = 0
        for step in itertools.count():
            for _ in range(50):
                tx.post(b"%d" % posted)
                posted += 1
            result = await outcome(cancelling(tx.drain(), step, moment))
            if result is not asyncio.CancelledError:
                break
        assert result is None and step > 0 and tx.pending == 0
        assert [await rx.recv() for _ in range(posted)] == [b"%d" % number for number in range(posted)]


async def test_cancelling_close_closes_at_once_and_returns_what_is_pending(
    where: tuple[str, TxRxSettings], moment: str, tmp_path: Path
) -> None:
    address, settings = where
    for step in itertools.count():
        real, rx = await serve(address, bytes, settings=replace(settings, queue_capacity=1))
        tx = await dial(real, bytes, settings=settings)
        channels = [tx.try_post(b"%d" % number) for number in range(3)]
        await until(partial(is_blocked, rx, tx))
        task = cancelling(tx.close(), step, moment)
        await asyncio.sleep(0)
        if moment == "woken" or step > 0:
            assert [await rx.recv() for _ in range(3)] == [b"0", b"1", b"2"]
        result = await outcome(task)
        assert tx.status().value.closed and tx.pending == 0
        errors = [await channel for channel in channels]
        if result is asyncio.CancelledError and moment == "waiting":
            assert errors[0] is None, "what was acknowledged is not returned"
            assert [one.message for one in errors if one is not None] == [b"1", b"2"]
            assert {one.delivery for one in errors if one is not None} == {DeliveryStatus.UNKNOWN}
        else:
            assert errors == [None] * 3
        await rx.join()
        if result is not asyncio.CancelledError:
            assert result == []
            break
    assert step > 0


@pytest.mark.parametrize("steps", range(12))
async def test_closing_while_a_connection_is_made_leaves_nothing_behind(
    where: tuple[str, TxRxSettings], steps: int
) -> None:
    rx, tx = await both_ends(where)
    async with rx:
        channel = tx.try_post(b"1")
        for _ in range(steps):
            await asyncio.sleep(0)
        closing = asyncio.create_task(tx.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        error = await channel
        for _ in range(5):
            # asyncio of Python 3.11 loses the socket of a connection being accepted while it stops listening.
            await asyncio.sleep(0)
        # Delivered or returned, and never returned as undelivered when it has arrived.
        assert isinstance(rx, NetRx)
        await until(lambda: not rx._hub.connections)
        if error is None:
            assert await rx.recv() == b"1"
        elif error.delivery is DeliveryStatus.NOT_DELIVERED:
            assert rx.unread == 0


@pytest.mark.parametrize("steps", range(0, 30, 3))
async def test_closing_while_a_lost_connection_is_made_again_leaves_nothing_behind(steps: int) -> None:
    address, rx = await serve("tcp:127.0.0.1:0", bytes)
    async with rx, TxRxProxy(str(address)) as proxy:
        tx = await dial(proxy.address, bytes)
        await tx.send(b"1")
        proxy.refuses = True
        proxy.cut()
        channel = tx.try_post(b"2")
        for _ in range(steps):
            await asyncio.sleep(0)
        closing = asyncio.create_task(tx.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert isinstance(await channel, SendError)
        assert rx.unread == 1


async def test_dialling_has_nothing_to_cancel(where: tuple[str, TxRxSettings], moment: str) -> None:
    address, settings = where
    address = address.replace(":0", ":1")
    tx = await outcome(cancelling(dial(address, bytes, settings=settings), 0, moment))
    assert isinstance(tx, Tx)
    await tx.close()


async def test_cancelling_serve_serves_nothing(where: tuple[str, TxRxSettings], moment: str) -> None:
    address, settings = where
    if not address.startswith("unix"):
        # One port, so that leftovers of an attempt would obstruct the next.
        real, probe = listening("tcp:127.0.0.1:0")
        probe.close()
        address = f"{address.partition(':')[0]}:localhost:{real.rpartition(':')[2]}"
    for step in itertools.count():
        result = await outcome(cancelling(serve(address, bytes, settings=settings), step, moment))
        if result is not asyncio.CancelledError:
            break
        if address.startswith("unix"):
            assert not os.path.exists(address.removeprefix("unix:"))  # noqa: ASYNC240
        # Descriptors are reused: the event loop must not keep any that is closed.
        sockets = [listening(f"unix:@strata-test-{os.getpid()}-{next(_names)}")[1] for _ in range(4)]
        for one in sockets:
            asyncio.get_running_loop().add_reader(one, int)
            asyncio.get_running_loop().remove_reader(one)
            one.close()
    real_address, rx = result
    async with rx, await dial(real_address, bytes, settings=settings) as tx:
        await tx.send(b"1")
        assert await rx.recv() == b"1"


async def test_cancelling_join_has_closed_all_the_same(where: tuple[str, TxRxSettings], moment: str) -> None:
    for step in itertools.count():
        rx, tx = await both_ends(where)
        await tx.send(b"1")
        result = await outcome(cancelling(rx.join(), step, moment))
        async with asyncio.timeout(10):
            await tx.status().wait_for(lambda status: status.closed)
        assert await rx.recv() == b"1"
        with pytest.raises(TxRxClosed):
            await rx.recv()
        assert await tx.close() == []
        if result is not asyncio.CancelledError:
            assert result is None
            break


async def test_cancelling_who_watches_the_status_changes_nothing(
    where: tuple[str, TxRxSettings], moment: str
) -> None:
    rx, tx = await both_ends(where)
    await tx.send(b"1")
    first = cancelling(tx.status().changed(), 0, moment)
    second = asyncio.create_task(tx.status().changed())
    await asyncio.sleep(0)
    await rx.join()
    assert await outcome(first) is asyncio.CancelledError
    assert (await outcome(second)).closed
    await tx.close()


async def test_cancelling_who_awaits_a_return_channel_changes_nothing(
    where: tuple[str, TxRxSettings], moment: str
) -> None:
    rx, tx = await both_ends(where)

    async def wait() -> Any:
        return await channel

    async with rx, tx:
        channel = tx.try_post(b"1")
        first, second = cancelling(wait(), 0, moment), asyncio.create_task(wait())
        assert await outcome(first) is asyncio.CancelledError
        assert await outcome(second) is None
        assert await rx.recv() == b"1"
