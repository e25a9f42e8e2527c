"""Attacks on a relay, by name.

frames, texts, publishes, typed, reads, auths, sockets, slow, addresses      the attacks, one family each
attacker     one hostile connection, and a gang of them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benches.attacks import addresses, auths, frames, publishes, reads, slow, sockets, texts, typed
from benches.attacks.attacker import Attack, Attacker, Gang, Ledger, ThrownOut

__all__ = ["ATTACKS", "PROXIES", "TLS_ATTACKS", "Attack", "Attacker", "Gang", "Ledger", "ThrownOut"]

TLS_ATTACKS: Final = sockets.TLS_ATTACKS
ATTACKS: Final[Mapping[str, Attack]] = {
    name: attack
    for family in (frames, texts, publishes, typed, reads, auths, sockets, slow, addresses)
    for name, attack in family.ATTACKS.items()
}
"""Every attack that does not need a certificate, by name."""
PROXIES: Final = addresses.PROXIES
