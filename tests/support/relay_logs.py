"""Logs for the pipeline's tests: real packets in a real relay's tables, stored as a relay would."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from blake3 import blake3
from strata.protocol import packets
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from relayd.admission.checks import to_store
from relayd.moderation import SubjectKind
from relayd.store import Store
from relayd.store.erasing import Eraser

__all__ = ["append", "author", "drop_days", "erase", "erase_authors", "make", "make_many"]

RELAY = Identity(bytes(32))


def author(number: int) -> Identity:
    """One of any number of identities."""
    return Identity(blake3(b"pipeline author %d" % number).digest())


def make(number: int, *, who: int = 0, type: str = "POST", at: int | None = None, **content: Any) -> Packet:
    """Packet `number` of an author."""
    stamp = int(time.time()) if at is None else at
    body = {"type": type, "text": f"packet {number} {'lorem ipsum ' * 12}"} | content
    return packets.build(author(who), body, timestamp=stamp, nonce=str(number))


def _some(numbers: range, authors: int, types: Sequence[str], at: int) -> list[Packet]:
    return [make(n, who=n % authors, type=types[n % len(types)], at=at) for n in numbers]


def make_many(
    count: int,
    *,
    authors: int = 20,
    types: Sequence[str] = ("POST", "REACTION"),
    at: int | None = None,
    first: int = 0,
    processes: int = 2,
) -> list[Packet]:
    """Packets `first`, `first` + 1, …, made by several processes, because signing is slow."""
    stamp = int(time.time()) if at is None else at
    one = partial(_some, authors=authors, types=types, at=stamp)
    if count < 2000:
        return one(range(first, first + count))
    chunks = [range(start, min(start + 1000, first + count)) for start in range(first, first + count, 1000)]
    with ProcessPoolExecutor(processes) as pool:
        return list(itertools.chain.from_iterable(pool.map(one, chunks)))


def append(
    url: str,
    made: Sequence[Packet],
    now: int | None = None,
    *,
    batch: int = 500,
    witnessed_at: int | None = None,
) -> None:
    """Append packets to a relay's log, all received at `now`; with `witnessed_at`, all from a peer, whose
    relay received them then."""

    async def run() -> None:
        async with await Store.open(url, retention_days=0) as store:
            rows = [to_store(packet, None, witness=witnessed_at) for packet in made]
            for start in range(0, len(rows), batch):
                await store.append(rows[start : start + batch], int(time.time()) if now is None else now)

    asyncio.run(run())


def drop_days(url: str, now: int, *, keep: int = 1) -> None:
    """Let retention drop all but the last `keep` days before `now`, and the ids that are older."""

    async def run() -> None:
        opened = Store.open(url, retention_days=keep, dedup_window_seconds=1)
        async with await opened as store:
            await store.maintain(now)

    asyncio.run(run())


def erase(url: str, *ids: str, now: int = 0) -> None:
    """Erase packets from a relay's log, as its operator would."""
    _erase(url, SubjectKind.PACKET, ids, now)


def erase_authors(url: str, *authors: str, now: int = 0) -> None:
    """Erase all that these authors have published."""
    _erase(url, SubjectKind.AUTHOR, authors, now)


def _erase(url: str, kind: SubjectKind, subjects: Sequence[str], now: int) -> None:
    eraser = Eraser(url, RELAY)
    at = now or int(time.time())
    asyncio.run(eraser.erase(kind, subjects, reason="asked for", actor="operator", via="test", now=at))
