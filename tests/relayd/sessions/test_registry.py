"""The open sockets of a process: one write for each at the end of a step, and waiting for a state."""

from __future__ import annotations

import asyncio

from relayd.sessions.registry import Registry


class Socket:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.flushed = 0
        self.swept: list[float] = []

    def flush(self) -> None:
        self.flushed += 1

    def check_deadlines(self, now: float) -> None:
        self.swept.append(now)

    def withdraw(self) -> None: ...

    def stop_reading(self) -> None: ...

    def close(self, code: int, reason: str) -> None: ...

    def abort(self) -> None: ...


async def test_each_socket_that_asked_is_written_to_once():
    registry, asking, silent = Registry(), Socket(), Socket()
    registry.wants_flush(asking)
    registry.flush()
    registry.flush()
    assert (asking.flushed, silent.flushed) == (1, 0)


async def test_what_a_flush_asks_for_is_flushed_in_the_same_step():
    registry, second = Registry(), Socket()

    class First(Socket):
        def flush(self) -> None:
            registry.wants_flush(second)

    registry.wants_flush(First())
    registry.flush()
    assert second.flushed == 1


async def test_a_sweep_reaches_the_sockets_it_is_given_and_writes():
    registry, socket = Registry(), Socket()
    registry.wants_flush(socket)
    registry.sweep([socket], 7.0)
    assert (socket.swept, socket.flushed) == ([7.0], 1)


async def test_settling_looks_again_whenever_a_socket_goes():
    registry, socket = Registry(), Socket()
    registry.add(socket)
    settling = asyncio.create_task(registry.settle(lambda: not registry, 10))
    await asyncio.sleep(0)
    assert not settling.done()
    registry.remove(socket)
    registry.remove(socket)
    assert await settling


async def test_settling_gives_up_in_time():
    registry = Registry()
    registry.add(Socket())
    assert not await registry.settle(lambda: not registry, 0)
