"""Recovery: pending events, and the keys whose approval they need (RFC-0001 §5.3; R-079, R-084…R-088)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from strata.protocol.documents import RecoveryPolicy, key_multibase
from strata.protocol.keys.statements import KeyEvent
from strata.protocol.keys.states import KeyStanding, KeyState

__all__ = ["Electorate", "Electors", "PendingEvent"]


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event signed by a recovery key that has not taken effect."""

    packet_id: str
    event: KeyEvent
    signer: bytes
    due_at: int
    """When its delay ends; approvals never make this earlier (R-087)."""
    approved_by: frozenset[bytes]
    """The recovery keys that have approved it, including its signer from the start (R-084)."""

    def approve(self, public_key: bytes) -> PendingEvent:
        """The same event with one more approval; a second one by the same key changes nothing (R-082)."""
        return replace(self, approved_by=self.approved_by | {public_key})

    def is_approved(self, electorate: Electorate) -> bool:
        """Whether enough keys approve at that moment; those revoked by then no longer count (R-079)."""
        needed = electorate.needed
        # The signer must not be revoked, even if the policy does not name it.
        if needed is None or len(self.approved_by) < needed or self.signer not in electorate.unrevoked:
            return False
        return len(electorate.eligible & self.approved_by) >= needed


@dataclass(frozen=True, slots=True)
class Electorate:
    """The keys whose approvals count at one moment."""

    unrevoked: frozenset[bytes]
    """The declared recovery keys that are not revoked."""
    eligible: frozenset[bytes]
    """Those of them that the policy names, or all of them if it names none."""
    needed: int | None
    """How many of these must approve; 1 without a policy, None if the policy cannot be met (R-085)."""


class Electors:
    """The recovery keys of one state under its policy, prepared for a thousand events in a row."""

    def __init__(self, keys: Iterable[KeyState], policy: RecoveryPolicy | None) -> None:
        self._keys = [key for key in keys if key.recovery]
        self._named = frozenset(key.public_key for key in self._keys)
        self._threshold = 1 if policy is None else policy.threshold
        self._has_policy = policy is not None
        self._known: tuple[int, float, Electorate] | None = None
        if policy is not None and policy.key_ids:
            # A policy may have a thousand names, and there are few keys: encoding keys is cheaper than
            # decoding names.
            named = set(policy.key_ids)
            spelled = {key_id.partition("#")[2] for key_id in named}
            self._named = frozenset(
                key.public_key
                for key in self._keys
                if key.key_id in named or key_multibase(key.public_key) in spelled
            )

    def at(self, moment: int) -> Electorate:
        """The electorate at this moment. It is computed again only if a revocation lies in between."""
        if self._known is not None and self._known[0] <= moment <= self._known[1]:
            return self._known[2]
        unrevoked = frozenset(
            key.public_key for key in self._keys if key.standing(moment, 0) is not KeyStanding.REVOKED
        )
        eligible = unrevoked & self._named
        needed = self._threshold
        if self._has_policy and (needed is None or not 1 <= needed <= len(eligible)):
            needed = None
        electorate = Electorate(unrevoked, eligible, needed)
        ends = (key.revoked_at for key in self._keys if key.revoked_at is not None)
        self._known = moment, min((end for end in ends if end >= moment), default=math.inf), electorate
        return electorate
