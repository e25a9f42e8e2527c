"""Packets that are expensive to refuse, and packets that are expensive to store."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from strata.protocol.packets import Packet, build

from benches.attacks.attacker import Attack, Attacker, frame, stranger
from benches.attacks.frames import repeated
from benches.load import publish_frame, sign

__all__ = ["ATTACKS", "packet"]

_FEW: Final = 32


def packet(content: Mapping[str, Any], *, age: int = 0, **members: Any) -> Packet:
    """A valid packet by a stranger."""
    now = int(time.time()) - age
    return build(stranger(), content, timestamp=now, nonce=os.urandom(8).hex(), max_bytes=2**20, **members)


def _forged(packets: Sequence[Packet], member: str) -> list[bytes]:
    """The frames of packets with a wrong id or signature."""
    frames = []
    for good in packets:
        text = good.signature if member == "signature" else good.packet_id
        other = "1" if text[2] == "0" else "0"
        frames.append(publish_frame(good.canonical.replace(text.encode(), f"0x{other}{text[3:]}".encode())))
    return frames


@functools.cache
def _bad_signatures() -> list[bytes]:
    return _forged(sign(0, 64), "signature")


@functools.cache
def _wrong_ids() -> list[bytes]:
    return _forged(sign(0, 64), "packet_id")


@functools.cache
def _large_forged() -> list[bytes]:
    return _forged([packet({"type": "POST", "text": "x" * 200_000}) for _ in range(4)], "signature")


@functools.cache
def _stale() -> list[bytes]:
    old = [packet({"type": "POST", "text": "x"}, age=90_000) for _ in range(_FEW)]
    return [publish_frame(each.canonical) for each in old]


@functools.cache
def _duplicate() -> bytes:
    return publish_frame(packet({"type": "POST", "text": "again"}).canonical) * 50


@functools.cache
def _unproven() -> list[Packet]:
    """Packets of numbers with an unproven origin: each is served in a form other than the stored one."""
    header: dict[str, Any] = {"origin_type": "X", "genesis_media_hash": None, "edit_history": []}
    content = {"type": "POST", "numbers": [1e-9] * 3_000}
    return [packet(content, provenance_header=header, allow_unattested=True) for _ in range(2)]


async def _strangers(attacker: Attacker) -> None:
    """Each packet is valid and by an unknown author."""
    await attacker.open()
    while True:
        attacker.do(b"".join(publish_frame(packet({"type": "POST"}).canonical) for _ in range(10)))
        await attacker.rest()


async def _unproven_again(attacker: Attacker) -> None:
    await attacker.open()
    while True:
        attacker.do(publish_frame(random.choice(_unproven()).canonical))
        await attacker.rest()


async def _unproven_read(attacker: Attacker) -> None:
    """The same packets, published once, and read by id as history."""
    known = _unproven()
    await attacker.open()
    for each in known:
        attacker.prepare(publish_frame(each.canonical))
    await attacker.hear()
    filters = {"packet_ids": [each.packet_id for each in known]}
    while True:
        attacker.do(frame({"type": "SUBSCRIBE", "subscription_id": "s", "filters": filters}))
        await attacker.rest()


def _one_of(frames: Any) -> Attack:
    return repeated(lambda: random.choice(frames()))


ATTACKS: Final[Mapping[str, Attack]] = {
    "bad signatures": _one_of(_bad_signatures),
    "wrong ids": _one_of(_wrong_ids),
    "large packets with bad signatures": _one_of(_large_forged),
    "stale packets": _one_of(_stale),
    "duplicates": repeated(lambda: _duplicate()),
    "strangers": _strangers,
    "unproven numbers, duplicates": _unproven_again,
    "unproven numbers, history": _unproven_read,
}
