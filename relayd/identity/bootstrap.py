"""The bootstrap file: an operator's statements about identities (RFC-0001 §3.4, R-056).

One JSON object; every member is optional, and an unknown member is an error:

    did_documents       DID documents, trusted as they stand (A-021)
    keys                DID → Ed25519 key in base58btc multibase, for DIDs without a document (R-048)
    clock_skew_seconds  60 to 300; takes precedence over the setting of this name (R-064)
    model_roots         who may vouch for `AI_MODEL` (R-219): name → key, or X.509 certificate in PEM
    hardware_roots      the same for `HARDWARE_SECURE_ENCLAVE`
    evidence            platform evidence that is verified here (R-222), by format:
                        apple-app-attest {"roots": [PEM…], "app_ids": […], "development": false}
                        play-integrity   {"keys": [PEM…], "packages": […], "threshold": "MEETS_…"}
                        c2pa             {"roots": [PEM…]}
    relays, did_docs    for clients, which may read the same file
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from strata.protocol import canonical
from strata.protocol.documents import DidDocument
from strata.protocol.errors import IdentityError, InvalidInput
from strata.protocol.ids import is_did, public_key_from_method
from strata.protocol.keys import KeyRules, allowed_clock_skew
from strata.protocol.provenance import ProvenanceTrust, Root
from strata.protocol.provenance.evidence import EvidenceVerifier
from strata.protocol.text_files import utf8_of

from relayd.config import ConfigurationError, Settings
from relayd.identity.origins import EvidenceFile, load_verifiers, read_roots, read_verifiers

__all__ = ["BootstrapContents", "effective_clock_skew", "key_rules", "read_bootstrap", "trust_of"]

_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class BootstrapContents:
    """The contents of the file; the default stands for no file."""

    documents: Mapping[str, tuple[DidDocument, ...]] = field(default_factory=dict)
    keys: Mapping[str, bytes] = field(default_factory=dict)
    clock_skew_seconds: int | None = None
    model_roots: tuple[Root, ...] = ()
    hardware_roots: tuple[Root, ...] = ()
    evidence: Mapping[str, EvidenceVerifier] = field(default_factory=dict)

    def names(self) -> frozenset[str]:
        """The DIDs that the file says anything about."""
        return frozenset(self.documents) | frozenset(self.keys)


class _File(msgspec.Struct):
    did_documents: list[msgspec.Raw] = []
    keys: dict[str, str] = {}
    clock_skew_seconds: int | None = None
    model_roots: dict[str, str] = {}
    hardware_roots: dict[str, str] = {}
    # For clients, which read the same file (`strata.relays.bootstrap`); a relay has no use for them.
    relays: msgspec.Raw = msgspec.Raw(b"[]")
    did_docs: msgspec.Raw = msgspec.Raw(b"[]")
    evidence: EvidenceFile = msgspec.field(default_factory=EvidenceFile)


def read_bootstrap(path: Path | None) -> BootstrapContents:
    """Read the file. Raises `ConfigurationError` with all problems of the file."""
    if path is None:
        return BootstrapContents()
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ConfigurationError([f"{path}: larger than {_MAX_BYTES} bytes"])
        text = utf8_of(text)
        members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        decoded = msgspec.json.decode(text, type=_File)
    except OSError as error:
        raise ConfigurationError([f"{path}: {error.strerror}"]) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigurationError([f"{path}: {error}"]) from None
    problems = [_unknown(name) for name in members if name not in _File.__struct_fields__]
    bootstrap = BootstrapContents(
        documents=_documents(decoded.did_documents, problems),
        keys=_keys(decoded.keys, problems),
        clock_skew_seconds=decoded.clock_skew_seconds,
        model_roots=read_roots(decoded.model_roots, "model_roots", problems),
        hardware_roots=read_roots(decoded.hardware_roots, "hardware_roots", problems),
        evidence=read_verifiers(decoded.evidence, problems),
    )
    if problems:
        raise ConfigurationError(f"{path}: {problem}" for problem in problems)
    return bootstrap


def effective_clock_skew(setting: int, bootstrap: BootstrapContents) -> int:
    """The clock skew in use, in seconds: the file's value takes precedence over the setting's (R-064)."""
    return allowed_clock_skew(
        setting if bootstrap.clock_skew_seconds is None else bootstrap.clock_skew_seconds
    )


def key_rules(settings: Settings, bootstrap: BootstrapContents) -> KeyRules:
    """This relay's rules for the validity of keys."""
    return KeyRules(
        clock_skew_seconds=effective_clock_skew(settings.clock_skew_seconds, bootstrap),
        recovery_delay_seconds=settings.recovery_delay_seconds,
    )


def trust_of(settings: Settings, bootstrap: BootstrapContents) -> ProvenanceTrust:
    """The roots and verifiers that this relay trusts. Raises `ConfigurationError` if a plug-in is missing."""
    return ProvenanceTrust(
        model_roots=bootstrap.model_roots,
        hardware_roots=bootstrap.hardware_roots,
        evidence={**bootstrap.evidence, **load_verifiers(settings.evidence_plugins)},
        refused_clients=frozenset(settings.refused_clients),
        clock_skew_seconds=effective_clock_skew(settings.clock_skew_seconds, bootstrap),
    )


def _documents(raws: list[msgspec.Raw], problems: list[str]) -> dict[str, tuple[DidDocument, ...]]:
    documents: dict[str, tuple[DidDocument, ...]] = {}
    for number, raw in enumerate(raws):
        try:
            _, text = canonical.parse(bytes(raw))
            document = DidDocument.parse(text)
        except InvalidInput as error:
            problems.append(f"did_documents[{number}]: {error.reason}")
        else:
            documents[document.did] = (*documents.get(document.did, ()), document)
    return documents


def _keys(texts: Mapping[str, str], problems: list[str]) -> dict[str, bytes]:
    keys: dict[str, bytes] = {}
    for did, text in texts.items():
        try:
            if not is_did(did):
                raise IdentityError("not a DID")
            keys[did] = public_key_from_method(None, text)
        except IdentityError as error:
            problems.append(f"keys: {did}: {error}")
    return keys


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name, _File.__struct_fields__, n=1, cutoff=0.0)
    return f"unknown member {name}; the nearest is {nearest[0]}"
