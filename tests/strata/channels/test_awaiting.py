"""A user's function may meet a cancelled future: the function has then failed, and its caller goes on."""

from __future__ import annotations

import asyncio

import pytest
from strata.channels.awaiting import answer_of


def gone() -> asyncio.Future[bytes]:
    """A future that somebody else has cancelled."""
    future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    future.cancel()
    return future


async def waits() -> bytes:
    return await gone()


def looks() -> bytes:
    return gone().result()


async def test_plain_and_coroutine_functions_answer() -> None:
    async def later(text: str, *, times: int) -> str:
        return text * times

    assert await answer_of(later, "ab", times=2) == "abab"
    assert await answer_of(len, "ab") == 2


@pytest.mark.parametrize("function", [gone, waits, looks])
async def test_something_that_was_cancelled_in_there_is_a_failure(function: object) -> None:
    with pytest.raises(RuntimeError, match="cancelled") as failed:
        await answer_of(function)  # type: ignore[arg-type]
    assert isinstance(failed.value.__cause__, asyncio.CancelledError)


async def test_cancelling_who_waits_is_none() -> None:
    task = asyncio.create_task(answer_of(asyncio.Event().wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
