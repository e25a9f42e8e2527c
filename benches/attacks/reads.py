"""SUBSCRIBEs: expensive filters, expensive histories, and one after another."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, Final

from strata.protocol.ids import Identity

from benches.attacks.attacker import Attack, Attacker, frame, stranger
from benches.load import AUTHORS, CONTENT_TYPE

__all__ = ["ATTACKS", "subscribe"]

_SUBSCRIPTIONS: Final = 60


def subscribe(subscription_id: str, filters: Mapping[str, Any] | None = None, **members: Any) -> bytes:
    """The frame of a SUBSCRIBE."""
    message = {"type": "SUBSCRIBE", "subscription_id": subscription_id, "filters": filters or {}}
    return frame({**message, **members})


@functools.cache
def _authors() -> list[str]:
    """Authors whose packets the log holds, if a benchmark has filled it, and many unknown ones."""
    known = [Identity(number.to_bytes(32, "big")).did for number in range(1, AUTHORS + 1)]
    return known + [stranger().did for _ in range(1000 - AUTHORS)]


def _again(filters: Any, **members: Any) -> Attack:
    """Subscriptions that replace each other, under a few ids."""

    async def attack(attacker: Attacker) -> None:
        await attacker.open()
        for number in itertools.cycle(range(_SUBSCRIPTIONS)):
            wanted = filters(number) if callable(filters) else filters
            attacker.do(subscribe(f"s{number}", wanted, **members))
            await attacker.rest()

    return attack


async def _flood(attacker: Attacker) -> None:
    """A new subscription each time, with a page of history."""
    await attacker.open()
    for number in range(10_000):
        attacker.do(subscribe(f"flood-{number}", {"limit": 100}))
        await attacker.rest()


async def _churn(attacker: Attacker) -> None:
    """Subscriptions that end as soon as they begin."""
    await attacker.open()
    both = subscribe("s", {"types": ["NONE"], "limit": 0}) + frame(
        {"type": "UNSUBSCRIBE", "subscription_id": "s"}
    )
    while True:
        attacker.do(both * 20)
        await attacker.rest()


def _rare(number: int) -> dict[str, Any]:
    """A filter for a busy author and for types that others use: no index covers both."""
    return {"authors": [_authors()[number % AUTHORS]], "types": ["REPLY", "KEY_EVENT"], "limit": 500}


ATTACKS: Final[Mapping[str, Attack]] = {
    "subscription flood": _flood,
    "subscription churn": _churn,
    "filters of 1000 types": _again(lambda number: {"types": [f"{number:x}{n:x}" for n in range(1000)]}),
    "filter of one long value": _again(lambda number: {"types": [f"{number}\U0001f980" + "x" * 100_000]}),
    "scans": _again(_rare),
    "gapless with 1000 authors": _again(lambda _: {"authors": _authors()}, gapless=True),
    "pages of 500": _again({"limit": 500, "order": "asc", "types": [CONTENT_TYPE]}),
    "newest 500 of 1000 authors": _again(lambda _: {"authors": _authors(), "limit": 500}),
    "unknown ids": _again(lambda n: {"packet_ids": [f"0x{n:032x}{i:032x}" for i in range(500)]}),
    "bad cursors": _again({"cursor": "1.AQgwAQgwAQgwAQgwAQgw"}),
}
