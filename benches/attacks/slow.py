"""Peers that request much and read nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benches.attacks.attacker import Attack, Attacker, frame, stranger
from benches.attacks.reads import subscribe
from benches.attacks.typed import key_event

__all__ = ["ATTACKS"]


async def _stalled_stream(attacker: Attacker) -> None:
    """A gapless subscription to the whole log that is not read."""
    await attacker.open()
    attacker.do(subscribe("s", gapless=True))
    await attacker.hear()
    attacker.turn_deaf()
    while attacker.is_open:
        await attacker.rest()


async def _stalled_answers(attacker: Attacker) -> None:
    """Requests whose answers are not read."""
    await attacker.open()
    attacker.do(frame({"type": "A"}))
    await attacker.hear()
    attacker.turn_deaf()
    while True:
        attacker.do(frame({"type": "A"}) * 500)
        await attacker.rest()


async def _stalled_get(attacker: Attacker) -> None:
    """A large answer to a GET that is not read."""
    if "did" not in attacker.memory:
        identity = stranger()
        await attacker.open()
        for _ in range(10):
            attacker.prepare(key_event(identity, 15_000))
            await attacker.hear()
        attacker.memory["did"] = identity.did
    await attacker.connect()
    attacker.do(attacker.request("/did/" + attacker.memory["did"]))
    await attacker.hear()
    attacker.turn_deaf()
    while attacker.is_open:
        await attacker.rest()


ATTACKS: Final[Mapping[str, Attack]] = {
    "stalled stream": _stalled_stream,
    "stalled answers": _stalled_answers,
    "stalled GETs": _stalled_get,
}
