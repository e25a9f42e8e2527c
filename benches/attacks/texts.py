"""JSON that costs more to parse, or to put into canonical form, than to send."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

from benches.attacks.attacker import Attack, frame
from benches.attacks.frames import repeated
from benches.load import client_frame

__all__ = ["ATTACKS"]


def _publish(value: str) -> bytes:
    return client_frame(b'{"type":"PUBLISH","packet":{"content":' + value.encode() + b"}}")


def _numbers(size_bytes: int) -> bytes:
    return _publish("[" + "1e-9," * (size_bytes // 5) + "1]")


def _members(count: int) -> bytes:
    names = [f'"{number:x}":0' for number in range(count)]
    random.Random(1).shuffle(names)
    return _publish("{" + ",".join(names) + "}")


ATTACKS: Final[Mapping[str, Attack]] = {
    "garbage": repeated(client_frame(b'{"type":"PUBLISH","packet":' + b"[" * 400)),
    "unknown types": repeated(frame({"type": "A"}) * 500),
    "open brackets": repeated(client_frame(b"[" * 100_000)),
    "deep nesting": repeated(_publish("[" * 30_000 + "]" * 30_000)),
    "nesting to the limit": repeated(_publish("[" + ",".join(["[" * 50 + "]" * 50] * 150) + "]")),
    "small floats": repeated(_numbers(16_000)),
    "many small floats": repeated(_numbers(64_000)),
    "long number": repeated(_publish("9" * 100_000)),
    "escapes": repeated(_publish('"' + "\\u0041" * 10_000 + '"')),
    "many members": repeated(_members(5_000)),
    "same member again": repeated(_publish("{" + '"a":0,' * 5_000 + '"a":0}')),
}
