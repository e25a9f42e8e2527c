"""The subject of a ban, the form in which it is stored, and until when it holds."""

from __future__ import annotations

import ipaddress

import pytest

from relayd.moderation import Ban, Bans, SubjectKind, check_reason, kind_of, subject_of

ALICE = "did:strata:zAlice"
HASH = "0x" + "ab" * 32
NOW = 1_790_000_000


def ban(kind: SubjectKind, subject: str, expires_at: int | None = None) -> Ban:
    return Ban(kind, subject, "because", "root", expires_at, NOW)


@pytest.mark.parametrize(
    ("kind", "text", "subject"),
    [
        (SubjectKind.AUTHOR, ALICE, ALICE),
        (SubjectKind.PACKET, HASH.upper().replace("X", "x"), HASH),
        (SubjectKind.MEDIA, HASH, HASH),
        (SubjectKind.TYPE, "POST", "POST"),
        (SubjectKind.NETWORK, "192.0.2.77/24", "192.0.2.0/24"),
        (SubjectKind.NETWORK, "192.0.2.77", "192.0.2.77/32"),
        (SubjectKind.NETWORK, "::ffff:192.0.2.77", "192.0.2.77/32"),
        (SubjectKind.NETWORK, "2001:db8::1/32", "2001:db8::/32"),
    ],
)
def test_a_subject_has_one_form(kind: SubjectKind, text: str, subject: str):
    assert subject_of(kind, text) == subject


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (SubjectKind.AUTHOR, "alice", "is not a DID"),
        (SubjectKind.PACKET, "0xab", "64 hex digits"),
        (SubjectKind.MEDIA, ALICE, "64 hex digits"),
        (SubjectKind.TYPE, "", "name of a content type"),
        (SubjectKind.TYPE, "A\x00B", "name of a content type"),
        (SubjectKind.TYPE, "KEY_EVENT", "cannot be banned"),
        (SubjectKind.NETWORK, "192.0.2.0/33", "nor a network"),
        (SubjectKind.NETWORK, "example.org", "nor a network"),
        (SubjectKind.NETWORK, "0.0.0.0/0", "too wide"),
        (SubjectKind.NETWORK, "2000::/3", "too wide"),
        (SubjectKind.AUTHOR, "did:x:" + "a" * 2000, "longer than"),
        (SubjectKind.TYPE, "語" * 1000, "longer than 2048 bytes"),
    ],
)
def test_what_cannot_be_meant_is_refused(kind: SubjectKind, text: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        subject_of(kind, text)


def test_a_text_says_what_it_is_where_it_can():
    assert kind_of(ALICE) is SubjectKind.AUTHOR
    assert kind_of("192.0.2.0/24") is kind_of("::1") is SubjectKind.NETWORK
    assert kind_of(HASH) is kind_of("POST") is None


@pytest.mark.parametrize("text", ["", "  ", "x" * 1001, "a\x00b"])
def test_a_reason_says_something_and_is_no_book(text: str):
    with pytest.raises(ValueError, match="a reason has"):
        check_reason(text)


def test_a_ban_holds_to_its_last_second_and_no_longer():
    rows = [
        ban(SubjectKind.AUTHOR, ALICE, NOW + 10),
        ban(SubjectKind.PACKET, HASH, NOW + 5),
        ban(SubjectKind.TYPE, "POST"),
    ]
    bans = Bans.at(NOW + 5, rows)
    assert bans.authors == {ALICE} and bans.packet_ids == {HASH} and bans.types == {"POST"}
    assert bans.changes_at == NOW + 6
    bans = Bans.at(NOW + 6, rows)
    assert bans.authors == {ALICE} and not bans.packet_ids and bans.changes_at == NOW + 11
    bans = Bans.at(NOW + 11, rows)
    assert bans == Bans.at(NOW, [ban(SubjectKind.TYPE, "POST")])
    assert bans.changes_at is None


def test_an_address_is_found_in_networks_of_any_length():
    rows = [ban(SubjectKind.NETWORK, text) for text in ("192.0.2.0/24", "198.51.100.7/32", "2001:db8::/32")]
    bans = Bans.at(NOW, rows)
    for text, banned in {
        "192.0.2.255": True,
        "192.0.3.0": False,
        "198.51.100.7": True,
        "198.51.100.8": False,
        "2001:db8:ffff::1": True,
        "2001:db9::": False,
        "::c000:201": False,
    }.items():
        assert bans.cover(ipaddress.ip_address(text)) is banned
    assert not bans.cover(None)
    assert not Bans().cover(ipaddress.ip_address("192.0.2.1"))
