"""Platform evidence: statements by Apple, Google or a C2PA signer about a device or an app (RFC-0002 §6.3).

Each format has its own verifier, which receives its roots and expectations when it is made. None is installed
by default: a relay without roots cannot check evidence, and evidence on a hardware claim that cannot be
checked counts as failed (R-222, A-086).

    strata.protocol.provenance.evidence.apple      apple-app-attest
    strata.protocol.provenance.evidence.play       play-integrity
    strata.protocol.provenance.evidence.c2pa       c2pa

They need the extra `strata-sdk[provenance]`.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Protocol

from strata.protocol.errors import ErrorCode, InvalidPacket

__all__ = ["MAX_EVIDENCE_BYTES", "EvidenceClaim", "EvidenceVerifier", "refuse_evidence"]

MAX_EVIDENCE_BYTES = 196_608
"""The largest payload accepted: in base64url it nearly fills the default largest packet."""


@dataclass(frozen=True, slots=True)
class EvidenceClaim:
    """The claim that the evidence must support."""

    origin_type: str
    genesis_media_hash: str | None
    app_ids: frozenset[str] | None = None
    """The apps that may have made the packet: the bundle or package names of a CLIENT_MANIFEST. None means
    the apps with which the verifier was configured."""


class EvidenceVerifier(Protocol):
    """Checks one format of evidence. Thread-safe; only computes, without a request to any service."""

    @property
    def format(self) -> str:
        """The `format` that this verifier checks."""
        ...

    def verify(self, payload: bytes, *, nonce: bytes | None, claim: EvidenceClaim, now: int) -> None:
        """Return if the evidence is valid. Raises `InvalidPacket` (`invalid_attestation`) otherwise.

        `nonce` is what the evidence must be bound to, None if it states none.
        """
        ...


def refuse_evidence(reason: str, detail: str) -> NoReturn:
    """Refuse evidence that fails, with `InvalidPacket` (R-217)."""
    raise InvalidPacket(ErrorCode.INVALID_ATTESTATION, reason, detail=detail)
