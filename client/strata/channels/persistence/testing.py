"""Checks that every store must pass, to run against a backend of your own; and a store that fails on demand.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_my_store(check, tmp_path):
        await check(lambda: MyStore.open(tmp_path / "state"))

Each check gets a function that opens *the same* store again; a check closes what it opened, and starts with
an empty store. `DURABLE_CHECKS` are for stores whose state outlives their object. A check that fails raises
`AssertionError`. Nothing here needs pytest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from strata.channels.persistence.interface import (
    MAX_COUNTER,
    Change,
    ParticipantKey,
    Persistence,
    PersistenceClosed,
    PersistenceError,
    Put,
    Raise,
    Remove,
    StoredState,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["CHECKS", "DURABLE_CHECKS", "Check", "FaultyPersistence", "OpenStore"]

OpenStore = Callable[[], Awaitable[Persistence]]
Check = Callable[[OpenStore], Awaitable[None]]

_ALICE = ParticipantKey("room", "alice")
_BOB = ParticipantKey("room", "bob")
_ELSEWHERE = ParticipantKey("hall", "alice")

_SOME: tuple[Change, ...] = (
    Put("log", "m2", b"two"),
    Put("log", "m1", b"one"),
    Put("hint", "m1", bytes(range(256))),
    Raise("lamport", 1_760_000_000_000),
)


@asynccontextmanager
async def _opened(open_store: OpenStore) -> AsyncIterator[Persistence]:
    store = await open_store()
    try:
        yield store
    finally:
        await store.close()


def _expected(*batches: Sequence[Change]) -> StoredState:
    state = StoredState()
    for changes in batches:
        state.apply(changes)
    return state


def _assert_equal(found: StoredState, expected: StoredState) -> None:
    assert found.counters == expected.counters, f"counters: {found.counters} != {expected.counters}"
    assert found.records == expected.records, "the records differ"
    for kind, records in expected.records.items():
        assert list(found.records[kind]) == list(records), f"the order of {kind} differs"


async def unknown_participant_is_empty(open_store: OpenStore) -> None:
    """A participant that never applied anything has no state, and loading it does not create it."""
    async with _opened(open_store) as store:
        _assert_equal(await store.load(_ALICE), StoredState())
        assert await store.participants() == []


async def changes_are_applied(open_store: OpenStore) -> None:
    """Records and counters come back as they were put, with keys in the order of their first put."""
    async with _opened(open_store) as store:
        await store.apply(_ALICE, _SOME)
        _assert_equal(await store.load(_ALICE), _expected(_SOME))


async def order_inside_a_batch_counts(open_store: OpenStore) -> None:
    """Later changes of a batch see the effects of earlier ones, whatever their kinds."""
    changes: tuple[Change, ...] = (
        Put("log", "a", b"1"),
        Put("log", "b", b"1"),
        Remove("log", "a"),
        Put("log", "b", b"2"),
        Put("log", "a", b"3"),
        Put("log", "c", b"1"),
        Remove("log", "c"),
        Remove("log", "never there"),
    )
    async with _opened(open_store) as store:
        await store.apply(_ALICE, changes)
        state = await store.load(_ALICE)
        _assert_equal(state, _expected(changes))
        assert list(state.records["log"].items()) == [("b", b"2"), ("a", b"3")]


async def batches_may_be_repeated(open_store: OpenStore) -> None:
    """A batch that is applied again, because its outcome was unknown, changes nothing."""
    async with _opened(open_store) as store:
        await store.apply(_ALICE, _SOME)
        await store.apply(_ALICE, _SOME)
        _assert_equal(await store.load(_ALICE), _expected(_SOME))


async def counters_never_fall(open_store: OpenStore) -> None:
    """A Lamport time does not go back, whatever is applied late or again (C-101)."""
    async with _opened(open_store) as store:
        await store.apply(_ALICE, [Raise("lamport", 5), Raise("lamport", 3)])
        await store.apply(_ALICE, [Raise("lamport", 4), Raise("highest", MAX_COUNTER)])
        assert (await store.load(_ALICE)).counters == {"lamport": 5, "highest": MAX_COUNTER}


async def participants_are_apart(open_store: OpenStore) -> None:
    """State belongs to a sender in a channel; no other channel and no other sender sees it (C-258)."""
    async with _opened(open_store) as store:
        await store.apply(_BOB, [Put("log", "m", b"bob")])
        await store.apply(_ALICE, [Put("log", "m", b"alice")])
        await store.apply(_ELSEWHERE, [Put("log", "m", b"elsewhere")])
        assert await store.participants() == [_ELSEWHERE, _ALICE, _BOB]
        assert (await store.load(_BOB)).records == {"log": {"m": b"bob"}}
        assert (await store.load(_ELSEWHERE)).records == {"log": {"m": b"elsewhere"}}


async def purge_forgets_one(open_store: OpenStore) -> None:
    """Purging removes the records and counters of one participant and nothing else (C-020)."""
    async with _opened(open_store) as store:
        await store.apply(_ALICE, _SOME)
        await store.apply(_BOB, _SOME)
        await store.purge(_ALICE)
        await store.purge(_ELSEWHERE)
        _assert_equal(await store.load(_ALICE), StoredState())
        _assert_equal(await store.load(_BOB), _expected(_SOME))
        assert await store.participants() == [_BOB]
        await store.apply(_ALICE, [Raise("lamport", 1)])
        _assert_equal(await store.load(_ALICE), _expected([Raise("lamport", 1)]))


async def what_cannot_be_stored_is_refused_whole(open_store: OpenStore) -> None:
    """A batch with an impossible change is refused, and none of it is applied."""
    impossible: tuple[Change, ...] = (
        Raise("lamport", MAX_COUNTER + 1),
        Raise("lamport", -1),
        Put("", "key", b""),
        Remove("", "key"),
    )
    async with _opened(open_store) as store:
        for change in impossible:
            try:
                await store.apply(_ALICE, [Put("log", "m", b"half"), change])
            except ValueError:
                continue
            raise AssertionError(f"{change} was accepted")
        _assert_equal(await store.load(_ALICE), StoredState())


async def values_of_any_size_and_content(open_store: OpenStore) -> None:
    """Empty values, large values, and ids of any text are stored."""
    changes: tuple[Change, ...] = (
        Put("log", "empty", b""),
        Put("clock", "", b"a kind of which there is one"),
        Put("log", "large", bytes(range(256)) * 8192),
        Put("log", "ünï\x1f'\"; DROP TABLE records; --\n", b"text"),
    )
    async with _opened(open_store) as store:
        await store.apply(ParticipantKey("", "did:strata:z6Mk…"), changes)
        _assert_equal(await store.load(ParticipantKey("", "did:strata:z6Mk…")), _expected(changes))


async def loading_gives_a_copy(open_store: OpenStore) -> None:
    """Changing a loaded state does not affect the store."""
    async with _opened(open_store) as store:
        await store.apply(_ALICE, _SOME)
        state = await store.load(_ALICE)
        state.records["log"].clear()
        state.counters.clear()
        _assert_equal(await store.load(_ALICE), _expected(_SOME))


async def a_closed_store_says_so(open_store: OpenStore) -> None:
    """Closing twice is harmless; using a closed store raises `PersistenceClosed`."""
    store = await open_store()
    await store.close()
    await store.close()
    for use in (store.load(_ALICE), store.apply(_ALICE, _SOME), store.participants(), store.purge(_ALICE)):
        try:
            await use
        except PersistenceClosed:
            continue
        raise AssertionError("a closed store was used")


async def state_outlives_the_object(open_store: OpenStore) -> None:
    """Applied changes are there when the store is opened again (C-249, C-257)."""
    async with _opened(open_store) as store:
        await store.apply(_ALICE, _SOME)
        await store.apply(_BOB, [Put("queued", "1", b"first")])
    async with _opened(open_store) as store:
        assert await store.participants() == [_ALICE, _BOB]
        _assert_equal(await store.load(_ALICE), _expected(_SOME))
        await store.apply(_BOB, [Put("queued", "2", b"second"), Remove("queued", "1")])
    async with _opened(open_store) as store:
        assert (await store.load(_BOB)).records == {"queued": {"2": b"second"}}


async def a_purge_outlives_the_object(open_store: OpenStore) -> None:
    """Purged state does not come back."""
    async with _opened(open_store) as store:
        await store.apply(_ALICE, _SOME)
        await store.purge(_ALICE)
    async with _opened(open_store) as store:
        assert await store.participants() == []


CHECKS: tuple[Check, ...] = (
    unknown_participant_is_empty,
    changes_are_applied,
    order_inside_a_batch_counts,
    batches_may_be_repeated,
    counters_never_fall,
    participants_are_apart,
    purge_forgets_one,
    what_cannot_be_stored_is_refused_whole,
    values_of_any_size_and_content,
    loading_gives_a_copy,
    a_closed_store_says_so,
)
"""The checks for every store."""

DURABLE_CHECKS: tuple[Check, ...] = (state_outlives_the_object, a_purge_outlives_the_object)
"""The checks for stores whose state outlives their object."""


class FaultyPersistence:
    """A wrapper of a store that fails on demand, for tests of code that uses stores (C-255, C-256).

    `fail_before` are errors for the next writes, raised before anything is done; `fail_after` are raised
    after the change was made, as when a program does not learn that its commit succeeded. While both are
    empty, the wrapper behaves like the inner store.
    """

    def __init__(self, inner: Persistence) -> None:
        self.inner = inner
        self.fail_before: list[PersistenceError] = []
        self.fail_after: list[PersistenceError] = []
        self.applied: list[tuple[ParticipantKey, tuple[Change, ...]]] = []
        """Every batch that took effect, in order."""

    async def load(self, participant: ParticipantKey) -> StoredState:
        """As the inner store."""
        return await self.inner.load(participant)

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        """Fail if an error is due, else do as the inner store."""
        if self.fail_before:
            raise self.fail_before.pop(0)
        await self.inner.apply(participant, changes)
        self.applied.append((participant, tuple(changes)))
        if self.fail_after:
            raise self.fail_after.pop(0)

    async def participants(self) -> list[ParticipantKey]:
        """As the inner store."""
        return await self.inner.participants()

    async def purge(self, participant: ParticipantKey) -> None:
        """As the inner store."""
        await self.inner.purge(participant)

    async def close(self) -> None:
        """As the inner store."""
        await self.inner.close()
