"""Recovery: pending events, and whose approval they need (RFC-0001 §5.3; R-079, R-084…R-088)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from strata.protocol.documents import RecoveryPolicy, spelled_key
from strata.protocol.keys.statements import KeyEvent
from strata.protocol.keys.states import KeyStanding, KeyState

__all__ = ["PendingEvent", "eligible_keys", "threshold"]


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event signed by a recovery key that has not taken effect."""

    packet_id: str
    event: KeyEvent
    signer: bytes
    due_at: int
    """When it has waited long enough; approvals never bring this forward (R-087)."""
    approved_by: frozenset[bytes]
    """The recovery keys that agree, the signer from the start (R-084)."""

    def approve(self, public_key: bytes) -> PendingEvent:
        """The same with one approval more; a second one by the same key changes nothing (R-082)."""
        return replace(self, approved_by=self.approved_by | {public_key})

    def is_approved(self, keys: Iterable[KeyState], policy: RecoveryPolicy | None, at: int) -> bool:
        """Whether enough keys agree at `at`; those revoked by then no longer do (R-079)."""
        keys = list(keys)
        # The signer stands for the event, whatever its part in the policy.
        if self.signer not in eligible_keys(keys, None, at):
            return False
        eligible = eligible_keys(keys, policy, at)
        needed = threshold(policy, eligible)
        return needed is not None and len(eligible & self.approved_by) >= needed


def eligible_keys(keys: Iterable[KeyState], policy: RecoveryPolicy | None, at: int) -> set[bytes]:
    """The declared, unrevoked recovery keys, or those of them that the policy names."""
    eligible = {
        key.public_key: key for key in keys if key.recovery and key.standing(at, 0) is not KeyStanding.REVOKED
    }
    if policy is None or not policy.key_ids:
        return set(eligible)
    named = set(policy.key_ids)
    spelled = {spelled_key(key_id) for key_id in named}
    return {key for key, state in eligible.items() if state.key_id in named or key in spelled}


def threshold(policy: RecoveryPolicy | None, eligible: set[bytes]) -> int | None:
    """How many eligible keys must agree, without a policy one; None if that cannot be met (R-085)."""
    if policy is None:
        return 1
    if policy.threshold is None or not 1 <= policy.threshold <= len(eligible):
        return None
    return policy.threshold
