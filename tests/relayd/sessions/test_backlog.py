"""Pages on their way from the store to the socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from relayd.lineage import Mark
from relayd.sessions import backlog
from relayd.store.types import Declined, LogPage, LogQuery, StoredPacket, StoreTimeout
from tests.relayd.sessions.connection_rig import NOW, Rig, eventually, frame


class Log:
    """A log of `count` packets, returned in pages; the third of every ten is long."""

    def __init__(self, rig: Rig, count: int) -> None:
        self.asked: list[int] = []
        self.limits: list[int] = []
        self.slow = 0
        """The number of reads that take too long."""
        self.given = 0
        self._bodies = [
            b'{"n":%d,"x":"%b"}' % (n, b"x" * (70_000 if n % 10 == 3 else 50)) for n in range(1, count + 1)
        ]
        self.witnesses: list[Mark] = []
        store = cast(Any, rig.relay.store)
        store.page, store.head = self.page, self.head
        store.good_to, store.bear_witness = self.good_to, self.bear_witness
        rig.relay.fanout.skip_to(count)

    async def head(self, *_: object) -> int:
        return len(self._bodies)

    async def good_to(self, mark: Mark, *_: object) -> int | None:
        return len(self._bodies)

    async def bear_witness(self, mark: Mark) -> None:
        self.witnesses.append(mark)

    async def page(self, query: LogQuery, limit: int, *_: object, **__: object) -> LogPage:
        if self.slow:
            self.slow -= 1
            raise StoreTimeout("slow")
        self.asked.append(query.after)
        self.limits.append(limit)
        assert query.up_to is not None
        last = min(query.up_to, query.after + limit)
        rows = [StoredPacket(n, NOW, self._bodies[n - 1]) for n in range(query.after + 1, last + 1)]
        self.given += len(rows)
        return LogPage(rows, exhausted=len(rows) < limit)


async def read_all(rig: Rig, count: int) -> tuple[list[int], int]:
    """The packets that came, and the number of turns of the loop that it took."""
    numbers: list[int] = []
    turns = 0
    async with asyncio.timeout(30):
        while len(numbers) < count:
            got = [message for message in messages(rig) if message["type"] == "EVENT"]
            turns += bool(got)
            numbers += [message["packet"]["n"] for message in got]
            await asyncio.sleep(0)
    return numbers, turns


def messages(rig: Rig) -> list[dict[str, Any]]:
    """What was written, in frames of any length."""
    data, found, at = bytes(rig.transport.written), [], 0
    rig.transport.written.clear()
    while at < len(data):
        length, start = data[at + 1], at + 2
        if length >= 126:
            size = 2 if length == 126 else 8
            length, start = int.from_bytes(data[start : start + size], "big"), start + size
        found.append(json.loads(data[start : start + length]))
        at = start + length
    return found


SUBSCRIBE = '{"type":"SUBSCRIBE","subscription_id":"s","gapless":true}'


@pytest.mark.req("R-167")
async def test_a_page_is_queued_in_pieces_and_nothing_is_lost_or_repeated(rigs, monkeypatch):
    monkeypatch.setattr(backlog, "_PIECE_SECONDS", 0.0)
    rig = rigs()
    log = Log(rig, 730)
    rig.relay.slices.seconds = 0.0  # a turn of the loop has time for one action
    rig.socket.data_received(frame(SUBSCRIBE))
    numbers, turns = await read_all(rig, 730)
    assert numbers == list(range(1, 731))
    assert len(log.asked) < 10 < turns, "several turns for a page"
    await eventually(lambda: len(rig.relay.fanout) == 1)
    assert rig.connection._backlog.held_bytes == 0


@pytest.mark.req("R-323")
async def test_what_is_left_of_a_page_is_read_anew_where_more_is_declined(rigs, monkeypatch):
    monkeypatch.setattr(backlog, "_PIECE_SECONDS", 0.0)
    rig = rigs()
    log = Log(rig, 400)
    rig.relay.slices.seconds = 0.0
    rig.socket.data_received(frame(SUBSCRIBE))
    first = await read_all(rig, 1)
    rig.relay.fanout.declined = Declined(types=frozenset({"X"}))
    rest = await read_all(rig, 400 - len(first[0]))
    assert first[0] + rest[0] == list(range(1, 401))
    assert log.asked[:2] == [0, len(first[0])], "from where it stood"
    assert log.given == 400 + 400 - len(first[0])


async def test_a_page_whose_subscription_ends_on_the_way_goes_no_further(rigs, monkeypatch):
    monkeypatch.setattr(backlog, "_PIECE_SECONDS", 0.0)
    rig = rigs()
    log = Log(rig, 400)
    rig.relay.slices.seconds = 0.0
    rig.socket.data_received(frame(SUBSCRIBE))
    got = (await read_all(rig, 1))[0]
    rig.socket.data_received(frame('{"type":"SUBSCRIBE","subscription_id":"t","gapless":true}'))
    rig.socket.data_received(frame('{"type":"UNSUBSCRIBE","subscription_id":"s"}'))
    names: dict[str, list[int]] = {"s": got, "t": []}
    async with asyncio.timeout(30):
        while len(names["t"]) < 400:
            for message in messages(rig):
                names[message["subscription_id"]].append(message["packet"]["n"])
            await asyncio.sleep(0)
    assert names["t"] == list(range(1, 401))
    assert names["s"] == list(range(1, len(names["s"]) + 1)) and len(names["s"]) < 400
    assert len(log.asked) < 6 and rig.connection._backlog.held_bytes == 0


@pytest.mark.req("R-165")
async def test_types_that_the_log_does_not_hold_are_searched_for_nowhere(rigs):
    rig = rigs()
    log = Log(rig, 30)

    async def types(start: bytes, most: int) -> list[bytes]:
        return [b"POST"]

    cast(Any, rig.relay.store).types = types
    rig.relay.types.open()
    await rig.relay.types._learning
    rig.relay.slices.seconds = 0.0
    for number, names in enumerate((["A", "B"], ["A", "POST"])):
        filters = json.dumps({"types": names, "limit": 50})
        text = (
            f'{{"type":"SUBSCRIBE","subscription_id":"{number}","history_marker":true,"filters":{filters}}}'
        )
        rig.socket.data_received(frame(text))
        said: list[dict[str, Any]] = []
        async with asyncio.timeout(30):
            while not any(message["type"] == "END_OF_HISTORY" for message in said):
                said += messages(rig)
                await asyncio.sleep(0)
        assert said[-1]["complete"] is True and said[-1]["cursor"]
        assert (len(log.asked), len(said)) == ((0, 1) if number == 0 else (1, 31))
    await eventually(lambda: len(rig.relay.fanout) == 2)


@pytest.mark.req("R-136")
async def test_a_history_that_takes_too_long_is_answered_by_the_name_of_its_request(rigs):
    rig = rigs()
    Log(rig, 30)

    async def page(*_: object, **__: object) -> LogPage:
        raise StoreTimeout("slow")

    cast(Any, rig.relay.store).page = page
    text = '{"type":"SUBSCRIBE","subscription_id":"s","client_msg_id":"m"}'
    rig.socket.data_received(frame(text))
    said: list[dict[str, Any]] = []
    async with asyncio.timeout(30):
        while not said:
            said = messages(rig)
            await asyncio.sleep(0)
    (error,) = said
    assert (error["code"], error["detail"]) == ("internal_error", "read_timeout")
    assert (error["subscription_id"], error["client_msg_id"]) == ("s", "m")


async def test_each_subscription_whose_reads_take_too_long_is_tried_twice_whatever_others_read(rigs):
    rig = rigs()
    log, tries = Log(rig, 3000), dict.fromkeys("ab", 0)

    async def page(query: LogQuery, limit: int, *more: object, **others: object) -> LogPage:
        if not query.types:
            return await log.page(query, limit)
        tries[next(iter(query.types))] += 1
        raise StoreTimeout("slow")

    cast(Any, rig.relay.store).page = page
    for name in "abc":
        types = [] if name == "c" else [name]
        asked = {"type": "SUBSCRIBE", "subscription_id": name, "gapless": True, "filters": {"types": types}}
        rig.socket.data_received(frame(json.dumps(asked)))
    said: list[dict[str, Any]] = []
    async with asyncio.timeout(30):
        while len(said) < 3002:
            said += messages(rig)
            await asyncio.sleep(0)
    assert tries == {"a": 2, "b": 2}
    ended = [n for n, message in enumerate(said) if message.get("detail") == "read_timeout"]
    assert len(ended) == 2 and max(ended) < 200, "the others were not waited for"


@pytest.mark.req("R-162")
async def test_a_read_that_takes_too_long_says_nothing_of_the_subscription_that_took_its_place(rigs):
    rig = rigs()
    log, tries, late = Log(rig, 30), 0, asyncio.Event()

    async def page(query: LogQuery, limit: int, *more: object, **others: object) -> LogPage:
        nonlocal tries
        if not query.types:
            return await log.page(query, limit)
        tries += 1
        if tries == 2:
            await late.wait()
        raise StoreTimeout("slow")

    cast(Any, rig.relay.store).page = page
    rig.socket.data_received(frame(SUBSCRIBE[:-1] + ',"filters":{"types":["rare"]}}'))
    await eventually(lambda: tries == 2)
    rig.socket.data_received(frame('{"type":"SUBSCRIBE","subscription_id":"t","gapless":true}'))
    rig.socket.data_received(frame(SUBSCRIBE))
    late.set()
    await eventually(lambda: len(rig.relay.fanout) == 2)
    said = messages(rig)
    assert len(said) == 60 and {message["type"] for message in said} == {"EVENT"}
    assert rig.relay.metrics.subscriptions._value.get() == 2


async def test_a_read_that_takes_too_long_is_tried_with_a_small_page_and_pages_grow_again(rigs):
    rig = rigs()
    log = Log(rig, 730)
    log.slow = 1
    rig.socket.data_received(frame(SUBSCRIBE))
    numbers, _ = await read_all(rig, 730)
    assert numbers == list(range(1, 731))
    assert log.limits[0] == 20 and log.limits[-1] > 300


@pytest.mark.req("R-170")
async def test_nothing_is_read_for_who_takes_nothing(rigs):
    rig = rigs()
    log = Log(rig, 30)
    rig.socket.pause_writing()
    rig.socket.data_received(frame(SUBSCRIBE))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not log.asked
    rig.socket.resume_writing()
    assert (await read_all(rig, 30))[0] == list(range(1, 31))


@pytest.mark.req("R-317")
async def test_history_is_paid_for_in_bytes(rigs):
    rig = rigs(anonymous_backfill_limit_bytes=2000)
    Log(rig, 30)
    rig.socket.data_received(frame(SUBSCRIBE))
    await read_all(rig, 30)
    rig.socket.data_received(frame('{"type":"SUBSCRIBE","subscription_id":"t"}'))
    (refused,) = messages(rig)
    assert (refused["detail"], refused["subscription_id"]) == ("backfill_limit", "t")


async def test_subscriptions_of_a_connection_take_turns_page_by_page(rigs):
    rig = rigs()
    log = Log(rig, 600)
    for name in "st":
        rig.socket.data_received(frame(f'{{"type":"SUBSCRIBE","subscription_id":"{name}","gapless":true}}'))
    await read_all(rig, 1200)
    assert log.asked == [0, 0, 500, 500]


@pytest.mark.req("R-157")
async def test_a_cursor_at_the_end_of_the_log_is_good_and_one_beyond_it_is_told_where_to_go_on(rigs):
    rig = rigs()
    log = Log(rig, 30)
    for place, name in ((30, "here"), (31, "lost")):
        cursor = rig.relay.cursors.encode(place)
        members = {"subscription_id": name, "client_msg_id": "m", "history_marker": True}
        rig.socket.data_received(
            frame(json.dumps({"type": "SUBSCRIBE", "filters": {"cursor": cursor}, **members}))
        )
    said: list[dict[str, Any]] = []
    async with asyncio.timeout(30):
        while len(said) < 2:
            said += messages(rig)
            await asyncio.sleep(0)
    told = {each["subscription_id"]: each for each in said}
    assert told["here"]["type"] == "END_OF_HISTORY"
    lost = told["lost"]
    assert (lost["code"], lost["detail"], lost["client_msg_id"]) == ("invalid_cursor", "log_reset", "m")
    assert rig.relay.cursors.open(lost["cursor"], ascending=True).sequence == 30
    assert [mark.sequence for mark in log.witnesses] == [31]


@pytest.mark.req("R-176")
async def test_history_goes_as_far_as_the_log_does_and_not_only_the_feed(rigs):
    """Another process may have acknowledged packets that the feed has not passed yet."""
    rig = rigs()
    log, fanout = Log(rig, 30), rig.relay.fanout
    log._bodies += [b'{"n":31}']

    async def reach(sequence: int) -> None:
        fanout.skip_to(sequence)

    cast(Any, rig.relay.tail).reach = reach
    rig.socket.data_received(frame('{"type":"SUBSCRIBE","subscription_id":"s","history_marker":true}'))
    said: list[dict[str, Any]] = []
    async with asyncio.timeout(30):
        while not said or said[-1]["type"] == "EVENT":
            said += messages(rig)
            await asyncio.sleep(0)
    assert [each["packet"]["n"] for each in said[:-1]] == list(range(1, 32))
