"""Reading a store that only goes from newest to oldest, in either order, and the places to continue from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from strata.channels.messaging import reading
from strata.channels.messaging.reading import Place, read_pages, read_position, write_position
from strata.channels.messaging.values import NodeMessageReceived, ReceivedEnvelope

TOPIC = "/chat/1/room/proto"
PAGE = 100


class OldNode:
    """An older kind of node: it reads from newest to oldest, with dates in whole seconds."""

    def __init__(self, dates: Sequence[int | None], size: int = 1) -> None:
        self.log = [
            NodeMessageReceived(
                number.to_bytes(4),
                ReceivedEnvelope(content_topic=TOPIC, payload=number.to_bytes(4) * size, timestamp=date),
            )
            for number, date in enumerate(dates)
        ]
        self.walks: list[int] = []

    async def history(
        self, topic: str, *, since_ms: int
    ) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
        self.walks.append(since_ms)
        found = [
            event
            for event in self.log  # each came late within its second
            if event.message.timestamp is None or 1000 * event.message.timestamp + 900 >= since_ms
        ]
        for end in range(len(found), 0, -PAGE):
            yield found[max(0, end - PAGE) : end][::-1]
            yield []


async def numbers(
    node: Any, *, since_ms: int = 0, order: Any = "asc", until_ms: int | None = None
) -> list[int]:
    found: list[int] = []
    async for page in read_pages(node, TOPIC, order=order, since_ms=since_ms, until_ms=until_ms):
        assert page.position is None
        found += [int.from_bytes(event.message_hash) for event in page.messages]
    return found


async def test_what_is_read_from_new_to_old_is_given_from_old_to_new_in_bounded_memory() -> None:
    node = OldNode([number // 7 for number in range(5_000)])
    found = await numbers(node)
    assert found[:2_000] == list(range(2_000))
    assert list(dict.fromkeys(found)) == list(range(5_000))
    assert len(node.walks) == 3 and len(found) < 5_050


async def test_large_messages_are_kept_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_SPOOLED_BYTES", 100_000)
    node = OldNode(range(1_000), size=100)
    assert list(dict.fromkeys(await numbers(node))) == list(range(1_000))
    assert len(node.walks) > 3


@pytest.mark.parametrize("since_ms", [0, 5_000, 5_500])
async def test_a_second_in_which_more_was_said_than_is_kept_is_not_the_end(since_ms: int) -> None:
    before, crowd, after = [1, 4], [5] * 3_000, [6, 7, 9]
    node = OldNode([*before, *crowd, *after])
    found = await numbers(node, since_ms=since_ms)
    assert found[-3:] == [3_002, 3_003, 3_004]
    assert len(node.walks) < 6


async def test_messages_without_a_date_are_read_once() -> None:
    node = OldNode([None] * 3_000)
    assert await numbers(node) == list(range(2_000))
    assert len(node.walks) == 1


async def test_from_new_to_old_what_is_later_than_wanted_is_left_out() -> None:
    node = OldNode(range(300))
    assert await numbers(node, order="desc") == list(range(300))[::-1]
    assert await numbers(node) == list(range(300))
    assert await numbers(node, order="desc", until_ms=9_999) == list(range(10))[::-1]


def test_a_position_is_the_place_at_each_relay_that_gives_cursors() -> None:
    places = {"wss://a": Place("17", 5), "wss://b": Place(None, 6), "wss://c": Place("x", 7)}
    text = write_position(places)
    assert read_position(text) == {"wss://a": Place("17", 5), "wss://c": Place("x", 7)}
    assert write_position({}) is None and write_position({"wss://b": Place(None, 6)}) is None


def test_a_position_has_a_bound_and_one_of_another_kind_of_node_says_nothing() -> None:
    many = {f"wss://relay-{number}.example": Place(f"{number}", number) for number in range(1_000)}
    assert len(read_position(write_position(many))) == 256
    assert write_position({"wss://a": Place("x" * 70_000, 5)}) is None
    for text in (None, "", "17", "[]", '{"wss://a":["17"]}', '{"wss://a":[17,5]}'):
        assert read_position(text) == {}
