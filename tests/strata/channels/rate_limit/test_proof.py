"""The optional proof provider."""

from __future__ import annotations

import asyncio

import pytest
from strata.channels.rate_limit import ProofFailed, obtain_proof


@pytest.mark.req("C-236")
async def test_plain_and_asynchronous_providers() -> None:
    async def later(message: bytes) -> bytes:
        return message[::-1]

    assert await obtain_proof(lambda message: message + b"!", b"abc") == b"abc!"
    assert await obtain_proof(later, b"abc") == b"cba"
    assert await obtain_proof(None, b"abc") is None


@pytest.mark.req("C-236")
async def test_whatever_a_provider_does_wrong_is_one_error() -> None:
    def broken(_message: bytes) -> bytes:
        raise OSError("no prover")

    async def broken_later(_message: bytes) -> bytes:
        raise OSError("no prover")

    for provider in (broken, broken_later):
        with pytest.raises(ProofFailed) as caught:
            await obtain_proof(provider, b"abc")
        assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ProofFailed):
        await obtain_proof(lambda _message: "text", b"abc")  # type: ignore[arg-type, return-value]

    async def cut_off(_message: bytes) -> bytes:
        raise asyncio.CancelledError

    with pytest.raises(ProofFailed):
        await obtain_proof(cut_off, b"abc")


async def test_cancelling_reaches_the_provider() -> None:
    begun, ended = asyncio.Event(), list[str]()

    async def slow(message: bytes) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return message

    task = asyncio.ensure_future(obtain_proof(slow, b"abc"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled"]
