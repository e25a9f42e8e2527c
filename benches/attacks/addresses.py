"""Many addresses: those of this machine, and those that a trusted proxy reports.

A machine has few IPv6 addresses of its own. So the relay under attack trusts a proxy, and the attackers pose
as that proxy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

from benches.attacks.attacker import Attack, Attacker
from benches.attacks.publishes import packet
from benches.attacks.reads import subscribe
from benches.load import publish_frame

__all__ = ["ATTACKS", "PROXIES"]

PROXIES: Final = "127.0.9.0/24"
"""The addresses that the relay trusts to report a client's address (`trusted_proxies`)."""


def _any_proxy() -> str:
    return f"127.0.9.{random.randint(1, 250)}"


async def _ask(attacker: Attacker, *headers: str) -> None:
    await attacker.open(*headers)
    for number in range(3):
        attacker.do(
            subscribe(f"s{number}", {"limit": 100}) + publish_frame(packet({"type": "POST"}).canonical)
        )
        await attacker.rest()


async def _ipv4(attacker: Attacker) -> None:
    """Each connection comes from another IPv4 address."""
    attacker.source = f"127.{random.randint(64, 127)}.{random.randint(1, 250)}.{random.randint(1, 250)}"
    await _ask(attacker)


async def _ipv6(attacker: Attacker) -> None:
    """Each connection comes from another /64 of one /48."""
    attacker.source = _any_proxy()
    await _ask(attacker, f'Forwarded: for="[2001:db8:1:{random.randrange(2**16):x}::1]"')


async def _quotes(attacker: Attacker) -> None:
    """A header of quotes that a parser could try to match in many ways."""
    attacker.source = _any_proxy()
    await attacker.connect()
    attacker.do(attacker.request(None, 'Forwarded: for="' + '\\"' * 2000))
    await attacker.hear()


ATTACKS: Final[Mapping[str, Attack]] = {
    "ever new IPv4 addresses": _ipv4,
    "ever new IPv6 networks": _ipv6,
    "Forwarded of quotes": _quotes,
}
