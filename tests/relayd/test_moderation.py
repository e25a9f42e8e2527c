"""The subject of a ban, the form in which it is stored, and until when it holds."""

from __future__ import annotations

import ipaddress

import pytest

from relayd.moderation import Ban, Bans, Kind, check_reason, kind_of, subject_of

ALICE = "did:strata:zAlice"
HASH = "0x" + "ab" * 32
NOW = 1_790_000_000


def ban(kind: Kind, subject: str, expires_at: int | None = None) -> Ban:
    return Ban(kind, subject, "because", "root", expires_at, NOW)


@pytest.mark.parametrize(
    ("kind", "text", "subject"),
    [
        (Kind.AUTHOR, ALICE, ALICE),
        (Kind.PACKET, HASH.upper().replace("X", "x"), HASH),
        (Kind.MEDIA, HASH, HASH),
        (Kind.TYPE, "POST", "POST"),
        (Kind.NETWORK, "192.0.2.77/24", "192.0.2.0/24"),
        (Kind.NETWORK, "192.0.2.77", "192.0.2.77/32"),
        (Kind.NETWORK, "::ffff:192.0.2.77", "192.0.2.77/32"),
        (Kind.NETWORK, "2001:db8::1/32", "2001:db8::/32"),
    ],
)
def test_a_subject_has_one_form(kind: Kind, text: str, subject: str):
    assert subject_of(kind, text) == subject


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (Kind.AUTHOR, "alice", "is not a DID"),
        (Kind.PACKET, "0xab", "64 hex digits"),
        (Kind.MEDIA, ALICE, "64 hex digits"),
        (Kind.TYPE, "", "name of a content type"),
        (Kind.TYPE, "A\x00B", "name of a content type"),
        (Kind.TYPE, "KEY_EVENT", "cannot be banned"),
        (Kind.NETWORK, "192.0.2.0/33", "nor a network"),
        (Kind.NETWORK, "example.org", "nor a network"),
        (Kind.NETWORK, "0.0.0.0/0", "too wide"),
        (Kind.NETWORK, "2000::/3", "too wide"),
        (Kind.AUTHOR, "did:x:" + "a" * 2000, "longer than"),
        (Kind.TYPE, "語" * 1000, "longer than 2048 bytes"),
    ],
)
def test_what_cannot_be_meant_is_refused(kind: Kind, text: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        subject_of(kind, text)


def test_a_text_says_what_it_is_where_it_can():
    assert kind_of(ALICE) is Kind.AUTHOR
    assert kind_of("192.0.2.0/24") is kind_of("::1") is Kind.NETWORK
    assert kind_of(HASH) is kind_of("POST") is None


@pytest.mark.parametrize("text", ["", "  ", "x" * 1001, "a\x00b"])
def test_a_reason_says_something_and_is_no_book(text: str):
    with pytest.raises(ValueError, match="a reason has"):
        check_reason(text)


def test_a_ban_holds_to_its_last_second_and_no_longer():
    rows = [ban(Kind.AUTHOR, ALICE, NOW + 10), ban(Kind.PACKET, HASH, NOW + 5), ban(Kind.TYPE, "POST")]
    bans = Bans.at(NOW + 5, rows)
    assert bans.authors == {ALICE} and bans.packet_ids == {HASH} and bans.types == {"POST"}
    assert bans.changes_at == NOW + 6
    bans = Bans.at(NOW + 6, rows)
    assert bans.authors == {ALICE} and not bans.packet_ids and bans.changes_at == NOW + 11
    bans = Bans.at(NOW + 11, rows)
    assert bans == Bans.at(NOW, [ban(Kind.TYPE, "POST")])
    assert bans.changes_at is None


def test_an_address_is_found_in_networks_of_any_length():
    rows = [ban(Kind.NETWORK, text) for text in ("192.0.2.0/24", "198.51.100.7/32", "2001:db8::/32")]
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
