"""Issuer chains in both forms, with every possible fault of a link."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import canonical, fields
from strata.protocol.errors import ErrorCode, IdentityError, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.provenance import Root, VerifyingKey
from strata.protocol.provenance.chains import MAX_CHAIN_LENGTH, follow_chain, statement
from strata.protocol.provenance.judgement import claim_bytes
from strata.protocol.provenance.p256 import verify_p256
from strata.protocol.provenance.x509 import MAX_PATH_LENGTH, validate_path

from tests.support.made_origins import (
    DEVICE,
    MAKER,
    NOW,
    ROOT,
    TRUST,
    YEAR,
    Authority,
    attested,
    chain_to_root,
    hardware_header,
    key_usage,
    link,
    signed_claim,
    verdict,
    x509_chain,
)

ROOTS = (Root.of_did(ROOT.did),)
DEVICE_ID = "did:device:camera-1"


def fault(chain: Any, roots: Any = ROOTS, now: int = NOW, skew: int = 0) -> str | None:
    """The detail of the refusal, whose code is always INVALID_ISSUER_CHAIN; None if the chain holds."""
    try:
        follow_chain(chain, roots, now=now, clock_skew_seconds=skew)
    except InvalidPacket as error:
        assert error.code == ErrorCode.INVALID_ISSUER_CHAIN
        return error.detail
    return None


def restated(entry: dict[str, str], **changes: Any) -> dict[str, str]:
    """The entry with other members in its statement and the old signature."""
    members, _ = canonical.parse(fields.base64url(entry["certificate"], 4096) or b"")
    assert isinstance(members, dict)
    body = canonical.encode(
        {name: value for name, value in {**members, **changes}.items() if value != "drop"}
    )
    return entry | {"certificate": fields.unpadded_base64url(body)}


# --- Statements -----------------------------------------------------------------------------------------


@pytest.mark.req("R-220")
def test_statements_lead_to_a_root_by_name_and_key() -> None:
    chain = follow_chain(chain_to_root(DEVICE), ROOTS, now=NOW)
    assert chain.subject == DEVICE.did
    assert chain.names_subject
    assert [key.value for key in chain.keys] == [key.public_key for key in (DEVICE, MAKER, ROOT)]
    assert fault([link(ROOT, DEVICE)]) is None
    # The root may add a statement about itself, and may have had an earlier key.
    assert fault([link(ROOT, DEVICE), link(ROOT, ROOT)]) is None
    renewed = (Root(ROOT.did, VerifyingKey.ed25519(MAKER.public_key)), *ROOTS)
    assert fault(chain_to_root(DEVICE), renewed) is None


@pytest.mark.req("R-220", "R-217")
def test_a_broken_link_breaks_the_chain() -> None:
    device, maker = chain_to_root(DEVICE)
    other = Identity(b"\x41" * 32)
    assert fault([maker, device]) == "issuer_mismatch"
    assert fault([device]) == "unrooted"
    assert fault([device, link(other, MAKER)]) == "unrooted"
    assert fault([link(other, DEVICE) | {"issuer": MAKER.did}, maker]) == "statement_mismatch"
    assert fault([device | {"subject": other.did}, maker]) == "statement_mismatch"
    assert fault([restated(device, subject=other.did) | {"subject": other.did}, maker]) == "link_signature"
    assert fault([device, restated(maker, public_key=f"0x{other.public_key.hex()}")]) == "link_signature"
    assert fault([device, restated(maker, extra=1)]) == "link_signature"
    assert fault([restated(device, signature="0x" + "00" * 64), maker]) == "link_signature"
    forged_root = (Root(ROOT.did, VerifyingKey.ed25519(other.public_key)),)
    assert fault([device, maker], forged_root) == "link_signature"


@pytest.mark.req("R-220")
@pytest.mark.parametrize("member", ["subject", "issuer", "public_key", "valid_from", "signature"])
def test_a_statement_has_all_its_members(member: str) -> None:
    device, maker = chain_to_root(DEVICE)
    expected = "statement_mismatch" if member in ("subject", "issuer") else "malformed_statement"
    assert fault([restated(device, **{member: "drop"}), maker]) == expected
    assert fault([restated(device, **{member: 1.5}), maker]) == expected


@pytest.mark.req("R-220")
def test_windows_are_judged_now_and_widened_by_the_skew() -> None:
    chain = [link(ROOT, DEVICE, valid_from=NOW, valid_until=NOW + 100)]
    assert [fault(chain, now=NOW + after) for after in (-1, 0, 100, 101)] == [
        "outside_validity",
        None,
        None,
        "outside_validity",
    ]
    assert [fault(chain, now=NOW + after, skew=60) for after in (-61, -60, 160, 161)] == [
        "outside_validity",
        None,
        None,
        "outside_validity",
    ]
    assert fault([link(ROOT, DEVICE, valid_until=0)], now=NOW + 100 * YEAR) is None
    expired_maker = [link(MAKER, DEVICE), link(ROOT, MAKER, valid_until=NOW - 1)]
    assert fault(expired_maker) == "outside_validity"


@pytest.mark.req("R-220")
@pytest.mark.parametrize("until", ["soon", str(NOW + YEAR), True, 1.5, [], {}])
def test_an_end_that_is_no_time_is_no_open_end(until: Any) -> None:
    """The root signed it all the same, but an unreadable end must not mean that the statement never ends."""
    assert fault([link(ROOT, DEVICE, valid_until=until)]) == "malformed_statement"
    assert fault([link(ROOT, DEVICE, valid_until=None)], now=NOW + 100 * YEAR) is None  # type: ignore[arg-type]


@pytest.mark.req("R-220")
@pytest.mark.parametrize("member", ["subject", "issuer"])
@pytest.mark.parametrize("value", [None, 5, ["x"], {}])
def test_a_link_names_whom_it_speaks_of_in_text(member: str, value: Any) -> None:
    assert fault([link(ROOT, DEVICE) | {member: value}]) == "malformed_chain"


@pytest.mark.req("R-220")
def test_a_statement_is_canonical() -> None:
    entry = link(ROOT, DEVICE)
    text = fields.base64url(entry["certificate"], 4096) or b""
    spaced = entry | {"certificate": fields.unpadded_base64url(text.replace(b",", b", "))}
    assert fault([spaced]) == "malformed_statement"
    for garbage in (b"{", b"{}", b'{"a":1,"a":1}', b"{" * 100):
        assert fault([entry | {"certificate": fields.unpadded_base64url(garbage)}]) in (
            "malformed_statement",
            "statement_mismatch",
        )


@pytest.mark.req("R-220")
def test_a_device_that_a_root_knows_speaks_for_no_other_device() -> None:
    camera, other = DEVICE, Identity(b"\x42" * 32)
    assert fault([link(camera, other), link(ROOT, camera)]) == "not_an_authority"
    assert fault([link(camera, other), *chain_to_root(camera)]) == "not_an_authority"
    with pytest.raises(InvalidPacket):
        header = hardware_header(issuer_chain=[link(camera, other), *chain_to_root(camera)])
        verdict(attested(signed_claim(other, "device_signature", header | {"device_id": other.did})))


@pytest.mark.req("R-220")
def test_a_path_length_counts_the_issuers_below() -> None:
    maker, plant = MAKER, Identity(b"\x43" * 32)
    for allowed, detail in ((0, "not_an_authority"), (1, None)):
        chain = [
            link(plant, DEVICE),
            link(maker, plant, path_length=5),
            link(ROOT, maker, path_length=allowed),
        ]
        assert fault(chain) == detail
    unmarked, marked = link(ROOT, MAKER), link(ROOT, MAKER, path_length=0)
    assert fault([link(MAKER, DEVICE), restated(unmarked, path_length=0)]) == "link_signature"
    assert fault([link(MAKER, DEVICE), restated(marked, path_length="drop")]) == "link_signature"


@pytest.mark.parametrize("length", [-1, 1.5, True, "0", [0]])
def test_a_path_length_is_a_count(length: Any) -> None:
    entry = restated(link(ROOT, MAKER, path_length=0), path_length=length)
    assert fault([link(MAKER, DEVICE), entry]) == "malformed_statement"


_ISSUERS = [Identity(bytes([150 + n]) * 32) for n in range(MAX_CHAIN_LENGTH)]


@pytest.mark.req("R-220")
@given(st.lists(st.none() | st.integers(0, MAX_CHAIN_LENGTH), min_size=1, max_size=MAX_CHAIN_LENGTH))
def test_no_chain_holds_in_which_somebody_issues_who_was_not_told_to(lengths: list[int | None]) -> None:
    """Link n of the chain is about subject n, and lets it issue as `lengths[n]` says."""
    names = [*_ISSUERS[: len(lengths)], ROOT]
    chain = [
        link(above, subject, **({} if length is None else {"path_length": length}))
        for (subject, above), length in zip(itertools.pairwise(names), lengths, strict=True)
    ]
    authorised = all(
        length is not None and length >= issuers_below for issuers_below, length in enumerate(lengths[1:])
    )
    assert fault(chain) == (None if authorised else "not_an_authority")


@pytest.mark.req("R-217")
@pytest.mark.parametrize("chain", ["text", {}, 3, [3], [{}], [{"subject": "a", "issuer": "b"}]])
def test_what_is_no_chain_is_refused_as_one(chain: Any) -> None:
    assert fault(chain) == "malformed_chain"


@pytest.mark.parametrize("certificate", ["", "!", None, 3, "A", "ab==c", "A" * 30_000, "AAAA\n"])
def test_a_certificate_is_base64url_of_bounded_length(certificate: Any) -> None:
    assert fault([link(ROOT, DEVICE) | {"certificate": certificate}]) == "malformed_chain"


def test_chains_are_bounded() -> None:
    makers = [Identity(bytes([100 + n]) * 32) for n in range(MAX_CHAIN_LENGTH - 1)]
    names = [DEVICE, *makers, ROOT]
    longest = [link(above, below, path_length=MAX_CHAIN_LENGTH) for below, above in itertools.pairwise(names)]
    assert len(longest) == MAX_CHAIN_LENGTH
    assert fault(longest) is None
    assert fault([*longest, link(ROOT, ROOT)]) == "chain_too_long"


def test_a_device_with_a_p256_key() -> None:
    device = Authority.make("a device")
    key = VerifyingKey("p256", device.point)
    chain = [statement(ROOT, DEVICE_ID, key, valid_from=NOW - 1, valid_until=0)]
    header = hardware_header(device_id=DEVICE_ID, issuer_chain=chain)
    header["device_signature"] = f"0x{device.sign(claim_bytes(header)).hex()}"
    assert verdict(attested(header)) is None
    swapped = (
        header["device_signature"][:2] + header["device_signature"][66:] + header["device_signature"][2:66]
    )
    with pytest.raises(InvalidPacket):
        verdict(attested(header | {"device_signature": swapped}))


def test_keys_are_read_in_both_spellings() -> None:
    key = VerifyingKey.ed25519(DEVICE.public_key)
    assert VerifyingKey.read(DEVICE.did.removeprefix("did:strata:")) == key
    assert VerifyingKey.read(f"0x{DEVICE.public_key.hex()}") == key
    for text in ("", "0x", "0xzz", "z", "z0", "0x" + "00" * 31, DEVICE.public_key.hex(), None, 5, "z" * 500):
        assert VerifyingKey.read(text) is None
    with pytest.raises(IdentityError):
        Root.of_did("did:strata:a_name")


def test_p256_takes_no_signature_of_another_length_and_no_point_off_the_curve() -> None:
    key = Authority.make("a device")
    signature = key.sign(b"message")
    assert verify_p256(key.point, b"message", signature)
    assert not verify_p256(key.point, b"another", signature)
    assert not verify_p256(key.point, b"message", signature + b"\x00")
    assert not verify_p256(b"\x04" + b"\x01" * 64, b"message", signature)
    assert not verify_p256(key.point, b"message", b"\x00" * 64)


# --- X.509 ----------------------------------------------------------------------------------------------

X_ROOT = Authority.make("Root", key=ec.generate_private_key(ec.SECP384R1()), digest=hashes.SHA384())
X_MAKER = Authority.make(
    "Maker", X_ROOT, path_length=0, usage=key_usage(key_cert_sign=True), digest=hashes.SHA384()
)
X_DEVICE = Authority.make("camera-1", X_MAKER, ca=False, uri=DEVICE_ID)
X_ROOTS = (Root(certificate=X_ROOT.der),)


def chain_of(*authorities: Authority) -> list[dict[str, str]]:
    return x509_chain(DEVICE_ID, *authorities)


@pytest.mark.req("R-220")
def test_certificates_lead_to_a_root() -> None:
    chain = follow_chain(chain_of(X_DEVICE, X_MAKER), X_ROOTS, now=NOW)
    assert chain.keys == (VerifyingKey("p256", X_DEVICE.point),)
    assert chain.names_subject
    assert fault(chain_of(X_DEVICE, X_MAKER, X_ROOT), X_ROOTS) is None
    assert fault(chain_of(X_DEVICE, X_MAKER), (*ROOTS, *X_ROOTS)) is None


@pytest.mark.req("R-215", "R-220")
def test_a_device_that_a_certificate_names_stands() -> None:
    header = hardware_header(device_id=DEVICE_ID, issuer_chain=chain_of(X_DEVICE, X_MAKER))
    header["device_signature"] = f"0x{X_DEVICE.sign(claim_bytes(header)).hex()}"
    trust = dataclasses.replace(TRUST, hardware_roots=X_ROOTS)
    assert verdict(attested(header), trust) is None


@pytest.mark.req("R-215")
def test_a_certificate_for_somebody_else_does_not_resolve_the_device() -> None:
    trust = dataclasses.replace(TRUST, hardware_roots=X_ROOTS)
    nameless = Authority.make("another", X_MAKER, ca=False)
    header = hardware_header(device_id=DEVICE_ID, issuer_chain=chain_of(nameless, X_MAKER))
    header["device_signature"] = f"0x{nameless.sign(claim_bytes(header)).hex()}"
    with pytest.raises(InvalidPacket) as caught:
        verdict(attested(header), trust)
    assert (caught.value.code, caught.value.detail) == (ErrorCode.INVALID_PROVENANCE, "unresolved_device")
    # If the DID itself has that key, nothing else must name it.
    private = ed25519.Ed25519PrivateKey.from_private_bytes(DEVICE.seed)
    own = Authority.make("another", X_MAKER, ca=False, key=private)
    header = hardware_header(issuer_chain=x509_chain(DEVICE.did, own, X_MAKER))
    assert verdict(attested(signed_claim(DEVICE, "device_signature", header)), trust) is None


@pytest.mark.req("R-220", "R-217")
def test_a_path_that_does_not_hold_is_refused() -> None:
    other_root = Authority.make("Root")  # the same name, another key
    cases: dict[str, list[tuple[Any, tuple[Root, ...]]]] = {
        "unrooted": [
            (chain_of(X_DEVICE), X_ROOTS),
            (chain_of(X_DEVICE, X_MAKER), ()),
            (chain_of(X_DEVICE, X_MAKER), (Root(certificate=other_root.der),)),
            (chain_of(other_root), X_ROOTS),
        ],
        "link_signature": [
            (chain_of(X_DEVICE, Authority.make("Maker", X_ROOT, digest=hashes.SHA384())), X_ROOTS),
            (chain_of(X_DEVICE, X_ROOT), X_ROOTS),
        ],
        "outside_validity": [
            (chain_of(Authority.make("x", X_MAKER, ca=False, ends_at=NOW - 1), X_MAKER), X_ROOTS),
            (chain_of(Authority.make("x", X_MAKER, ca=False, begins_at=NOW + 1), X_MAKER), X_ROOTS),
        ],
        "not_an_authority": [
            (chain_of(Authority.make("x", X_DEVICE, ca=False), X_DEVICE, X_MAKER), X_ROOTS),
        ],
        "mixed_forms": [
            ([*x509_chain(DEVICE_ID, X_DEVICE, issuer=MAKER.did), link(ROOT, MAKER)], (*ROOTS, *X_ROOTS)),
        ],
    }
    for expected, attempts in cases.items():
        for chain, roots in attempts:
            assert fault(chain, roots) == expected


@pytest.mark.req("R-220")
def test_issuers_are_authorities_for_the_path_below_them() -> None:
    deep = Authority.make("Deep", X_MAKER)  # under a maker whose path length is 0
    assert fault(chain_of(Authority.make("x", deep, ca=False), deep, X_MAKER), X_ROOTS) == "not_an_authority"
    useless = Authority.make("Useless", X_ROOT, usage=key_usage(key_cert_sign=False), digest=hashes.SHA384())
    chain = chain_of(Authority.make("x", useless, ca=False), useless)
    assert fault(chain, X_ROOTS) == "not_an_authority"
    shallow = Authority.make("Root", key=X_ROOT.key, digest=hashes.SHA384(), path_length=0)
    assert fault(chain_of(X_DEVICE, X_MAKER), (Root(certificate=shallow.der),)) == "not_an_authority"
    expired = Authority.make("Root", key=X_ROOT.key, digest=hashes.SHA384(), ends_at=NOW - 1)
    assert fault(chain_of(X_DEVICE, X_MAKER), (Root(certificate=expired.der),)) == "outside_validity"


@pytest.mark.req("R-220")
@pytest.mark.parametrize("constraints", [(), ((x509.BasicConstraints(False, None), True),)])
def test_a_device_under_a_root_without_limits_is_no_authority(constraints: Any) -> None:
    device = Authority.make("x", X_ROOT, ca=False, extensions=constraints)
    other = Authority.make("y", device, ca=False)
    assert fault(chain_of(device), X_ROOTS) is None
    assert fault(chain_of(other, device), X_ROOTS) == "not_an_authority"
    assert fault(chain_of(other, device, X_ROOT), X_ROOTS) == "not_an_authority"


@pytest.mark.req("R-220")
def test_a_root_counts_those_below_it_and_may_be_any_certificate_of_the_path() -> None:
    for allowed, expected in ((1, None), (0, "not_an_authority")):
        root = Authority.make("Root", key=X_ROOT.key, path_length=allowed)
        assert fault(chain_of(X_DEVICE, X_MAKER), (Root(certificate=root.der),)) == expected
    assert fault(chain_of(X_DEVICE, X_MAKER), (Root(certificate=X_MAKER.der),)) is None
    assert fault(chain_of(X_DEVICE), (Root(certificate=X_MAKER.der),)) is None
    path = [Authority.make("0")]
    for number in range(1, MAX_PATH_LENGTH + 1):
        path.insert(0, Authority.make(str(number), path[0]))
    roots = (Root(certificate=path[-1].der),)
    validate_path([each.der for each in path[:MAX_PATH_LENGTH]], roots, now=NOW)
    with pytest.raises(InvalidPacket, match="chain_too_long"):
        validate_path([each.der for each in path], roots, now=NOW)


def test_what_is_critical_must_be_understood() -> None:
    strange = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00")
    for critical, expected in ((True, "not_understood"), (False, None)):
        device = Authority.make("x", X_MAKER, ca=False, extensions=((strange, critical),))
        assert fault(chain_of(device, X_MAKER), X_ROOTS) == expected


def test_weak_keys_and_foreign_ones_are_refused() -> None:
    sound = Authority.make("Sound", key=rsa.generate_private_key(65537, 2048))
    assert fault(chain_of(Authority.make("x", sound, ca=False)), (Root(certificate=sound.der),)) is None
    small = Authority.make("Small", key=rsa.generate_private_key(65537, 1024))
    device = Authority.make("x", small, ca=False)
    assert fault(chain_of(device), (Root(certificate=small.der),)) == "unrooted"
    big = Authority.make("Big", X_MAKER, ca=False, key=ec.generate_private_key(ec.SECP384R1()))
    assert fault(chain_of(big, X_MAKER), X_ROOTS) == "unsupported_key"


@pytest.mark.req("R-220")
def test_a_certificate_signed_over_a_weak_hash_proves_nothing() -> None:
    weak = hashes.SHA224()
    assert fault(chain_of(Authority.make("x", X_MAKER, ca=False, digest=weak), X_MAKER), X_ROOTS) == (
        "link_signature"
    )
    assert fault(chain_of(Authority.make("x", X_ROOT, ca=False, digest=weak)), X_ROOTS) == "unrooted"


@pytest.mark.req("R-220")
def test_windows_of_certificates_are_widened_by_the_skew() -> None:
    for begins_at, ends_at in ((NOW - YEAR, NOW - 60), (NOW + 60, NOW + YEAR)):
        device = Authority.make("x", X_MAKER, ca=False, begins_at=begins_at, ends_at=ends_at)
        chain = chain_of(device, X_MAKER)
        assert [fault(chain, X_ROOTS, skew=skew) for skew in (59, 60)] == ["outside_validity", None]


def test_a_root_may_be_a_bare_key() -> None:
    root = Authority.make("Bare")
    device = Authority.make("x", root, ca=False)
    named = Root("did:x509:root", VerifyingKey("p256", root.point))
    assert fault(chain_of(device), (named,)) is None
    assert fault(chain_of(device), (Root("did:x509:other", named.key),)) == "unrooted"
    assert fault(chain_of(device), (Root("did:x509:root", VerifyingKey("p256", device.point)),)) == "unrooted"
    private = ed25519.Ed25519PrivateKey.from_private_bytes(ROOT.seed)
    device = Authority.make("x", Authority.make("Ed", key=private), ca=False)
    assert fault(x509_chain(DEVICE_ID, device, issuer=ROOT.did), ROOTS) is None
    assert fault(x509_chain(DEVICE_ID, X_DEVICE, issuer=ROOT.did), ROOTS) == "unrooted"


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_garbage_is_no_certificate(noise: bytes, at: int, byte: int) -> None:
    der = bytearray(X_DEVICE.der)
    der[at % len(der)] ^= byte or 1
    for body in (bytes(der), b"0" + noise, X_DEVICE.der + noise):
        entry = x509_chain(DEVICE_ID, X_DEVICE)[0] | {"certificate": fields.unpadded_base64url(body)}
        if body != X_DEVICE.der:
            assert fault([entry, x509_chain(DEVICE_ID, X_DEVICE, X_MAKER)[1]], X_ROOTS) is not None
