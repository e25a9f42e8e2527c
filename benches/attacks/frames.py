"""Bytes and frames that are not messages."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from benches.attacks.attacker import Attack, Attacker

__all__ = ["ATTACKS", "repeated"]

_OVERSIZED_BYTES: Final = 2**27
_CHUNK_BYTES: Final = 2**16
_MASK: Final = bytes(4)


def repeated(make: bytes | Callable[[], bytes]) -> Attack:
    """Open a WebSocket and write the same bytes, or those that `make` returns, again and again."""

    async def attack(attacker: Attacker) -> None:
        await attacker.open()
        while True:
            attacker.do(make if isinstance(make, bytes) else make())
            await attacker.rest()

    return attack


async def _oversized(attacker: Attacker) -> None:
    await attacker.open()
    header = b"\x81\xff" + _OVERSIZED_BYTES.to_bytes(8, "big") + _MASK
    attacker.do(header + bytes(_CHUNK_BYTES))
    await attacker.rest()


async def _endless_fragments(attacker: Attacker) -> None:
    """An endless message in fragments of one byte."""
    await attacker.open()
    attacker.prepare(b"\x01\x81" + _MASK + b"{")
    while True:
        attacker.do((b"\x00\x81" + _MASK + b" ") * 2000)
        await attacker.rest()


async def _cut_frame(attacker: Attacker) -> None:
    """A large frame, sent a few bytes at a time and never finished."""
    await attacker.open()
    attacker.prepare(b"\x81\xff" + (500_000).to_bytes(8, "big") + _MASK)
    while True:
        for _ in range(20):
            attacker.prepare(b"x")
        attacker.count()
        await attacker.rest()


ATTACKS: Final[Mapping[str, Callable[[Attacker], Awaitable[None]]]] = {
    "random bytes": repeated(lambda: os.urandom(4096)),
    "unmasked frames": repeated(b'\x81\x0c{"type":"A"}' * 100),
    "oversized frames": _oversized,
    "endless fragments": _endless_fragments,
    "cut frame": _cut_frame,
    "pings": repeated((b"\x89\x80" + _MASK) * 1000),
    "pings with 125 bytes": repeated((b"\x89\xfd" + _MASK + bytes(125)) * 100),
    "pongs": repeated((b"\x8a\x80" + _MASK) * 1000),
    "binary frames": repeated((b"\x82\x82" + _MASK + b"{}") * 500),
}
