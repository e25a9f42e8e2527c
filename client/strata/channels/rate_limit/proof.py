"""A proof for each message, for transports that ask for one (C-236, A-123). Relays ask for none."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

from strata.protocol.errors import StrataError

__all__ = ["ProofFailed", "ProofProvider", "obtain_proof"]

ProofProvider = Callable[[bytes], bytes | Awaitable[bytes]]
"""Given the bytes that are about to be dispatched, their proof. May be a coroutine function."""


class ProofFailed(StrataError):
    """No proof could be had: the chunk fails for good (C-044). The cause is the provider's own error."""

    def __str__(self) -> str:
        return "the proof that the transport asks for could not be made"


async def obtain_proof(provider: ProofProvider | None, message: bytes) -> bytes | None:
    """The proof of one message, None without a provider.

    Called for every chunk and every retransmission, right before dispatch. Raises `ProofFailed` whatever the
    provider raised or returned instead of bytes. Cancelling cancels the provider.
    """
    if provider is None:
        return None
    try:
        proof = provider(message)
        if inspect.isawaitable(proof):
            proof = await proof
    except Exception as error:
        raise ProofFailed from error
    if not isinstance(proof, bytes):
        raise ProofFailed
    return proof
