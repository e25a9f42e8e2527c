"""Platform evidence: statements by Apple, Google or a C2PA signer about a device or an app (RFC-0002 §6.3).

Each format has a verifier of its own, which is told its roots and expectations when it is made. None is
installed by default: a relay without roots cannot check evidence, and evidence on a hardware claim that
cannot be checked counts as failed (R-222, A-086).

    strata.protocol.provenance.evidence.apple      apple-app-attest
    strata.protocol.provenance.evidence.play       play-integrity
    strata.protocol.provenance.evidence.c2pa       c2pa

They need the extra `relayd[provenance]`.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Protocol

from strata.protocol.errors import ErrorCode, InvalidPacket

__all__ = ["MAX_EVIDENCE_BYTES", "EvidenceClaim", "EvidenceVerifier", "refuse_evidence"]

MAX_EVIDENCE_BYTES = 196_608
"""Largest payload looked at: in base64url it nearly fills the largest packet by default."""


@dataclass(frozen=True, slots=True)
class EvidenceClaim:
    """What the evidence must speak for."""

    origin_type: str
    genesis_media_hash: str | None
    app_ids: frozenset[str] | None = None
    """The apps that may have made it: the bundle or package names of a CLIENT_MANIFEST; None leaves it to
    what the verifier was configured with."""


class EvidenceVerifier(Protocol):
    """Checks one format of evidence. Thread-safe; computes only, without asking any service."""

    @property
    def format(self) -> str:
        """The `format` this verifier is for."""
        ...

    def verify(self, payload: bytes, *, nonce: bytes | None, claim: EvidenceClaim, now: int) -> None:
        """Accept the evidence by returning. `nonce` is what it must be bound to, None if its format has none.

        Raises `InvalidPacket` (`invalid_attestation`) otherwise.
        """
        ...


def refuse_evidence(reason: str, detail: str) -> NoReturn:
    """Raise the refusal of evidence that fails (R-217)."""
    raise InvalidPacket(ErrorCode.INVALID_ATTESTATION, reason, detail=detail)
