"""Issuer chains: from the key of a device or model, link by link, to a trusted root (RFC-0002 §6, §10).

    issuer_chain[0]   {subject: the device or model, issuer: its maker, certificate}
    issuer_chain[1]   {subject: the maker, issuer: …, certificate}
    …                 the last issuer is a root (A-084)

A certificate is the base64url of an X.509 certificate in DER, or of a canonical JSON statement `{subject,
issuer, public_key, valid_from, valid_until, path_length, signature}`, in which the issuer signs the other
members; the first byte tells the two apart. All certificates of a chain have the same form. This module reads
statements, and `strata.protocol.provenance.x509`, which needs the extra `provenance`, certificates.

A root may issue. Any other subject may issue only if its own statement has a `path_length`: the number of
issuers allowed between it and the first subject, as in X.509. Without that rule, a device that a root has
certified could vouch for any other device (decision 41).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from strata.protocol import canonical, fields
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Signer
from strata.protocol.provenance.trust import Root
from strata.protocol.provenance.verifying import SIGNATURE_BYTES, VerifyingKey

__all__ = ["MAX_CERTIFICATE_BYTES", "MAX_CHAIN_LENGTH", "CertifiedChain", "follow_chain", "statement"]

MAX_CHAIN_LENGTH = 8
"""The most links in a chain; each costs a signature check."""

MAX_CERTIFICATE_BYTES = 16_384
"""The largest certificate accepted, in bytes."""

_STATEMENT_DEPTH = 4
_NO_AUTHORITY = -1
_OBJECT = ord("{")


@dataclass(frozen=True, slots=True)
class CertifiedChain:
    """A chain that was valid when it was followed."""

    subject: str
    """The subject of the first link."""
    keys: tuple[VerifyingKey, ...]
    """The key of each subject, followed by the root's; with X.509, only the first subject's."""
    names_subject: bool
    """Whether the signed certificate itself names `subject`, and not only the entry that contains it."""


@dataclass(frozen=True, slots=True)
class _Link:
    subject: str
    issuer: str
    certificate: bytes


def follow_chain(
    chain: object, roots: Sequence[Root], *, now: int, clock_skew_seconds: int = 0
) -> CertifiedChain:
    """Follow an `issuer_chain` to one of the roots (R-219, R-220).

    Validity windows are judged at `now`, widened by the skew. Raises `InvalidPacket`: `missing_proof` if
    the chain is absent or empty, `invalid_issuer_chain` if it is broken, outside its validity or unrooted.
    """
    if chain is None or chain == []:
        raise InvalidPacket(ErrorCode.MISSING_PROOF, "the claim needs an issuer_chain", detail="issuer_chain")
    links = _read_links(chain)
    for link, above in itertools.pairwise(links):
        if link.issuer != above.subject:
            refuse_chain("each issuer must be the next subject", "issuer_mismatch")
    statements = sum(link.certificate[0] == _OBJECT for link in links)
    if statements == len(links):
        return _follow_statements(links, roots, now, clock_skew_seconds)
    if statements:
        refuse_chain("statements and X.509 certificates do not mix in one chain", "mixed_forms")
    return _follow_certificates(links, roots, now, clock_skew_seconds)


def statement(
    issuer: Signer,
    subject: str,
    public_key: VerifyingKey,
    *,
    valid_from: int,
    valid_until: int,
    path_length: int | None = None,
) -> dict[str, str]:
    """One entry of an `issuer_chain` in the statement form, signed by `issuer`.

    `path_length` allows the subject to issue statements itself, with at most that number of issuers below it:
    with 0 it may issue only for devices and models, with None for nobody.
    """
    body: dict[str, object] = {} if path_length is None else {"path_length": path_length}
    body |= {
        "subject": subject,
        "issuer": issuer.did,
        "public_key": f"0x{public_key.value.hex()}",
        "valid_from": valid_from,
        "valid_until": valid_until,
    }
    body["signature"] = f"0x{issuer.sign(canonical.encode(body)).hex()}"
    certificate = fields.unpadded_base64url(canonical.encode(body))
    return {"subject": subject, "issuer": issuer.did, "certificate": certificate}


def refuse_chain(reason: str, detail: str) -> NoReturn:
    """Refuse a chain that is not valid, with `InvalidPacket` (R-217)."""
    raise InvalidPacket(ErrorCode.INVALID_ISSUER_CHAIN, reason, detail=detail)


def _read_links(chain: object) -> list[_Link]:
    if type(chain) is not list:
        refuse_chain("issuer_chain is not an array", "malformed_chain")
    if len(chain) > MAX_CHAIN_LENGTH:
        refuse_chain(f"issuer_chain has more than {MAX_CHAIN_LENGTH} links", "chain_too_long")
    links = []
    for entry in chain:
        members = entry if type(entry) is dict else {}
        subject, issuer = members.get("subject"), members.get("issuer")
        certificate = fields.base64url(members.get("certificate"), MAX_CERTIFICATE_BYTES)
        if type(subject) is not str or type(issuer) is not str or not certificate:
            refuse_chain("a link lacks a member or has one of the wrong form", "malformed_chain")
        links.append(_Link(subject, issuer, certificate))
    return links


def _follow_statements(
    links: Sequence[_Link], roots: Sequence[Root], now: int, clock_skew_seconds: int
) -> CertifiedChain:
    # From the root down, so that no key is used before a trusted issuer has certified it.
    issuers = tuple(root.key for root in roots if root.key is not None and root.name == links[-1].issuer)
    if not issuers:
        refuse_chain("the chain ends at no root known here", "unrooted")
    keys = list(issuers)
    root_keys = frozenset(issuers)
    for below, link in reversed(list(enumerate(links))):
        key, path_length = _check_statement(link, issuers, now, clock_skew_seconds)
        if key not in root_keys and below > path_length + 1:
            refuse_chain("an issuer is not an authority for this path", "not_an_authority")
        issuers = (key,)
        keys.append(key)
    return CertifiedChain(links[0].subject, tuple(reversed(keys)), names_subject=True)


def _check_statement(
    link: _Link, issuers: Sequence[VerifyingKey], now: int, clock_skew_seconds: int
) -> tuple[VerifyingKey, int]:
    """Check that this statement is by the issuer. Returns the key that it certifies and its `path_length`,
    -1 if the subject may not issue."""
    members = _parse_statement(link.certificate)
    if members.get("subject") != link.subject or members.get("issuer") != link.issuer:
        refuse_chain("a statement speaks of others than its entry does", "statement_mismatch")
    key = VerifyingKey.read(members.get("public_key"))
    valid_from, valid_until = fields.integer(members.get("valid_from")), members.get("valid_until")
    # As with keys, 0, null and absence mean no end (relay.md §4).
    ends_at = 0 if valid_until is None else fields.integer(valid_until)
    path_length = _path_length(members.get("path_length"))
    signature = fields.hex_bytes(members.get("signature"), SIGNATURE_BYTES)
    if key is None or valid_from is None or ends_at is None or signature is None or path_length is None:
        refuse_chain("a statement lacks a member or has one of the wrong form", "malformed_statement")
    if now < valid_from - clock_skew_seconds or (ends_at and now > ends_at + clock_skew_seconds):
        refuse_chain("a certificate is not valid now", "outside_validity")
    text = canonical.without(link.certificate, "signature")
    if not any(issuer.verify(text, signature) for issuer in issuers):
        refuse_chain("a certificate is not signed by its issuer", "link_signature")
    return key, path_length


def _path_length(value: object) -> int | None:
    """The value of a statement's `path_length`; -1 if the subject may not issue, None if malformed."""
    if value is None:
        return _NO_AUTHORITY
    length = fields.integer(value)
    return length if length is not None and length >= 0 else None


def _parse_statement(certificate: bytes) -> dict[str, object]:
    try:
        members, text = canonical.parse(certificate, max_depth=_STATEMENT_DEPTH)
    except InvalidPacket:
        refuse_chain("a certificate is not JSON", "malformed_statement")
    if type(members) is not dict or text != certificate:
        refuse_chain("a statement is not in canonical form", "malformed_statement")
    result: dict[str, object] = members
    return result


def _follow_certificates(
    links: Sequence[_Link], roots: Sequence[Root], now: int, clock_skew_seconds: int
) -> CertifiedChain:
    # Imported only here: a client that meets no certificates needs no X.509 library.
    from strata.protocol.provenance.x509 import follow

    certificates = [link.certificate for link in links]
    anchors = [root for root in roots if root.certificate or root.name == links[-1].issuer]
    leaf = follow(certificates, anchors, now=now, clock_skew_seconds=clock_skew_seconds)
    return CertifiedChain(links[0].subject, (leaf.key,), names_subject=links[0].subject in leaf.names)


def read_chain_signature(header: Mapping[str, object]) -> object:
    """The issuer's signature over the claim, from the header or from the last link."""
    if header.get("issuer_signature") is not None:
        return header["issuer_signature"]
    chain = header.get("issuer_chain")
    last = chain[-1] if type(chain) is list and chain else None
    return last.get("signature") if type(last) is dict else None
