"""The built-in policies, their order, and what is not served because of them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from strata.protocol import packets
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from relayd.config import ConfigurationError, Settings, load
from relayd.moderation import Bans
from relayd.policy import Policy, apply_policy
from relayd.policy.rules import RULES, Lists
from relayd.store.declined import covers
from relayd.store.types import AbuseEntry, Declined, NewPacket

ALICE, BOB = Identity(bytes(31) + b"a"), Identity(bytes(31) + b"b")
HASH, OTHER_HASH = "0x" + "5" * 64, "0x" + "6" * 64
HEADER: dict[str, object] = {"origin_type": "UNKNOWN", "genesis_media_hash": None, "edit_history": []}


def make(author: Identity = ALICE, type: str = "POST", *, media: tuple[str, ...] = ()) -> Packet:
    content: dict[str, object] = {"type": type, "text": "hello"}
    if media:
        content["media"] = [{"media_hash": media_hash} for media_hash in media]
    return packets.build(author, content, timestamp=1000, provenance_header=HEADER if media else None)


def refusal(policy: Policy, packet: Packet) -> tuple[str, str | None]:
    with pytest.raises(InvalidPacket) as caught:
        policy.check(packet)
    assert "did:" not in caught.value.reason and "0x" not in caught.value.reason
    return caught.value.code, caught.value.detail


def policy(**settings) -> Policy:
    return Policy.from_settings(Settings(**settings))


def test_the_setting_names_every_policy_in_the_order_of_the_table():
    assert Settings().policies == tuple(RULES) == tuple(field.name for field in dataclasses.fields(Lists))


def test_by_default_everything_valid_is_taken_and_served():
    for packet in (make(), make(type="ANYTHING"), make(media=(HASH,))):
        policy().check(packet)
    assert not policy().declined
    assert policy()._rules == ()


@pytest.mark.req("R-185", "R-186", "R-187", "R-322")
@pytest.mark.parametrize(
    ("settings", "packet", "expected"),
    [
        ({"blocked_authors": (ALICE.did,)}, make(), ("blocked_author", None)),
        ({"blocked_packet_ids": (make().packet_id,)}, make(), ("policy_rejected", "blocked_packet_id")),
        (
            {"blocked_media_hashes": (HASH,)},
            make(media=(OTHER_HASH, HASH)),
            ("policy_rejected", "blocked_media"),
        ),
        ({"blocked_types": ("POST",)}, make(), ("policy_rejected", "blocked_type")),
        ({"allowed_authors": (BOB.did,)}, make(), ("policy_rejected", "author_not_allowed")),
        ({"allowed_types": ("VOTE",)}, make(), ("policy_rejected", "type_not_allowed")),
    ],
)
def test_each_policy_refuses_what_is_on_its_list_and_nothing_else(settings, packet, expected):
    assert refusal(policy(**settings), packet) == expected
    policy(**settings).check(make(BOB, "VOTE", media=(OTHER_HASH,)))


@pytest.mark.req("R-187", "R-323")
def test_media_are_refused_wherever_a_packet_names_them_as_they_are_not_served_either():
    quoted = {"type": "NOTE", "quoted": {"media": [{"media_hash": HASH}]}}
    nested = packets.build(ALICE, quoted, timestamp=1000)
    made = policy(blocked_media_hashes=(HASH,))
    assert refusal(made, nested) == ("policy_rejected", "blocked_media")
    stored = NewPacket(nested.digest, nested.author_id, "NOTE", 1000, None, nested.canonical)
    assert covers(made.declined, stored)


@pytest.mark.req("R-186")
def test_the_abuse_table_blocks_and_slows_down():
    table = [
        AbuseEntry(ALICE.did, "block", "spam", None),
        AbuseEntry(BOB.did, "limit", "bursts", 2000),
    ]
    made = Policy.from_settings(Settings(), table)
    assert refusal(made, make(ALICE)) == ("blocked_author", "abuse")
    made.check(make(BOB))
    assert made.slowed == {BOB.did}
    without = Policy.from_settings(Settings(policies=("blocked_authors",)), table)
    without.check(make(ALICE))


def test_the_first_policy_in_the_configured_order_decides():
    both = {"blocked_authors": (ALICE.did,), "blocked_types": ("POST",)}
    assert refusal(policy(**both), make())[0] == "blocked_author"
    turned = policy(**both, policies=("blocked_types", "blocked_authors"))
    assert refusal(turned, make()) == ("policy_rejected", "blocked_type")


@pytest.mark.req("R-074")
@pytest.mark.parametrize("type", ["KEY_EVENT", "RECOVERY_APPROVAL", "DID_DOCUMENT"])
def test_no_list_of_types_shuts_out_what_revokes_keys(type):
    policy(allowed_types=("POST",)).check(make(type=type))
    with pytest.raises(ConfigurationError, match=f"{type} carries keys"):
        load(None, {"RELAYD_BLOCKED_TYPES": type})


@pytest.mark.req("R-323")
def test_what_is_blocked_is_not_served_and_what_is_merely_not_taken_is():
    assert policy(
        blocked_authors=(ALICE.did,),
        blocked_packet_ids=(HASH,),
        blocked_media_hashes=(OTHER_HASH,),
        blocked_types=("POST",),
        allowed_types=("VOTE",),
        allowed_authors=(BOB.did,),
    ).declined == Declined(
        authors=frozenset({ALICE.did}),
        types=frozenset({"POST"}),
        packet_ids=frozenset({bytes.fromhex(HASH[2:])}),
        media_hashes=frozenset({OTHER_HASH}),
    )
    abuse = [AbuseEntry(ALICE.did, "block", "spam", None)]
    assert not Policy.from_settings(Settings(), abuse).declined
    unnamed = Policy(Lists(blocked_authors=frozenset({ALICE.did})), policies=("abuse",))
    assert not unnamed.declined


@pytest.mark.req("R-323")
def test_applying_a_policy_reaches_every_way_in_and_out():
    withdrawn: list[bool] = []
    banned: list[tuple[frozenset[str], Bans]] = []
    reviewed: list[bool] = []

    def ban(authors: frozenset[str], bans: Bans) -> bool:
        banned.append((authors, bans))
        return bool(authors)

    relay = SimpleNamespace(
        access=SimpleNamespace(restricted=None, ban=ban),
        admission=SimpleNamespace(policy=None),
        store=SimpleNamespace(declined=None),
        fanout=SimpleNamespace(declined=Declined()),
        registry=SimpleNamespace(
            withdraw=lambda: withdrawn.append(True), review=lambda: reviewed.append(True)
        ),
    )
    table = [AbuseEntry(BOB.did, "limit", "bursts", None)]
    made = Policy.from_settings(Settings(blocked_types=("POST",)), table)
    apply_policy(relay, made)
    assert relay.access.restricted == {BOB.did}
    assert relay.admission.policy is made
    assert relay.store.declined == relay.fanout.declined == Declined(types=frozenset({"POST"}))
    assert withdrawn == [True], "what waits in the sockets was written under the old policy"
    apply_policy(relay, made)
    apply_policy(relay, Policy())
    assert withdrawn == [True], "nothing more is declined than before"
    assert reviewed == []
    bans = Bans(authors=frozenset({BOB.did}), networks=frozenset({"192.0.2.0/24"}))
    apply_policy(relay, Policy.from_settings(Settings(policies=()), (), bans))
    assert banned[-1] == (frozenset({BOB.did}), bans)
    assert reviewed == [True], "sessions end that may be no more"
    assert relay.store.declined.authors == {BOB.did}, "a ban holds whatever policies the settings name"


def test_a_ban_of_each_kind_is_an_entry_of_the_list_that_is_about_the_same():
    packet = make(type="POST", media=(HASH,))
    for bans, detail, declined in (
        (Bans(authors=frozenset({ALICE.did})), None, Declined(authors=frozenset({ALICE.did}))),
        (
            Bans(packet_ids=frozenset({packet.packet_id})),
            "blocked_packet_id",
            Declined(packet_ids=frozenset({packet.digest})),
        ),
        (Bans(media_hashes=frozenset({HASH})), "blocked_media", Declined(media_hashes=frozenset({HASH}))),
        (Bans(types=frozenset({"POST"})), "blocked_type", Declined(types=frozenset({"POST"}))),
    ):
        made = Policy.from_settings(Settings(), (), bans)
        assert refusal(made, packet)[1] == detail
        assert made.declined == declined
    listed = Policy.from_settings(Settings(blocked_types=("VOTE",)), (), Bans(types=frozenset({"POST"})))
    assert listed.declined.types == {"VOTE", "POST"}


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"POLICIES": "blocked_author"}, "unknown policy blocked_author; the nearest is blocked_authors"),
        ({"POLICIES": "abuse,abuse"}, "a policy is named twice"),
        (
            {"POLICIES": "abuse", "BLOCKED_TYPES": "POST"},
            "blocked_types is set, and policies does not name it",
        ),
        ({"ALLOWED_AUTHORS": "alice"}, "allowed_authors: alice is not a DID"),
    ],
)
def test_what_cannot_be_meant_is_a_configuration_error(environ, problem):
    with pytest.raises(ConfigurationError) as caught:
        load(None, {f"RELAYD_{name}": text for name, text in environ.items()})
    assert problem in str(caught.value)


def test_codes_of_refusals_are_those_of_policies():
    for code in (ErrorCode.BLOCKED_AUTHOR, ErrorCode.POLICY_REJECTED):
        assert code.retry.name == "NEVER"
