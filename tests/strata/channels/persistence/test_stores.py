"""Both stores pass the shipped suite, and SQLite keeps its additional promises."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strata.channels.persistence import (
    Change,
    CorruptStore,
    MemoryPersistence,
    ParticipantKey,
    Persistence,
    PersistenceClosed,
    PersistenceError,
    Put,
    Raise,
    Remove,
    SqlitePersistence,
    StorageFull,
    StoredState,
    StoreInUse,
    WrongStoreVersion,
)
from strata.channels.persistence.testing import CHECKS, DURABLE_CHECKS, Check, OpenStore

ALICE = ParticipantKey("room", "alice")
BOB = ParticipantKey("room", "bob")


def name(check: Check) -> str:
    return getattr(check, "__name__", "check")


class DictPersistence:
    """A backend as a user would write it, to show that the interface is enough."""

    def __init__(self, states: dict[ParticipantKey, StoredState]) -> None:
        self._states = states
        self._closed = False

    async def load(self, participant: ParticipantKey) -> StoredState:
        self._check()
        kept = self._states.get(participant, StoredState())
        return StoredState(
            {kind: dict(records) for kind, records in kept.records.items()}, dict(kept.counters)
        )

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        self._check()
        for change in changes:
            if isinstance(change, Raise):
                if not 0 <= change.value < 2**63:
                    raise ValueError
            elif not change.kind:
                raise ValueError
        self._states.setdefault(participant, StoredState()).apply(changes)

    async def participants(self) -> list[ParticipantKey]:
        self._check()
        return sorted(self._states)

    async def purge(self, participant: ParticipantKey) -> None:
        self._check()
        self._states.pop(participant, None)

    async def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise PersistenceClosed("closed")


def opener(kind: str, tmp_path: Path) -> OpenStore:
    states: dict[ParticipantKey, StoredState] = {}

    async def open_store() -> Persistence:
        if kind == "sqlite":
            return await SqlitePersistence.open(tmp_path / "channels.db")
        return MemoryPersistence() if kind == "memory" else DictPersistence(states)

    return open_store


@pytest.mark.req("C-248", "C-251", "C-258")
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("check", CHECKS, ids=name)
async def test_store_passes(check: Check, kind: str, tmp_path: Path) -> None:
    await check(opener(kind, tmp_path))


@pytest.mark.req("C-249", "C-251", "C-257")
@pytest.mark.parametrize("check", DURABLE_CHECKS, ids=name)
async def test_durable_store_passes(check: Check, tmp_path: Path) -> None:
    await check(opener("sqlite", tmp_path))


@pytest.mark.req("C-253")
@pytest.mark.parametrize("check", CHECKS + DURABLE_CHECKS, ids=name)
async def test_custom_store_passes(check: Check, tmp_path: Path) -> None:
    await check(opener("custom", tmp_path))


@pytest.mark.req("C-251")
async def test_memory_does_not_survive(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        await DURABLE_CHECKS[0](opener("memory", tmp_path))
    assert "survives" in (sys.modules[MemoryPersistence.__module__].__doc__ or "")


keys = st.sampled_from(["a", "b", "c"])
kinds = st.sampled_from(["log", "hint"])
changes = st.one_of(
    st.builds(Put, kinds, keys, st.binary(max_size=8)),
    st.builds(Remove, kinds, keys),
    st.builds(Raise, st.just("lamport"), st.integers(0, 9)),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(changes, max_size=6), max_size=6))
def test_sqlite_agrees_with_the_definition(batches: list[list[Change]], tmp_path: Path) -> None:
    """Any batches, repeated or not, lead to the state that `StoredState.apply` defines."""

    async def run() -> None:
        store = await SqlitePersistence.open(tmp_path / "definition.db")
        await store.purge(ALICE)
        expected = StoredState()
        for batch in batches:
            await store.apply(ALICE, batch)
            expected.apply(batch)
        found = await store.load(ALICE)
        assert found == expected
        assert {k: list(v) for k, v in found.records.items()} == {
            k: list(v) for k, v in expected.records.items()
        }
        await store.close()

    asyncio.run(run())


@pytest.mark.req("C-248")
async def test_calls_that_pile_up_are_committed_together_and_in_order(tmp_path: Path) -> None:
    store = await SqlitePersistence.open(tmp_path / "channels.db")
    calls = [store.apply(ALICE, [Put("log", str(i), b"x"), Raise("lamport", i)]) for i in range(1000)]
    await asyncio.gather(*calls)
    state = await store.load(ALICE)
    assert list(state.records["log"]) == [str(i) for i in range(1000)]
    assert state.counters == {"lamport": 999}
    await store.close()


async def test_close_finishes_what_was_asked(tmp_path: Path) -> None:
    store = await SqlitePersistence.open(tmp_path / "channels.db")
    calls = [asyncio.ensure_future(store.apply(ALICE, [Put("log", str(i), b"x")])) for i in range(600)]
    await asyncio.sleep(0)  # now the calls have been made
    await store.close()
    await asyncio.gather(*calls)
    async with await SqlitePersistence.open(tmp_path / "channels.db") as again:
        assert len((await again.load(ALICE)).records["log"]) == 600
    with pytest.raises(PersistenceClosed):
        await again.load(ALICE)


async def test_a_cancelled_call_takes_effect_as_a_whole(tmp_path: Path) -> None:
    store = await SqlitePersistence.open(tmp_path / "channels.db")
    call = asyncio.ensure_future(store.apply(ALICE, [Put("log", "a", b"1"), Put("log", "b", b"2")]))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await store.load(ALICE)).records == {"log": {"a": b"1", "b": b"2"}}
    await store.close()


async def test_two_objects_on_one_store_are_refused(tmp_path: Path) -> None:
    store = await SqlitePersistence.open(tmp_path / "channels.db")
    with pytest.raises(StoreInUse):
        await SqlitePersistence.open(tmp_path / "channels.db")
    await store.apply(ALICE, [Put("log", "a", b"still mine")])
    await store.close()
    again = await SqlitePersistence.open(tmp_path / "channels.db")
    assert (await again.load(ALICE)).records == {"log": {"a": b"still mine"}}
    await again.close()


OPEN = """
import asyncio, sys
from strata.channels.persistence import SqlitePersistence, StoreInUse
try:
    asyncio.run(SqlitePersistence.open(sys.argv[1]))
except StoreInUse:
    print("in use")
"""


async def test_two_processes_on_one_store_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "channels.db"
    store = await SqlitePersistence.open(path)
    command = [sys.executable, "-c", OPEN, str(path)]
    other = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert other.stdout == "in use\n", other.stderr
    await store.apply(ALICE, [Put("log", "a", b"1")])
    await store.close()


@pytest.mark.req("C-256")
async def test_a_full_store_is_a_typed_error_and_passes(tmp_path: Path) -> None:
    store = await SqlitePersistence.open(tmp_path / "channels.db", max_bytes=200_000)
    await store.apply(ALICE, [Put("log", "kept", b"x" * 50_000), Raise("lamport", 7)])
    before = await store.load(ALICE)
    with pytest.raises(StorageFull) as caught:
        await store.apply(ALICE, [Put("log", "small", b"x"), Put("log", "large", b"x" * 400_000)])
    assert caught.value.retry
    assert await store.load(ALICE) == before
    await store.apply(ALICE, [Remove("log", "kept")])
    await store.apply(ALICE, [Put("log", "next", b"x" * 100_000)])
    await store.close()


@pytest.mark.req("C-256")
async def test_a_call_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    store = await SqlitePersistence.open(tmp_path / "channels.db", max_bytes=200_000)
    outcomes = await asyncio.gather(
        store.apply(ALICE, [Put("log", "a", b"1")]),
        store.apply(BOB, [Put("log", "large", b"x" * 400_000)]),
        store.apply(ALICE, [Put("log", "b", b"2")]),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), StorageFull, type(None)]
    assert (await store.load(ALICE)).records == {"log": {"a": b"1", "b": b"2"}}
    assert await store.participants() == [ALICE]
    await store.close()


async def test_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "channels.db"
    await (await SqlitePersistence.open(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(WrongStoreVersion) as caught:
        await SqlitePersistence.open(path)
    assert (caught.value.found, caught.value.expected, caught.value.retry) == (99, 1, False)
    assert "99" in str(caught.value)
    assert path.read_bytes() == content


async def test_foreign_files_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_bytes(b"these are my notes, and no database at all\n" * 100)
    with pytest.raises(CorruptStore):
        await SqlitePersistence.open(text)
    assert text.read_bytes().startswith(b"these are my notes")
    foreign = tmp_path / "other.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    with pytest.raises(CorruptStore, match="another program"):
        await SqlitePersistence.open(foreign)


async def test_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(PersistenceError):
        await SqlitePersistence.open(tmp_path / "no such folder" / "channels.db")
    with pytest.raises(ValueError):
        await SqlitePersistence.open(tmp_path / "channels.db", synchronous="OFF")  # type: ignore[arg-type]


async def test_an_opening_that_is_cancelled_does_not_keep_the_store(tmp_path: Path) -> None:
    opening = asyncio.ensure_future(SqlitePersistence.open(tmp_path / "channels.db"))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with asyncio.timeout(30):
        while True:
            try:
                store = await SqlitePersistence.open(tmp_path / "channels.db")
            except StoreInUse:  # the thread that was left with the work has not ended yet
                await asyncio.sleep(0.01)
            else:
                break
    await store.close()


async def test_settings_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "channels.db"
    for synchronous, number in (("FULL", 2), ("NORMAL", 1)):
        store = await SqlitePersistence.open(path, synchronous=synchronous)  # type: ignore[arg-type]
        connection = store._connection
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (number,)
        await store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
