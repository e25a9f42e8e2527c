"""Sockets, handshakes and plain HTTP: attacks before a WebSocket is open, or without one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from benches.attacks.attacker import Attack, Attacker, stranger
from benches.attacks.reads import subscribe
from benches.attacks.typed import key_event

__all__ = ["ATTACKS", "TLS_ATTACKS"]

_HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)
"""The beginning of the first record of a TLS handshake."""


async def _slow_handshake(attacker: Attacker) -> None:
    """The bytes of the handshake one after another, without the last."""
    await attacker.connect()
    for byte in attacker.request()[:-1]:
        attacker.do(bytes([byte]))
        await attacker.rest()


async def _silence(attacker: Attacker) -> None:
    """A socket on which nothing is sent."""
    await attacker.connect()
    attacker.count()
    await attacker.hear()


async def _churn(attacker: Attacker) -> None:
    await attacker.open()
    attacker.count()


async def _large_headers(attacker: Attacker) -> None:
    await attacker.connect()
    attacker.do(attacker.request(None, *(f"X-{number}: {'x' * 8000}" for number in range(60))))
    await attacker.hear()


async def _half_closed(attacker: Attacker) -> None:
    """A live subscription that is dropped without a close."""
    await attacker.open()
    attacker.do(subscribe("s"))
    await attacker.rest()


def _gets(path: str) -> Attack:
    async def attack(attacker: Attacker) -> None:
        await attacker.get(path)

    return attack


async def _unknown_packets(attacker: Attacker) -> None:
    await attacker.get("/packets/0x" + os.urandom(32).hex())


async def _unknown_identities(attacker: Attacker) -> None:
    await attacker.get("/did/" + stranger().did)


async def _large_identity(attacker: Attacker) -> None:
    """GETs of an identity with large key events."""
    if "did" not in attacker.memory:
        identity = stranger()
        await attacker.open()
        for _ in range(4):
            attacker.prepare(key_event(identity, 15_000))
            await attacker.hear()
        attacker.memory["did"] = identity.did
    await attacker.get("/did/" + attacker.memory["did"])


async def _silent_hello(attacker: Attacker) -> None:
    """The first bytes of a TLS handshake, and no more."""
    await attacker.connect(tls=False)
    attacker.do(_HELLO)
    await attacker.hear()


async def _false_hello(attacker: Attacker) -> None:
    await attacker.connect(tls=False)
    attacker.do(_HELLO + os.urandom(480))
    await attacker.hear()


async def _tls_churn(attacker: Attacker) -> None:
    """A complete TLS handshake for one small answer."""
    await attacker.get("/healthz")


ATTACKS: Final[Mapping[str, Attack]] = {
    "slow handshakes": _slow_handshake,
    "silent sockets": _silence,
    "churn": _churn,
    "large headers": _large_headers,
    "dropped subscriptions": _half_closed,
    "GET manifest": _gets("/.well-known/strata-relay.json"),
    "GET what is not there": _gets("/" + "x" * 2000),
    "GET unknown packets": _unknown_packets,
    "GET unknown identities": _unknown_identities,
    "GET a large identity": _large_identity,
}

TLS_ATTACKS: Final[Mapping[str, Attack]] = {
    "TLS: silent handshakes": _silent_hello,
    "TLS: false handshakes": _false_hello,
    "TLS: churn": _tls_churn,
}
"""The attacks that need a relay with a certificate."""
