"""AUTH: wrong answers, and correct ones by ever new identities."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Final

from strata.protocol.ids import Identity
from strata.protocol.packets import build

from benches.attacks.attacker import Attack, Attacker, frame, stranger
from benches.load import publish_frame

__all__ = ["ATTACKS"]

_NOBODY: Final = Identity(b"\x5a" * 32)


async def _flood(attacker: Attacker) -> None:
    """The first AUTH answers the challenge with a wrong signature; the rest name the same challenge again."""
    challenge = await attacker.open()
    message = {"type": "AUTH", "author_id": _NOBODY.did, "challenge": challenge}
    while True:
        attacker.do(frame({**message, "signature": "0x" + "5a" * 64}))
        await attacker.rest()


async def _unknown_challenges(attacker: Attacker) -> None:
    await attacker.open()
    while True:
        message = {"type": "AUTH", "author_id": stranger().did, "challenge": os.urandom(32).hex()}
        attacker.do(frame({**message, "signature": "0x" + "5a" * 64}))
        await attacker.rest()


async def _identities(attacker: Attacker) -> None:
    """A new identity for each connection, and packets by it: each identity has its own limits."""
    identity = stranger()
    challenge = await attacker.open()
    signature = "0x" + identity.sign((challenge + attacker.server_id).encode()).hex()
    message = {"type": "AUTH", "author_id": identity.did, "challenge": challenge, "signature": signature}
    attacker.do(frame(message))
    for _ in range(3):
        await attacker.rest()
        now = int(time.time())
        made = [
            build(identity, {"type": "POST", "text": ""}, timestamp=now, nonce=os.urandom(8).hex())
            for _ in range(10)
        ]
        attacker.do(b"".join(publish_frame(packet.canonical) for packet in made))


ATTACKS: Final[Mapping[str, Attack]] = {
    "AUTH flood": _flood,
    "unknown challenges": _unknown_challenges,
    "ever new identities": _identities,
}
