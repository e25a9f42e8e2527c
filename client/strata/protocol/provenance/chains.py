"""Issuer chains: from the key of a device or model, link by link, to a trusted root (RFC-0002 §6, §10).

    issuer_chain[0]   {subject: the device or model, issuer: its maker, certificate}
    issuer_chain[1]   {subject: the maker, issuer: …, certificate}
    …                 the last issuer is a root (A-084)

A certificate is base64url of a canonical JSON statement `{subject, issuer, public_key, valid_from,
valid_until, path_length, signature}`, signed by the issuer over the rest of it, or of an X.509 certificate in
DER; its first byte says which. A chain is of one form throughout. Statements are read here, certificates in
`strata.protocol.provenance.x509`, which needs the extra `relayd[provenance]`.

A root may issue. Any other subject may issue only where its own statement has a `path_length`: how many
issuers may stand between it and the first subject, as in X.509. Without that rule, a device that a root knows
could speak for all other devices (decision 41).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from strata.protocol import canonical, fields
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Signer
from strata.protocol.provenance.trust import Root
from strata.protocol.provenance.verifying import SIGNATURE_BYTES, VerifyingKey

__all__ = ["MAX_CERTIFICATE_BYTES", "MAX_CHAIN_LENGTH", "CertifiedChain", "follow_chain", "statement"]

MAX_CHAIN_LENGTH = 8
"""Most links of a chain; each costs a signature check."""

MAX_CERTIFICATE_BYTES = 16_384
"""Largest certificate read."""

_STATEMENT_DEPTH = 4
_NO_AUTHORITY = -1
_OBJECT = ord("{")


@dataclass(frozen=True, slots=True)
class CertifiedChain:
    """A chain that holds at the time it was followed."""

    subject: str
    """Whom the first link speaks of."""
    keys: tuple[VerifyingKey, ...]
    """The key of each subject and at last the root's; of X.509, the first subject's alone."""
    names_subject: bool
    """The signed certificate itself names `subject`, and not just the entry that carries it."""


@dataclass(frozen=True, slots=True)
class _Link:
    subject: str
    issuer: str
    certificate: bytes


def follow_chain(
    chain: object, roots: Sequence[Root], *, now: int, clock_skew_seconds: int = 0
) -> CertifiedChain:
    """Follow an `issuer_chain` to one of the roots (R-219, R-220).

    Validity windows are judged at `now`, widened by the skew. Raises `InvalidPacket`: `missing_proof` for
    an absent or empty chain, `invalid_issuer_chain` for one that is broken, outdated or unrooted.
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

    `path_length` lets the subject issue statements itself, with so many issuers below it; 0 lets it speak for
    devices and models alone, None for nobody.
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
    """Raise the refusal of a chain that does not hold (R-217)."""
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
    # From the root down: no key is used before somebody trusted has spoken for it.
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
    """The key that this statement certifies, once it has proved to be the issuer's, and its `path_length`;
    -1 where the subject may not issue."""
    members = _parse_statement(link.certificate)
    if members.get("subject") != link.subject or members.get("issuer") != link.issuer:
        refuse_chain("a statement speaks of others than its entry does", "statement_mismatch")
    key = VerifyingKey.read(members.get("public_key"))
    valid_from, valid_until = fields.integer(members.get("valid_from")), members.get("valid_until")
    # As with keys: 0, null or absent is an open end (relay.md §4).
    ends_at = 0 if valid_until is None else fields.integer(valid_until)
    path_length = _path_length(members.get("path_length"))
    signature = fields.hex_bytes(members.pop("signature", None), SIGNATURE_BYTES)
    if key is None or valid_from is None or ends_at is None or signature is None or path_length is None:
        refuse_chain("a statement lacks a member or has one of the wrong form", "malformed_statement")
    if now < valid_from - clock_skew_seconds or (ends_at and now > ends_at + clock_skew_seconds):
        refuse_chain("a certificate is not valid now", "outside_validity")
    text = canonical.encode(members)
    if not any(issuer.verify(text, signature) for issuer in issuers):
        refuse_chain("a certificate is not signed by its issuer", "link_signature")
    return key, path_length


def _path_length(value: object) -> int | None:
    """What a statement says of its subject's right to issue; None where that is no count."""
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
    # Imported where it is used: a client that meets no certificates needs no X.509 library.
    from strata.protocol.provenance.x509 import follow

    certificates = [link.certificate for link in links]
    anchors = [root for root in roots if root.certificate or root.name == links[-1].issuer]
    leaf = follow(certificates, anchors, now=now, clock_skew_seconds=clock_skew_seconds)
    return CertifiedChain(links[0].subject, (leaf.key,), names_subject=links[0].subject in leaf.names)


def read_chain_signature(header: Mapping[str, object]) -> Any:
    """Where the issuer's signature over the claim stands: in the header, or in the last link."""
    if header.get("issuer_signature") is not None:
        return header["issuer_signature"]
    chain = header.get("issuer_chain")
    last = chain[-1] if type(chain) is list and chain else None
    return last.get("signature") if type(last) is dict else None
