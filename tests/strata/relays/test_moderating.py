"""How a moderator handles pages that lead nowhere; the rest is in tests/system/test_moderation.py."""

from __future__ import annotations

import pytest
from strata.protocol import wire
from strata.protocol.errors import ConnectionFailed
from strata.relays.moderating import Moderator

from tests.support.made_packets import new_identity


class Paged(Moderator):
    """A session whose relay answers each place with this many entries and the next place."""

    def __init__(self, pages: dict[str | None, tuple[int, str | None]]) -> None:
        super().__init__("ws://relay.example/strata", new_identity())
        self.pages = pages
        self.asked = 0

    async def _rule(self, message: wire.Moderate) -> wire.Moderated:
        self.asked += 1
        entries, following = self.pages[message.after]
        return wire.Moderated(action="log", entries=[{"number": 1}] * entries, next=following)


async def test_pages_are_read_to_their_end():
    session = Paged({None: (2, "a"), "a": (2, "b"), "b": (1, "c"), "c": (0, None)})
    assert len([entry async for entry in session.log()]) == 5


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 17])
async def test_a_circle_of_pages_is_told(before: int, length: int):
    names = [str(number) for number in range(before + length)]
    following = dict(zip([None, *names], [*names, names[before]], strict=True))
    session = Paged({place: (1, after) for place, after in following.items()})
    with pytest.raises(ConnectionFailed, match="in a circle"):
        async for _ in session.log():
            assert session.asked < 100
    assert session.asked <= 3 * (before + length) + 3


async def test_a_page_of_nothing_that_names_another_is_told():
    session = Paged({None: (1, "a"), "a": (0, "b")})
    with pytest.raises(ConnectionFailed, match="pages of nothing"):
        async for _ in session.bans():
            pass
