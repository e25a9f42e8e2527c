"""Provenance: a packet's claims about the origin of its media, and whether they hold (RFC-0002 §5–§12).

    origins       the four origins and their order
    attestation   client attestation: the software vouches for the claim; its keys are in `manifest`
    chains        issuer chains to a trusted root; X.509 in `x509`
    evidence      statements of platforms, each format a plug-in
    judgement     a relay's verdict: refuse, downgrade or accept the claim
    serving       a downgraded packet on the wire, and how to restore it
    history       a reader's verdict: edit histories and levels of trust

Everything here only computes, without a clock, network or store. The X.509 and evidence parts need the extra
`strata-sdk[provenance]` and are loaded at their first use.
"""

from __future__ import annotations

from strata.protocol.provenance.attestation import KeysOf, ManifestOf, attest
from strata.protocol.provenance.history import Level, level_of, platform_attested
from strata.protocol.provenance.judgement import REASONS, judge, needed_dids
from strata.protocol.provenance.origins import AI_MODEL, HARDWARE, ORIGIN_TYPES, SOFTWARE, UNKNOWN
from strata.protocol.provenance.serving import Downgrade, HeaderPlace, ServedForm, restore, served
from strata.protocol.provenance.trust import ProvenanceTrust, Root
from strata.protocol.provenance.verifying import VerifyingKey

__all__ = [
    "AI_MODEL",
    "HARDWARE",
    "ORIGIN_TYPES",
    "REASONS",
    "SOFTWARE",
    "UNKNOWN",
    "Downgrade",
    "HeaderPlace",
    "KeysOf",
    "Level",
    "ManifestOf",
    "ProvenanceTrust",
    "Root",
    "ServedForm",
    "VerifyingKey",
    "attest",
    "judge",
    "level_of",
    "needed_dids",
    "platform_attested",
    "restore",
    "served",
]
