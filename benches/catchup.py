"""Reading history: pages of 500 rows one after another, and a gapless stream from the start of the log."""

from __future__ import annotations

import asyncio
import statistics
import time

import msgspec
from strata.protocol.wire import EndOfHistory, Event, Filters, Subscribe, encode

from benches.bare import StoreCost
from benches.daemon import RelayProcess
from benches.load import CONTENT_TYPE, client_frame, make_load
from benches.measures import Measure, Plan, Progress
from benches.peer import BenchError, Peer, connect_peers, messages
from benches.publish import publish

__all__ = ["measure", "read_stream"]

_PAGE_ROWS = 500
_READERS = 4
_TARGET = 400_000


async def measure(relay: RelayProcess, plan: Plan, progress: Progress, store: StoreCost) -> list[Measure]:
    """Fill the log, then read all of it in both ways; each packet must be read exactly once."""
    await publish(relay.ws_url, make_load(plan.catchup_packets, progress))
    length = await _read_and_check(relay.ws_url)
    measures = []
    for name, readers, read in (
        ("one stream, gapless", 1, read_stream),
        (f"pages of {_PAGE_ROWS}, one reader", 1, _pages),
        (f"pages of {_PAGE_ROWS}, {_READERS} readers", _READERS, _pages),
    ):
        rates: list[float] = []
        before = relay.cpu_times()
        for _ in range(plan.rounds):
            peers = await connect_peers(relay.ws_url, readers)
            started = time.perf_counter()
            await asyncio.gather(*(read(peer, length) for peer in peers))
            rates.append(length * readers / (time.perf_counter() - started))
            for peer in peers:
                peer.close()
            progress(f"catch-up, {name}: {rates[-1]:,.0f} rows/s")
        rows = length * readers * plan.rounds
        cost = relay.cpu_times().since(before)
        measures.append(
            Measure(
                "catchup",
                name,
                statistics.median(rates),
                "rows/s",
                _TARGET,
                limit=store.page,
                limit_name="pages from the log, 1 connection",
                details={"rounds": rates, **cost.each(rows)},
            )
        )
    return measures


def _subscribe(peer: Peer, *, gapless: bool = False, cursor: str | None = None) -> None:
    filters = Filters(types=[CONTENT_TYPE], cursor=cursor, limit=None if gapless else _PAGE_ROWS)
    message = Subscribe(
        subscription_id="bench", filters=filters, gapless=gapless or None, history_marker=True
    )
    peer.send(client_frame(encode(message)))


async def read_stream(peer: Peer, length: int) -> None:
    """Read the whole log, which has `length` packets, as a stream."""
    done = peer.expect(length + 1)
    _subscribe(peer, gapless=True)
    await done


async def _pages(peer: Peer, length: int) -> None:
    """Read the whole log in pages, each from the cursor of the page before."""
    peer.witness = True
    cursor: str | None = None
    while peer.events < length:
        peer.kept.clear()
        done = peer.expect(peer.total + min(_PAGE_ROWS, length - peer.events) + 1)
        _subscribe(peer, cursor=cursor)
        await done
        # The marker is the last message, and short; only the end is searched for the cursor.
        tail = b"".join(peer.kept[-2:])
        marker = msgspec.json.decode(tail[tail.rindex(b'{"type":"END_OF_HISTORY"') :], type=EndOfHistory)
        cursor = marker.cursor if isinstance(marker.cursor, str) else None


async def _read_and_check(url: str) -> int:
    """Read the log as a stream and decode all of it; return its length."""
    [peer] = await connect_peers(url, 1, witnesses=1)
    _subscribe(peer, gapless=True)
    await peer.next_marker()
    found = messages(peer)
    peer.close()
    events = [message for message in found if isinstance(message, Event)]
    ids = {msgspec.json.decode(event.packet)["packet_id"] for event in events}
    if len(ids) != len(events) or len({event.cursor for event in events}) != len(events):
        raise BenchError("the stream repeats itself")
    return len(events)
