"""The bytes that AUTH signs, and the checks before a client signs them (RFC-0004 §3.7).

The relay sends a challenge and its own DID; the client answers with a signature over both. No separator is
between the two and no tag says what the signature is for (A-070), so a hostile relay could forward another
relay's challenge, or move the border between the two parts, and use the answer there. `check_challenge`
makes a signature useless anywhere else (A-071). The challenge has no `:` and a DID begins with `did:`, so the
signed text can be split in only one way, and it names the relay that this client meant to talk to. A packet's
signature covers text that begins with `{`, which is not base64, so neither can pass for the other.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

from strata.protocol import ids, wire
from strata.protocol.errors import ErrorCode, InvalidMessage

__all__ = [
    "MAX_LIFETIME_SECONDS",
    "MIN_CHALLENGE_BYTES",
    "MIN_LIFETIME_SECONDS",
    "answer_challenge",
    "check_address",
    "check_challenge",
    "signing_input",
]

MIN_CHALLENGE_BYTES = 32
"""The least number of random bytes in a challenge (R-268, A-073)."""

MIN_LIFETIME_SECONDS = 60
"""The least time for which a challenge can be answered (R-270, A-072)."""

MAX_LIFETIME_SECONDS = 600
"""The longest lifetime that is used (R-272)."""

_MAX_CHALLENGE_CHARACTERS = 1024
"""The longest text of a stranger that a client signs; 32 bytes take 44 characters."""


def signing_input(challenge: str, server_id: str) -> bytes:
    """The bytes that an AUTH signature covers (R-275, A-070).

    They are the text of the challenge as it was received, then the relay's DID, both in UTF-8, without a
    separator, decoding or hashing.
    """
    return (challenge + server_id).encode()


def check_challenge(challenge: wire.AuthChallenge, expected_server_id: str | None) -> None:
    """Raise `InvalidMessage` for a challenge that must not be signed (R-298).

    `expected_server_id` is the known DID of this relay. None means that no DID is known yet, and that the
    caller will expect the DID shown now from then on. The error's `detail` is `challenge_malformed`,
    `server_id_malformed` or `server_id_unexpected`.
    """
    if not _is_challenge(challenge.challenge):
        raise _unfit(
            f"the relay's challenge is not the base64 of {MIN_CHALLENGE_BYTES} bytes", "challenge_malformed"
        )
    if not ids.is_did(challenge.server_id):
        raise _unfit("the name that the relay gives itself is not a DID", "server_id_malformed")
    if expected_server_id is not None and challenge.server_id != expected_server_id:
        raise _unfit("the relay is not the one expected at this address", "server_id_unexpected")


def check_address(server_id: str, address: str, met: Mapping[str, str]) -> None:
    """Raise `InvalidMessage` if the relay at `address` shows the DID of a relay met elsewhere (R-298).

    `met` has an address for each DID: the relay may be forwarding that other relay's challenge. The error's
    `detail` is `server_id_elsewhere`.
    """
    other = met.get(server_id, address)
    if other != address:
        raise _unfit(
            f"this is the DID of the relay at {other}; where both are one relay, say so by relay_id",
            "server_id_elsewhere",
        )


def answer_challenge(
    challenge: wire.AuthChallenge,
    signer: ids.Signer,
    *,
    capabilities: Sequence[str] | None = None,
    client_msg_id: str | None = None,
) -> wire.Auth:
    """The AUTH that answers a challenge that has passed `check_challenge`.

    `capabilities` are the capabilities requested: None requests all that the relay grants, an empty sequence
    none (R-286). Raises what the signer raises.
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
    """Whether the text is padded base64 in the standard alphabet, of enough bytes and not too long."""
    if len(text) > _MAX_CHALLENGE_CHARACTERS or not text.isascii():
        return False
    try:
        return len(base64.b64decode(text, validate=True)) >= MIN_CHALLENGE_BYTES
    except binascii.Error:
        return False


def _unfit(reason: str, detail: str) -> InvalidMessage:
    return InvalidMessage(reason, code=ErrorCode.UNAUTHENTICATED, detail=detail)
