"""X.509: certificate paths to a configured root (R-220). Needs `cryptography`, and is imported only when a
certificate is met.

The checks of a path: names chain and each signature is by the certificate above; every window covers `now`;
every issuer is a CA (basic constraints, path length, key usage); every critical extension is understood.
Revocation is not checked, because that would take the network. The rules of the web, such as host names and
extended key usages, do not apply here.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.provenance.trust import Root
from strata.protocol.provenance.verifying import VerifyingKey

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from cryptography.utils import CryptographyDeprecationWarning
except ImportError as error:
    raise ImportError(
        "certificates and platform evidence need a further library: pip install strata-sdk[provenance]"
    ) from error

__all__ = ["MAX_PATH_LENGTH", "CertifiedLeaf", "follow", "validate_path"]

MAX_PATH_LENGTH = 8
"""The most certificates in a path."""

_MIN_RSA_BITS, _MAX_RSA_BITS = 2048, 8192
_SOUND_HASHES = frozenset({"sha256", "sha384", "sha512"})
_UNDERSTOOD = (
    x509.BasicConstraints,
    x509.KeyUsage,
    x509.ExtendedKeyUsage,
    x509.SubjectAlternativeName,
    x509.CertificatePolicies,
)
"""Extensions that may be critical: the first two are applied, the others restrict nothing relevant here."""

# What the library raises for malformed certificates, and for those that it cannot handle.
_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    CryptographyDeprecationWarning,  # in programs that turn warnings into errors
)


class CertifiedLeaf(NamedTuple):
    """The first certificate of a valid path."""

    key: VerifyingKey
    names: frozenset[str]
    """Its common names and the URIs of its alternative names."""


def follow(
    certificates: Sequence[bytes], roots: Sequence[Root], *, now: int, clock_skew_seconds: int = 0
) -> CertifiedLeaf:
    """Validate a path (DER, leaf first) and return the leaf's key, Ed25519 or P-256, and names.

    Raises `InvalidPacket` (`invalid_issuer_chain`).
    """
    leaf = validate_path(certificates, roots, now=now, clock_skew_seconds=clock_skew_seconds)
    try:
        return CertifiedLeaf(_verifying_key(leaf.public_key()), _names(leaf))
    except _UNREADABLE:
        raise _broken("the leaf certificate cannot be read", "malformed_certificate") from None


def validate_path(
    certificates: Sequence[bytes], roots: Sequence[Root], *, now: int, clock_skew_seconds: int = 0
) -> x509.Certificate:
    """Validate a path (DER, leaf first, with the root or without) and return its leaf.

    Raises `InvalidPacket` (`invalid_issuer_chain`) with one of the details `malformed_certificate`,
    `chain_too_long`, `outside_validity`, `link_signature`, `not_an_authority`, `unrooted`.
    """
    if not 0 < len(certificates) <= MAX_PATH_LENGTH:
        raise _broken(f"a path has 1 to {MAX_PATH_LENGTH} certificates", "chain_too_long")
    try:
        path = [x509.load_der_x509_certificate(der) for der in certificates]
        path[0].public_key()  # keys are parsed on demand: a bad one must fail here and not in the caller
        # From the root down: a path without a root costs only one signature check.
        _check_anchored(path, certificates[-1], roots, now, clock_skew_seconds)
        for below, (child, issuer) in reversed(list(enumerate(itertools.pairwise(path)))):
            _check_authority(issuer, below)
            _check_issued_by(child, issuer)
        for certificate in path:
            _check_window(certificate, now, clock_skew_seconds)
            _check_extensions(certificate)
    except _UNREADABLE:
        raise _broken("a certificate cannot be read", "malformed_certificate") from None
    return path[0]


def _check_anchored(
    path: Sequence[x509.Certificate],
    last: bytes,
    roots: Sequence[Root],
    now: int,
    clock_skew_seconds: int,
) -> None:
    """Refuse a path unless its last certificate is a root, or a root has issued it."""
    for root in roots:
        if root.certificate is not None:
            if root.certificate == last:
                return
            anchor = x509.load_der_x509_certificate(root.certificate)
            if anchor.subject != path[-1].issuer or not _signs(anchor, path[-1]):
                continue
            _check_window(anchor, now, clock_skew_seconds)
            _check_authority(anchor, len(path) - 1)
            return
        if root.key is not None and _key_signs(root.key, path[-1]):
            return
    raise _broken("the chain ends at no root known here", "unrooted")


def _check_window(certificate: x509.Certificate, now: int, clock_skew_seconds: int) -> None:
    begins_at = certificate.not_valid_before_utc.timestamp()
    ends_at = certificate.not_valid_after_utc.timestamp()
    if not begins_at - clock_skew_seconds <= now <= ends_at + clock_skew_seconds:
        raise _broken("a certificate is not valid now", "outside_validity")


def _check_extensions(certificate: x509.Certificate) -> None:
    # RFC 5280 §4.2: a critical extension that is not understood makes the certificate unusable.
    for extension in certificate.extensions:
        if extension.critical and not isinstance(extension.value, _UNDERSTOOD):
            raise _broken("a certificate has a critical extension that is not known here", "not_understood")


def _check_authority(issuer: x509.Certificate, below: int) -> None:
    """RFC 5280 §6.1.4: check that the issuer is a CA, with no more CAs `below` it than it allows."""
    extensions = issuer.extensions
    try:
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound:
        raise _broken("an issuer is not a certificate authority", "not_an_authority") from None
    length = constraints.path_length
    if not constraints.ca or (length is not None and below > length):
        raise _broken("an issuer is not an authority for this path", "not_an_authority")
    try:
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        return
    if not usage.key_cert_sign:
        raise _broken("an issuer's key is not for certificates", "not_an_authority")


def _check_issued_by(child: x509.Certificate, issuer: x509.Certificate) -> None:
    if child.issuer != issuer.subject or not _signs(issuer, child):
        raise _broken("a certificate is not signed by its issuer", "link_signature")


def _signs(issuer: x509.Certificate, child: x509.Certificate) -> bool:
    key = issuer.public_key()
    # With a huge modulus one check takes seconds; a small one proves nothing.
    if isinstance(key, rsa.RSAPublicKey) and not _MIN_RSA_BITS <= key.key_size <= _MAX_RSA_BITS:
        return False
    algorithm = child.signature_hash_algorithm  # None for Ed25519
    if algorithm is not None and algorithm.name not in _SOUND_HASHES:
        return False
    try:
        child.verify_directly_issued_by(issuer)
    except InvalidSignature:
        return False
    return True


def _key_signs(key: VerifyingKey, certificate: x509.Certificate) -> bool:
    """Whether a root that is known only by its key has signed the certificate."""
    try:
        if key.algorithm == "ed25519":
            if certificate.signature_hash_algorithm is not None:
                return False
            return key.verify(certificate.tbs_certificate_bytes, certificate.signature)
        if not isinstance(certificate.signature_hash_algorithm, hashes.SHA256):
            return False
        point = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), key.value)
        point.verify(certificate.signature, certificate.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _verifying_key(key: CertificatePublicKeyTypes) -> VerifyingKey:
    if isinstance(key, ed25519.Ed25519PublicKey):
        return VerifyingKey.ed25519(key.public_bytes(Encoding.Raw, PublicFormat.Raw))
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return VerifyingKey("p256", key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint))
    raise _broken("the leaf's key is neither Ed25519 nor P-256", "unsupported_key")


def _names(certificate: x509.Certificate) -> frozenset[str]:
    common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    names = {str(attribute.value) for attribute in common}
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset(names)
    return frozenset(names.union(alternatives.get_values_for_type(x509.UniformResourceIdentifier)))


def _broken(reason: str, detail: str) -> InvalidPacket:
    return InvalidPacket(ErrorCode.INVALID_ISSUER_CHAIN, reason, detail=detail)
