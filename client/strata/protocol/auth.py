"""The bytes that AUTH signs, and the checks before a client signs them (RFC-0004 §3.7).

The relay sends a challenge and its own DID; the client answers with a signature over both. Nothing separates
the two and no tag says what the signature is for (A-070), so a hostile relay could pass on another relay's
challenge, or move the border between the two parts, and use the answer there. `check_challenge` keeps a
signature worthless anywhere else (A-071): the challenge has no `:` and a DID begins with `did:`, so there is
one way to split what is signed, and the relay named in it is the one this client meant to talk to. A packet's
signature covers text that begins with `{`, which is no base64: neither can pass for the other.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from strata.protocol import ids, wire
from strata.protocol.errors import ErrorCode, InvalidMessage

__all__ = [
    "MAX_LIFETIME_SECONDS",
    "MIN_CHALLENGE_BYTES",
    "MIN_LIFETIME_SECONDS",
    "answer_challenge",
    "check_challenge",
    "signing_input",
]

MIN_CHALLENGE_BYTES = 32
"""Fewest random bytes in a challenge (R-268, A-073)."""

MIN_LIFETIME_SECONDS = 60
"""A challenge can be answered for at least this long (R-270, A-072)."""

MAX_LIFETIME_SECONDS = 600
"""A longer lifetime is not used (R-272)."""

_MAX_CHALLENGE_CHARACTERS = 1024
"""A client signs no more text of a stranger's than this; 32 bytes take 44 characters."""


def signing_input(challenge: str, server_id: str) -> bytes:
    """The bytes an AUTH signature covers (R-275, A-070).

    They are the challenge's text as it was received, then the relay's DID, both in UTF-8: no separator, no
    decoding, no hash.
    """
    return (challenge + server_id).encode()


def check_challenge(challenge: wire.AuthChallenge, expected_server_id: str | None) -> None:
    """Raise `InvalidMessage` for a challenge that must not be signed (R-298).

    `expected_server_id` is the DID this relay is known by; None means that nothing is known yet, and that the
    caller will hold the relay to the DID it shows now. The error's `detail` is `challenge_malformed`,
    `server_id_malformed` or `server_id_unexpected`.
    """
    if not _is_challenge(challenge.challenge):
        raise _unfit(
            f"the relay's challenge is not the base64 of {MIN_CHALLENGE_BYTES} bytes", "challenge_malformed"
        )
    if not ids.is_did(challenge.server_id):
        raise _unfit("the relay names itself by something that is no DID", "server_id_malformed")
    if expected_server_id is not None and challenge.server_id != expected_server_id:
        raise _unfit("the relay is not the one expected at this address", "server_id_unexpected")


def answer_challenge(
    challenge: wire.AuthChallenge,
    signer: ids.Signer,
    *,
    capabilities: Sequence[str] | None = None,
    client_msg_id: str | None = None,
) -> wire.Auth:
    """The AUTH that answers a challenge `check_challenge` has passed.

    `capabilities` are those asked for: None asks for all the relay grants, an empty sequence for none
    (R-286). Raises what the signer raises.
    """
    signature = signer.sign(signing_input(challenge.challenge, challenge.server_id))
    return wire.Auth(
        author_id=signer.did,
        challenge=challenge.challenge,
        signature=f"0x{signature.hex()}",
        capabilities=None if capabilities is None else list(capabilities),
        client_msg_id=client_msg_id,
    )


def _is_challenge(text: str) -> bool:
    """Whether it is base64 in the standard alphabet, padded, of enough bytes and not of too many."""
    if len(text) > _MAX_CHALLENGE_CHARACTERS or not text.isascii():
        return False
    try:
        return len(base64.b64decode(text, validate=True)) >= MIN_CHALLENGE_BYTES
    except binascii.Error:
        return False


def _unfit(reason: str, detail: str) -> InvalidMessage:
    return InvalidMessage(reason, code=ErrorCode.UNAUTHENTICATED, detail=detail)
