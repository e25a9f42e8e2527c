"""Packets already in the log are answered as repeats, and packets that are not there are no repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from strata.protocol.packets import Packet

from relayd.admission import repeats as module
from relayd.admission.repeats import Repeat, Repeats
from relayd.admission.request import PublishRequest
from relayd.faults import FaultLog
from relayd.slices import Slices
from relayd.store.types import StoreUnavailable
from tests.relayd.admission.admission_rig import Peer, made


def packet(number: int) -> Packet:
    return Packet.parse(made(number))


class Index:
    """A duplicate index that gives everybody the same answer, or fails."""

    def __init__(self, *ids: bytes, error: Exception | None = None) -> None:
        self.ids, self.error = ids, error

    async def find(self, ids: Sequence[bytes], *_: object) -> dict[bytes, tuple[int, int]]:
        if self.error is not None:
            raise self.error
        return {each: (1, 1000) for each in self.ids}

    async def findings(self, ids: Sequence[bytes], *_: object) -> dict[bytes, bytes]:
        return {}


async def told(
    index: Index, packets: Sequence[Packet], appended_at: int | None = None
) -> tuple[list[Repeat | None], list[str]]:
    """The answers for these packets, and the faults caught meanwhile."""
    answers: list[Repeat | None] = []
    faults: list[str] = []
    flushed = asyncio.Event()

    def lost(request: PublishRequest, error: BaseException) -> None:
        raise error

    looking = Repeats(
        index,
        told=lambda request, repeat: answers.append(repeat),
        lost=lost,
        on_flush=flushed.set,
        faults=FaultLog(faults.append),
        slices=Slices(),
    )
    for each in packets:
        request = PublishRequest(each.canonical, None, Peer().lane, 0.0)
        request.parsed(each)
        looking.look_up(request, appended_at)
    async with asyncio.timeout(60):
        while len(answers) < len(packets):
            await flushed.wait()
            flushed.clear()
    await looking.close()
    return answers, faults


async def test_the_index_decides():
    stored, fresh = packet(1), packet(2)
    assert await told(Index(stored.digest), [stored, fresh]) == ([Repeat(1000, None), None], [])


@pytest.mark.parametrize("error, faults", [(StoreUnavailable("down"), []), (ValueError("ours"), ["publish"])])
async def test_nobody_waits_for_an_index_that_says_nothing(error, faults):
    assert await told(Index(error=error), [packet(1)]) == ([None], faults)


async def test_many_who_asked_while_the_index_was_away_are_told_a_few_at_a_time():
    turn, turns = 0, []
    looking = Repeats(
        Index(error=StoreUnavailable("down")),
        told=lambda request, repeat: turns.append(turn),
        lost=lambda request, error: None,
        on_flush=lambda: None,
        faults=FaultLog(),
        slices=Slices(seconds=0.0),  # a turn of the loop has time for one of them
    )
    for number in range(20):
        request = PublishRequest(b"", None, Peer().lane, 0.0)
        request.parsed(packet(number))
        looking.look_up(request)
    for turn in range(100):  # noqa: B007 - for `told`
        await asyncio.sleep(0)
    assert len(turns) == 20 and max(map(turns.count, turns)) <= 2


async def test_what_an_append_has_said_holds_where_the_index_says_nothing():
    answers, _ = await told(Index(error=StoreUnavailable("down")), [packet(1)], appended_at=900)
    assert answers == [Repeat(900, None)]


async def test_of_the_ids_that_were_seen_the_last_are_remembered(monkeypatch):
    monkeypatch.setattr(module, "_RECENT_IDS", 2)
    seen = Repeats(
        Index(),
        told=lambda request, repeat: None,
        lost=lambda request, error: None,
        on_flush=lambda: None,
        faults=FaultLog(),
        slices=Slices(),
    )
    for digest in (b"1", b"2", b"3"):
        seen.remember(digest)
    assert [seen.remembers(digest) for digest in (b"1", b"2", b"3")] == [False, True, True]
    seen.forget(b"3")
    assert not seen.remembers(b"3")
