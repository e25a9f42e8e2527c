"""Claims of every origin, valid ones and near misses, with the authorities behind them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from strata.protocol import fields, packets
from strata.protocol.ids import Identity, Signer, public_key_from_did
from strata.protocol.packets import Packet
from strata.protocol.provenance import (
    AI_MODEL,
    HARDWARE,
    SOFTWARE,
    Downgrade,
    ProvenanceTrust,
    Root,
    VerifyingKey,
    attest,
    judge,
)
from strata.protocol.provenance.chains import statement
from strata.protocol.provenance.judgement import claim_bytes

NOW = 1_760_000_000
YEAR = 31_536_000
AUTHOR = Identity(bytes(range(32)))
CLIENT = Identity(b"\x09" * 32)
DEVICE, MAKER, MODEL, ROOT = (Identity(bytes([n]) * 32) for n in (10, 11, 12, 13))
HELLO = packets.byte_hash(b"hello")
TRUST = ProvenanceTrust(model_roots=(Root.of_did(ROOT.did),), hardware_roots=(Root.of_did(ROOT.did),))
MEDIA = {"type": "POST", "text": "photo", "media": [{"media_hash": HELLO}]}

Header = dict[str, Any]
PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def link(issuer: Identity, subject: Identity, **window: int) -> dict[str, str]:
    """One link of a chain, in the statement form."""
    key = VerifyingKey.ed25519(subject.public_key)
    return statement(
        issuer, subject.did, key, **{"valid_from": NOW - YEAR, "valid_until": NOW + YEAR, **window}
    )


def chain_to_root(subject: Identity) -> list[dict[str, str]]:
    return [link(MAKER, subject), link(ROOT, MAKER, path_length=0)]


def signed_claim(signer: Identity, member: str, header: Header) -> Header:
    """The header with the claim signed into `member`; a member that is None is left out."""
    return header | {member: f"0x{signer.sign(claim_bytes(header)).hex()}"}


def model_header(**changes: Any) -> Header:
    header = {
        "origin_type": AI_MODEL,
        "genesis_media_hash": HELLO,
        "edit_history": [],
        "issuer_chain": chain_to_root(MODEL),
    }
    return signed_claim(MODEL, "issuer_signature", header) | changes


def hardware_header(**changes: Any) -> Header:
    header = {
        "origin_type": HARDWARE,
        "genesis_media_hash": HELLO,
        "edit_history": [],
        "device_id": DEVICE.did,
        "issuer_chain": chain_to_root(DEVICE),
    }
    return signed_claim(DEVICE, "device_signature", header) | changes


def software_header(**changes: Any) -> Header:
    return {"origin_type": SOFTWARE, "genesis_media_hash": HELLO, "edit_history": []} | changes


def without(header: Header, *members: str) -> Header:
    return {name: value for name, value in header.items() if name not in members}


def post(header: Mapping[str, Any], content: Mapping[str, Any] = MEDIA) -> Packet:
    """A packet with exactly this header."""
    return packets.build(AUTHOR, content, timestamp=NOW, provenance_header=header, allow_unattested=True)


def attested(header: Header, content: Mapping[str, Any] = MEDIA, client: Signer = CLIENT) -> Packet:
    """A packet with this header and the attestation of a client."""
    return attest(
        AUTHOR,
        client,
        "1.0.0",
        content,
        timestamp=NOW,
        origin_type=header["origin_type"],
        genesis_media_hash=header["genesis_media_hash"],
        header=header,
    )


def own_keys(did: str, at: int) -> tuple[bytes, ...]:
    key = public_key_from_did(did)
    return () if key is None else (key,)


def verdict(
    packet: Packet,
    trust: ProvenanceTrust = TRUST,
    *,
    now: int = NOW,
    keys_of: Any = own_keys,
    manifest: Packet | None = None,
) -> Downgrade | None:
    return judge(packet, now=now, trust=trust, keys_of=keys_of, manifest_of=lambda _: manifest)


def header_of(packet: Packet) -> Header:
    """The provenance header of a packet that has one."""
    header = packet.value["provenance_header"]
    assert isinstance(header, dict)
    return header


class Authority:
    """An X.509 certificate with its private key."""

    def __init__(self, name: str, key: PrivateKey, certificate: x509.Certificate) -> None:
        self.name = name
        self.key = key
        self.certificate = certificate

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def point(self) -> bytes:
        return self.key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)

    def sign(self, message: bytes) -> bytes:
        """r ‖ s, or R ‖ S."""
        if isinstance(self.key, ed25519.Ed25519PrivateKey):
            return self.key.sign(message)
        assert isinstance(self.key, ec.EllipticCurvePrivateKey)
        algorithm = hashes.SHA384() if self.key.key_size == 384 else hashes.SHA256()
        r, s = decode_dss_signature(self.key.sign(message, ec.ECDSA(algorithm)))
        size = self.key.key_size // 8
        return r.to_bytes(size, "big") + s.to_bytes(size, "big")

    @classmethod
    def make(
        cls,
        name: str,
        issuer: Authority | None = None,
        *,
        ca: bool = True,
        path_length: int | None = None,
        key: PrivateKey | None = None,
        uri: str | None = None,
        begins_at: int = NOW - YEAR,
        ends_at: int = NOW + YEAR,
        usage: x509.KeyUsage | None = None,
        extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (),
        digest: Any = None,
    ) -> Authority:
        key = key or ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
        signing_key = issuer.key if issuer else key
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.certificate.subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime.fromtimestamp(begins_at, datetime.UTC))
            .not_valid_after(datetime.datetime.fromtimestamp(ends_at, datetime.UTC))
        )
        if ca:
            extensions = ((x509.BasicConstraints(True, path_length), True), *extensions)
        if uri is not None:
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
            extensions = ((names, False), *extensions)
        if usage is not None:
            extensions = ((usage, True), *extensions)
        for value, critical in extensions:
            builder = builder.add_extension(value, critical)
        if digest is None and not isinstance(signing_key, ed25519.Ed25519PrivateKey):
            digest = hashes.SHA256()
        return cls(name, key, builder.sign(signing_key, digest))


def key_usage(*, key_cert_sign: bool) -> x509.KeyUsage:
    names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
        "key_cert_sign crl_sign encipher_only decipher_only"
    ).split()
    return x509.KeyUsage(**{name: name == "key_cert_sign" and key_cert_sign for name in names})


def x509_chain(subject: str, *authorities: Authority, issuer: str = "did:x509:root") -> list[dict[str, str]]:
    """An `issuer_chain` of certificates, leaf first."""
    names = [subject, *(f"did:x509:{authority.name}" for authority in authorities[1:]), issuer]
    return [
        {"subject": below, "issuer": above, "certificate": fields.unpadded_base64url(authority.der)}
        for below, above, authority in zip(names, names[1:], authorities, strict=False)
    ]
