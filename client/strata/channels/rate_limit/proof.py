"""A proof for each message, for transports that require one (C-236, A-123). Relays require none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from strata.protocol.errors import StrataError

__all__ = ["ProofFailed", "ProofProvider", "obtain_proof"]

ProofProvider = Callable[[bytes], bytes | Awaitable[bytes]]
"""Makes the proof of bytes that are about to be dispatched. It may be a coroutine function."""


class ProofFailed(StrataError):
    """The provider made no proof, so the chunk fails permanently (C-044). The cause is its error."""

    def __str__(self) -> str:
        return "the proof that the transport asks for could not be made"


async def obtain_proof(provider: ProofProvider | None, message: bytes) -> bytes | None:
    """The proof of one message; None without a provider.

    This is called for every chunk and every retransmission, right before dispatch. Raises `ProofFailed` if
    the provider raises, or returns anything but bytes. Cancelling this cancels the provider.
    """
    if provider is None:
        return None
    from strata.channels.awaiting import answer_of  # not above: core modules import this module

    try:
        proof = await answer_of(provider, message)
    except Exception as error:
        raise ProofFailed from error
    if not isinstance(proof, bytes):
        raise ProofFailed
    return proof
