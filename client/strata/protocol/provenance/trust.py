"""What one relay or reader trusts about origins: roots, verifiers, exclusions (R-219, R-222, R-237)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata.protocol.errors import IdentityError
from strata.protocol.ids import public_key_from_did
from strata.protocol.provenance.evidence import EvidenceVerifier
from strata.protocol.provenance.verifying import VerifyingKey

__all__ = ["ProvenanceTrust", "Root"]


@dataclass(frozen=True, slots=True)
class Root:
    """An authority at which an issuer chain may end: a name with its key, or an X.509 certificate."""

    name: str = ""
    """The DID that statements give as their issuer; may be empty for a certificate."""
    key: VerifyingKey | None = None
    certificate: bytes | None = None
    """In DER. X.509 paths are followed to this certificate, by name, validity and signature."""

    @classmethod
    def of_did(cls, did: str) -> Root:
        """The root that a self-certifying DID names. Raises `IdentityError` if `did` contains no key."""
        key = public_key_from_did(did)
        if key is None:
            raise IdentityError("a root named by its DID alone must carry its key")
        return cls(did, VerifyingKey.ed25519(key))


@dataclass(frozen=True, slots=True)
class ProvenanceTrust:
    """The settings of `judge`. Without roots every chain is unrooted (R-219)."""

    model_roots: tuple[Root, ...] = ()
    hardware_roots: tuple[Root, ...] = ()
    evidence: Mapping[str, EvidenceVerifier] = field(default_factory=dict)
    """The verifiers of platform evidence, by `format` (R-222)."""
    refused_clients: frozenset[str] = frozenset()
    """The DIDs of client software whose attestations are not accepted (R-237)."""
    clock_skew_seconds: int = 300
