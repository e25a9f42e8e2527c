"""Filters without the types that the log does not hold: they give the answers of the whole filter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayd.faults import FaultLog
from relayd.feed import known_types
from relayd.feed.known_types import KnownTypes
from relayd.store.columns import string_key
from relayd.store.types import LogEntry, LogQuery, NewPacket, StoreUnavailable

LONG, LONGEST = "l" * 129, "h" * 600
TYPES = ["POST", "REPLY", "É", "", LONG, LONGEST]


def entry(sequence: int, type_: str) -> LogEntry:
    return LogEntry(sequence, 1, NewPacket(bytes(32), "did:strata:a", type_, 1, None, b"{}"))


class Log:
    """A log with packets of these types."""

    def __init__(self, *types: str) -> None:
        self.held = list(types)
        self.asked: list[bytes] = []
        self.failures = 0
        self.on_page: Callable[[], None] = lambda: None

    async def types(self, start: bytes, most: int) -> list[bytes]:
        self.asked.append(start)
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("away")
        page = sorted({key for key in map(string_key, self.held) if key >= start})[:most]
        self.on_page()
        await asyncio.sleep(0)
        return page


async def learned(log: Log) -> KnownTypes:
    known = KnownTypes(log)
    known.open()
    assert known._learning is not None
    await known._learning
    return known


def answer(query: LogQuery | None, log: list[str]) -> list[int]:
    """The places of the matching packets."""
    if query is None:
        return []
    return [n for n, type_ in enumerate(log) if not query.types or type_ in query.types]


@given(
    before=st.lists(st.sampled_from(TYPES), max_size=4),
    after=st.lists(st.sampled_from(TYPES), max_size=4),
    wanted=st.frozensets(st.one_of(st.sampled_from(TYPES), st.text(max_size=3)), max_size=8),
)
def test_a_narrowed_query_finds_what_the_whole_one_finds(before, after, wanted):
    async def check() -> None:
        known = await learned(Log(*before))
        known.observe([entry(n, type_) for n, type_ in enumerate(after, 1)])
        query = LogQuery(types=wanted, up_to=9, after=3)
        narrowed = known.narrowed(query)
        log = before + after
        assert answer(narrowed, log) == answer(query, log)
        if narrowed is not None:
            assert narrowed.types == {t for t in wanted if t in log or len(t) > 128}
            assert (narrowed.up_to, narrowed.after) == (9, 3)
        else:
            assert wanted, "a query for everything stays one"

    asyncio.run(check())


async def test_nothing_is_narrowed_before_the_last_page_and_what_comes_meanwhile_counts():
    log = Log(*(f"t{n:03}" for n in range(150)))
    known = KnownTypes(log)
    query = LogQuery(types=frozenset({"t149", "late", "never"}), up_to=9)
    seen = []

    def on_page() -> None:
        seen.append(known.narrowed(query))
        if len(seen) == 2:  # stored behind the page that was read
            known.observe([entry(1, "late")])

    log.on_page = on_page
    known.open()
    assert known._learning is not None
    await known._learning
    assert seen == [query, query, query] and log.asked == [b"", b"t063\0", b"t127\0"]
    narrowed = known.narrowed(query)
    assert narrowed is not None and narrowed.types == {"t149", "late"}
    await known.close()


async def test_a_database_that_is_away_is_asked_again(monkeypatch):
    monkeypatch.setattr(known_types, "_RETRY_SECONDS", (0.0, 0.0))
    log = Log("POST")
    log.failures = 2
    known = await learned(log)
    assert len(log.asked) == 3
    assert known.narrowed(LogQuery(types=frozenset({"REPLY"}), up_to=1)) is None


@pytest.mark.parametrize("how", ["stored", "observed", "broken"])
async def test_what_knows_too_many_or_has_failed_leaves_every_query_as_it_is(how, monkeypatch):
    monkeypatch.setattr(known_types, "_MOST_TYPES", 3)
    caught: list[str] = []
    log = Log(*(["a", "b", "c", "d"] if how == "stored" else ["a"]))
    known = KnownTypes(log, FaultLog(caught.append))
    if how == "broken":
        monkeypatch.setattr(known, "_add", None)
    known.open()
    assert known._learning is not None
    await known._learning
    known.observe([entry(n, type_) for n, type_ in enumerate(["b", "c", LONG] * 2, 1)])
    if how == "observed":
        assert len(known) == 3, "the long one is not kept"
        known.observe([entry(7, "d")])
    query = LogQuery(types=frozenset({"never"}), up_to=9)
    assert known.narrowed(query) is query and len(known) == 0
    assert bool(caught) is (how == "broken")
    known.observe([entry(8, "e")])
    assert known.narrowed(query) is query


async def test_a_query_that_ends_nowhere_may_reach_beyond_what_is_known():
    known = await learned(Log("POST"))
    query = LogQuery(types=frozenset({"REPLY"}))
    assert known.narrowed(query) is query
