"""What this relay trusts about origins: its roots and its verifiers of platform evidence (R-219, R-222).

The bootstrap file names them, and `evidence_plugins` adds verifiers of formats unknown to this program: each
is an entry point of the group `relayd.evidence`, called once without arguments, which returns a verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Final, TypeVar

import msgspec
from strata.protocol.provenance import Root, VerifyingKey
from strata.protocol.provenance.evidence import EvidenceVerifier

from relayd.config import ConfigurationError

# The modules that check evidence are imported only if configured: few relays need them; they slow a start.

__all__ = ["ENTRY_POINT_GROUP", "EvidenceFile", "load_verifiers", "read_roots", "read_verifiers"]

ENTRY_POINT_GROUP: Final = "relayd.evidence"

_Section = TypeVar("_Section")


class _AppAttest(msgspec.Struct, forbid_unknown_fields=True):
    roots: list[str]
    app_ids: list[str] = []
    development: bool = False


class _PlayIntegrity(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[str]
    packages: list[str] = []
    threshold: str = "MEETS_DEVICE_INTEGRITY"


class _C2pa(msgspec.Struct, forbid_unknown_fields=True):
    roots: list[str]


class EvidenceFile(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    """The member `evidence` of the bootstrap file."""

    apple_app_attest: _AppAttest | None = None
    play_integrity: _PlayIntegrity | None = None
    c2pa: _C2pa | None = None


def read_roots(texts: Mapping[str, str], member: str, problems: list[str]) -> tuple[Root, ...]:
    """The roots by name; each text that is not a root adds a sentence to `problems`."""
    roots = []
    for name, text in texts.items():
        key = VerifyingKey.read(text)
        try:
            roots.append(Root(name, key) if key else Root(name, certificate=_certificate(text)))
        except ValueError:
            problems.append(f"{member}: {name}: neither a key (base58btc or 0x) nor a certificate in PEM")
    return tuple(roots)


def read_verifiers(file: EvidenceFile, problems: list[str]) -> dict[str, EvidenceVerifier]:
    """The verifiers that the file configures, by format."""
    makers: list[tuple[str, Callable[[], EvidenceVerifier] | None]] = [
        ("apple-app-attest", _maker(file.apple_app_attest, _app_attest)),
        ("play-integrity", _maker(file.play_integrity, _play_integrity)),
        ("c2pa", _maker(file.c2pa, _c2pa)),
    ]
    verifiers: dict[str, EvidenceVerifier] = {}
    for format_, make in makers:
        if make is None:
            continue
        try:
            verifiers[format_] = make()
        except (ValueError, KeyError) as error:
            problems.append(f"evidence: {format_}: {error}")
    return verifiers


def load_verifiers(names: Iterable[str]) -> dict[str, EvidenceVerifier]:
    """The verifiers of installed plug-ins, by format. Raises `ConfigurationError` if a plug-in is missing."""
    wanted = tuple(names)
    # Python looks for plug-ins in every installed package, which takes a while.
    offered = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)} if wanted else {}
    problems: list[str] = []
    verifiers: dict[str, EvidenceVerifier] = {}
    for name in wanted:
        if name not in offered:
            problems.append(f"evidence_plugins: no installed package offers {name!r} in {ENTRY_POINT_GROUP}")
            continue
        try:
            verifier: EvidenceVerifier = offered[name].load()()
            verifiers[verifier.format] = verifier
        except Exception as error:  # a foreign module may raise anything; the relay does not start without it
            problems.append(f"evidence_plugins: {name}: {type(error).__name__}: {error}")
    if problems:
        raise ConfigurationError(problems)
    return verifiers


def _maker(
    section: _Section | None, make: Callable[[_Section], EvidenceVerifier]
) -> Callable[[], EvidenceVerifier] | None:
    return None if section is None else lambda: make(section)


def _app_attest(section: _AppAttest) -> EvidenceVerifier:
    from strata.protocol.provenance.evidence.apple import AppAttestVerifier

    roots = [_certificate(text) for text in section.roots]
    return AppAttestVerifier(roots=roots, app_ids=section.app_ids, development=section.development)


def _play_integrity(section: _PlayIntegrity) -> EvidenceVerifier:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
    from strata.protocol.provenance.evidence.play import DeviceVerdict, PlayIntegrityVerifier

    keys = [
        load_pem_public_key(text.encode()).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        for text in section.keys
    ]
    threshold = DeviceVerdict[section.threshold]
    return PlayIntegrityVerifier(keys=keys, packages=section.packages, threshold=threshold)


def _c2pa(section: _C2pa) -> EvidenceVerifier:
    from strata.protocol.provenance.evidence.c2pa import C2paVerifier

    return C2paVerifier(roots=[_certificate(text) for text in section.roots])


def _certificate(text: str) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    return x509.load_pem_x509_certificate(text.encode()).public_bytes(Encoding.DER)
