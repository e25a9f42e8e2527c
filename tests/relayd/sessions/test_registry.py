"""The open sockets of a process: one write for each at the end of a step, and waiting for a state."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from relayd.access.memory import Pressure
from relayd.sessions.registry import Registry
from relayd.slices import Slices
from tests.relayd.sessions.connection_rig import eventually


class Socket:
    """Records the calls made on it."""

    def __init__(self, account: str = "a", held_bytes: int = 0) -> None:
        self.account = account
        self.held_bytes = held_bytes
        self.refused = False
        self.closed: list[int] = []
        self.flushed = 0
        self.swept: list[float] = []

    def flush(self) -> None:
        self.flushed += 1

    def check_deadlines(self, now: float) -> None:
        self.swept.append(now)

    def withdraw(self) -> None: ...

    def stop_reading(self) -> None: ...

    def close(self, code: int, reason: str, cause: str | None = None) -> None:
        self.closed.append(code)

    def dismiss(self, code: int, reason: str, cause: str) -> None:
        self.closed.append(code)

    def described(self, process: str) -> None: ...

    def expel(self) -> None: ...

    def refuse_publishes(self, refuse: bool) -> None:
        self.refused = refuse

    def abort(self) -> None: ...


def quick_registry() -> Registry:
    """A registry whose turns never end, for tests that give the loop none."""
    return Registry(slices=Slices(seconds=math.inf))


async def test_each_socket_that_asked_is_written_to_once():
    registry, asking, silent = quick_registry(), Socket(), Socket()
    registry.wants_flush(asking)
    registry.flush()
    registry.flush()
    assert (asking.flushed, silent.flushed) == (1, 0)


async def test_what_a_flush_asks_for_is_flushed_in_the_same_step():
    registry, second = quick_registry(), Socket()

    class First(Socket):
        def flush(self) -> None:
            registry.wants_flush(second)

    registry.wants_flush(First())
    registry.flush()
    assert second.flushed == 1


async def test_a_crowd_is_written_to_over_several_turns_and_each_once(monkeypatch):
    monkeypatch.setattr("relayd.sessions.registry.SLICE_SECONDS", 0.0)
    registry, sockets = quick_registry(), [Socket() for _ in range(100)]
    for socket in sockets:
        registry.wants_flush(socket)
    for _ in range(3):  # steps that end in the same turn add nothing to it
        registry.flush()
    assert [socket.flushed for socket in sockets] == [1] * 32 + [0] * 68
    late = Socket()
    registry.wants_flush(late)
    await eventually(lambda: late.flushed == 1)
    assert {socket.flushed for socket in sockets} == {1}
    again = Socket()
    registry.wants_flush(again)
    registry.flush()
    assert again.flushed == 1, "a step is written at its end again"


async def test_one_that_cannot_be_written_to_is_dropped_and_the_others_get_theirs():
    registry, other, dropped = quick_registry(), Socket(), []

    class Broken(Socket):
        def flush(self) -> None:
            raise RuntimeError("no")

        def abort(self) -> None:
            dropped.append(self)

    broken = Broken()
    for socket in (broken, other):
        registry.wants_flush(socket)
    registry.flush()
    assert dropped == [broken] and other.flushed == 1


async def test_a_socket_that_fails_is_dropped_and_the_others_have_their_turn():
    registry, others, dropped = quick_registry(), [Socket(), Socket()], []

    class Broken(Socket):
        def check_deadlines(self, now: float) -> None:
            raise RuntimeError("no")

        def abort(self) -> None:
            dropped.append(self)

    broken = Broken()
    registry.wants_flush(others[1])
    registry.sweep([others[0], broken, others[1]], 7.0)
    assert dropped == [broken] and [socket.swept for socket in others] == [[7.0], [7.0]]
    assert others[1].flushed == 1


class Stubborn(Socket):
    """Fails at everything, including being dropped."""

    def _fail(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")

    flush = check_deadlines = dismiss = refuse_publishes = abort = _fail


@pytest.mark.parametrize("is_late", [False, True])
async def test_one_that_cannot_even_be_dropped_keeps_nobody_from_being_written_to(monkeypatch, is_late):
    registry, others = quick_registry(), [Socket() for _ in range(64)]
    monkeypatch.setattr("relayd.sessions.registry.SLICE_SECONDS", 0.0)
    for socket in (*others, Stubborn(), others[0]) if is_late else (Stubborn(), *others):
        registry.wants_flush(socket)
    registry.flush()
    await eventually(lambda: all(socket.flushed for socket in others))
    again = Socket()
    registry.wants_flush(again)
    registry.flush()
    await eventually(lambda: again.flushed == 1)


async def test_one_that_cannot_even_be_dropped_keeps_nobody_from_their_turn():
    registry, others, ended = quick_registry(), [Socket("other", 2**20), Socket("other", 2**20)], []
    sockets = [others[0], Stubborn("other", 2**21), others[1]]
    for socket in sockets:
        registry.add(socket)
    registry.each(sockets, lambda socket: socket.check_deadlines(7.0), lambda: ended.append(True))
    assert [socket.swept for socket in others] == [[7.0], [7.0]] and ended
    registry.relieve(Pressure.FULL)
    assert all(socket.refused and socket.closed for socket in others)
    registry.relieve(Pressure.FINE)
    assert not any(socket.refused for socket in others), "memory is weighed again"
    registry.abort_all()


async def test_settling_looks_again_when_a_step_ends():
    registry, is_done = quick_registry(), False
    settling = asyncio.create_task(registry.settle(lambda: is_done, 10))
    await asyncio.sleep(0)
    is_done = True
    registry.flush()
    assert await settling


async def test_what_is_done_to_all_sockets_is_done_to_each():
    registry, done = quick_registry(), []

    class Told(Socket):
        def withdraw(self) -> None:
            done.append("withdraw")

        def stop_reading(self) -> None:
            done.append("stop reading")

    socket = Told()
    registry.add(socket)
    registry.withdraw()
    registry.stop_reading()
    registry.review()
    assert done == ["withdraw", "stop reading"] and len(socket.swept) == 1


async def test_memory_is_weighed_once_at_a_time_and_by_the_pressure_of_the_end():
    registry = Registry(slices=Slices(seconds=0.0))
    sockets = [Socket("crowd", 2**20) for _ in range(6)]
    for socket in sockets:
        registry.add(socket)
    registry.unseen_bytes = 7
    registry.relieve(Pressure.FULL)
    assert registry.unseen_bytes == 0
    registry.relieve(Pressure.TIGHT)  # the pressure has fallen meanwhile: nobody is closed
    await eventually(lambda: sockets[0].refused)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(socket.closed for socket in sockets)


async def test_a_sweep_reaches_the_sockets_it_is_given_and_writes():
    registry, socket = quick_registry(), Socket()
    registry.wants_flush(socket)
    registry.sweep([socket], 7.0)
    assert (socket.swept, socket.flushed) == ([7.0], 1)


async def test_settling_looks_again_whenever_a_socket_goes():
    registry, socket = quick_registry(), Socket()
    registry.add(socket)
    settling = asyncio.create_task(registry.settle(lambda: not registry, 10))
    await asyncio.sleep(0)
    assert not settling.done()
    registry.remove(socket)
    registry.remove(socket)
    assert await settling


async def test_settling_gives_up_in_time():
    registry = quick_registry()
    registry.add(Socket())
    assert not await registry.settle(lambda: not registry, 0)


@pytest.mark.req("R-321")
async def test_when_memory_is_short_the_dearest_pay_for_it():
    registry = quick_registry()
    mib = 2**20
    crowd = [Socket("crowd", mib) for _ in range(20)]
    honest, idle = Socket("honest", mib // 8), Socket("idle")
    largest = Socket("crowd", 2 * mib)
    everybody = [*crowd, honest, idle, largest]
    for socket in everybody:
        registry.add(socket)
    registry.relieve(Pressure.TIGHT)
    assert [socket.refused for socket in everybody] == [True] * 20 + [False, False, True]
    assert not any(socket.closed for socket in everybody)
    registry.relieve(Pressure.SHORT)
    assert [socket for socket in everybody if socket.closed] == [largest]
    registry.remove(largest)
    registry.relieve(Pressure.FULL)
    assert sum(bool(socket.closed) for socket in crowd) == 16
    assert not honest.closed and not idle.closed
    registry.relieve(Pressure.FINE)
    assert not any(socket.refused for socket in registry.sockets if isinstance(socket, Socket))
    assert registry.pressure is Pressure.FINE


@pytest.mark.req("R-321")
async def test_nobody_is_closed_who_holds_little():
    """If the peers are not what fills the memory, closing them would free nothing."""
    registry = quick_registry()
    sockets = [Socket(f"account {n}", 1000) for n in range(50)]
    for socket in sockets:
        registry.add(socket)
    registry.relieve(Pressure.FULL)
    assert not any(socket.closed or socket.refused for socket in sockets)


@pytest.mark.req("R-321")
async def test_a_crowd_of_one_account_that_holds_little_each_may_not_publish_and_stays():
    registry = quick_registry()
    sockets = [Socket("crowd", 2000) for _ in range(200)]
    for socket in sockets:
        registry.add(socket)
    registry.relieve(Pressure.FULL)
    assert all(socket.refused for socket in sockets) and not any(socket.closed for socket in sockets)


@pytest.mark.req("R-321")
async def test_what_is_done_to_many_sockets_takes_many_turns_of_the_loop():
    registry = Registry(slices=Slices(seconds=0.0))  # one socket in each turn
    sockets = [Socket(f"account {n}", 2**20) for n in range(40)]
    for socket in sockets:
        registry.add(socket)
    registry.sweep(sockets, 7.0)
    registry.relieve(Pressure.FULL)
    registry.close_all(1001, "going")
    assert sum(len(socket.swept) + len(socket.closed) for socket in sockets) < 5
    turns = 0
    async with asyncio.timeout(10):
        while (
            not all(1001 in socket.closed and socket.swept for socket in sockets)
            or sum(1013 in socket.closed for socket in sockets) < 16
        ):
            await asyncio.sleep(0)
            turns += 1
    assert turns >= 2 * len(sockets)


async def test_who_has_gone_while_all_were_weighed_is_not_closed():
    registry = Registry(slices=Slices(seconds=0.0))
    sockets = [Socket(f"account {n}", 2**20) for n in range(4)]
    for socket in sockets:
        registry.add(socket)
    registry.relieve(Pressure.FULL)
    registry.remove(sockets[0])
    await eventually(lambda: sum(bool(socket.closed) for socket in sockets) == 2)
    assert not sockets[0].closed
