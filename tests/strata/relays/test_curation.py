"""How a reader interprets typed packets, in whatever order they arrive."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import canonical, packets
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.relays.curation import (
    Arrival,
    attestations,
    current_descriptor,
    embedded_attestations,
    superseding_correction,
    trust_graph,
)

NOW = 1_760_000_000
ALICE, BOB, EVE = (Identity(bytes([n]) * 32) for n in (1, 2, 3))
POST = packets.build(ALICE, {"type": "POST", "text": "x"}, timestamp=NOW)

Json = dict[str, Any]


def packet(author: Identity, kind: str, **content: Any) -> Packet:
    return packets.build(author, {"type": kind, **content}, timestamp=NOW)


def orders(received: list[Arrival]) -> list[list[Arrival]]:
    """Some orders of arrival, with repeats from other relays mixed in at later times."""
    chooser = random.Random(7)
    some = []
    for _ in range(12):
        repeated = [
            Arrival(item.packet, item.received_at + 50) for item in received if chooser.random() < 0.3
        ]
        arrived = [*received, *repeated]
        chooser.shuffle(arrived)
        some.append(arrived)
    return some


# --- Trust ----------------------------------------------------------------------------------------------


def edge(strength: float, created_at: int, author: Identity = ALICE, **content: Any) -> Packet:
    members = {"from": author.did, "to": BOB.did, "strength": strength, "created_at": created_at}
    return packet(author, "TRUST_EDGE", **members | content)


def revocation(created_at: int, author: Identity = ALICE, **content: Any) -> Packet:
    return packet(
        author, "TRUST_REVOCATION", **{"from": author.did, "to": BOB.did, "created_at": created_at} | content
    )


def strengths(*made: Packet) -> dict[str | None, float]:
    received = [Arrival(item, NOW + n) for n, item in enumerate(made)]
    graphs = [trust_graph(order) for order in orders(received)]
    assert all(graph == graphs[0] for graph in graphs)
    return {context: found.strength for (_, _, context), found in graphs[0].items()}


@pytest.mark.req("R-245")
def test_a_revocation_ends_what_was_created_before_it() -> None:
    assert strengths(edge(0.8, 10), revocation(20)) == {}
    assert strengths(revocation(20), edge(0.8, 10)) == {}
    assert strengths(edge(0.8, 20), revocation(20)) == {}
    assert strengths(edge(0.8, 21), revocation(20)) == {None: 0.8}
    assert strengths(edge(0.8, 10), revocation(20), edge(0.3, 30)) == {None: 0.3}
    assert strengths(edge(0.8, 10), edge(0.3, 30), revocation(20), revocation(15)) == {None: 0.3}


@pytest.mark.req("R-245")
def test_strength_zero_is_an_edge_and_no_revocation() -> None:
    work, home = edge(0.8, 10, context="work"), edge(0.6, 10, context="home")
    assert strengths(work, home, edge(0, 20, context="work")) == {"work": 0, "home": 0.6}
    assert strengths(work, home, revocation(20)) == {}


@pytest.mark.req("R-245")
def test_a_revocation_raises_nothing() -> None:
    assert strengths(revocation(20)) == {}
    assert strengths(edge(0.1, 30), revocation(20, strength=1.0)) == {None: 0.1}


@pytest.mark.req("R-245")
def test_revocations_of_other_pairs_change_nothing() -> None:
    assert strengths(edge(0.8, 10), revocation(20, EVE)) == {None: 0.8}
    assert strengths(edge(0.8, 10), revocation(20, to=EVE.did)) == {None: 0.8}


@pytest.mark.req("R-244", "R-243", "R-238")
def test_unsound_edges_take_no_part() -> None:
    foreign = packet(EVE, "TRUST_EDGE", **{"from": ALICE.did, "to": BOB.did, "strength": 1, "created_at": 99})
    foreign_end = packet(EVE, "TRUST_REVOCATION", **{"from": ALICE.did, "to": BOB.did, "created_at": 99})
    for unsound in (foreign, foreign_end, edge(7, 99), edge(1, 99, to="nobody")):
        assert strengths(edge(0.8, 10), unsound) == {None: 0.8}


def test_the_latest_edge_holds() -> None:
    assert strengths(edge(0.9, 30), edge(0.2, 10)) == {None: 0.9}
    undated = packet(ALICE, "TRUST_EDGE", **{"from": ALICE.did, "to": BOB.did, "strength": 0.4})
    assert strengths(undated, edge(0.9, 30)) == {None: 0.4}  # its timestamp takes the place of created_at


# --- Corrections ----------------------------------------------------------------------------------------


def correction(author: Identity, action: str = "replace", text: str = "", target: Packet = POST) -> Packet:
    return packet(author, "CORRECTION", target_packet=target.packet_id, action=action, text=text)


def standing(*received: Arrival) -> Packet | None:
    found = [superseding_correction(POST, order) for order in orders(list(received))]
    assert all(item == found[0] for item in found)
    return found[0]


@pytest.mark.req("R-247")
def test_only_the_author_corrects() -> None:
    own, foreign = correction(ALICE), correction(EVE, "retract")
    assert standing(Arrival(own, NOW), Arrival(foreign, NOW + 9)) == own
    assert standing(Arrival(foreign, NOW), Arrival(own, NOW + 9)) == own
    assert standing(Arrival(foreign, NOW)) is None


@pytest.mark.req("R-248")
def test_the_latest_correction_wins_and_ties_go_to_the_smallest_id() -> None:
    first, second, third = (correction(ALICE, text=text) for text in "abc")
    assert standing(Arrival(first, NOW + 2), Arrival(second, NOW + 1)) == first
    tied = min(second, third, key=lambda item: item.packet_id)
    assert standing(Arrival(first, NOW), Arrival(second, NOW + 1), Arrival(third, NOW + 1)) == tied


@pytest.mark.req("R-248", "R-246", "R-106")
def test_unsound_and_foreign_targets_do_not_correct() -> None:
    elsewhere = correction(ALICE, target=correction(ALICE))
    undecided = packet(ALICE, "CORRECTION", target_packet=POST.packet_id, action="maybe")
    assert standing(Arrival(elsewhere, NOW), Arrival(undecided, NOW)) is None


@pytest.mark.req("R-247", "R-248")
@given(st.lists(st.tuples(st.sampled_from([ALICE, EVE]), st.integers(0, 3), st.integers(0, 5)), max_size=8))
def test_corrections_do_not_depend_on_the_order_of_arrival(made: list[tuple[Identity, int, int]]) -> None:
    received = [Arrival(correction(author, text=str(n)), NOW + at) for author, at, n in made]
    found = standing(*received)
    own: dict[str, int] = {}
    for item in received:
        if item.packet.author_id == ALICE.did:
            own[item.packet.packet_id] = min(
                item.received_at, own.get(item.packet.packet_id, item.received_at)
            )
    expected = min(own, key=lambda packet_id: (-own[packet_id], packet_id), default=None)
    assert (found.packet_id if found else None) == expected


# --- Attestations ---------------------------------------------------------------------------------------


def attestation(
    author: Identity = BOB, target: str = POST.packet_id, *, signer: Identity | None = None, **changes: Any
) -> Packet:
    body = {
        "attestation_id": "a1",
        "attestor_id": author.did,
        "target_packet": target,
        "subject": "SPAM",
        "confidence": 0.9,
        "issued_at": NOW,
    } | changes
    signature = (signer or author).sign(canonical.encode(body)).hex()
    return packet(
        author, "ATTESTATION", target_packet=target, attestation=body | {"signature": f"0x{signature}"}
    )


def about(author: Identity, kind: str, attestation_id: str = "a1", **content: Any) -> Packet:
    return packet(author, kind, attestation_id=attestation_id, target_packet=POST.packet_id, **content)


def judged(*made: Packet, **options: Any) -> list[tuple[str, bool]]:
    """Return the attestor and weight of what stands; these are the same in every order of arrival."""
    received = [Arrival(item, NOW + n) for n, item in enumerate(made)]
    found = [attestations(order, **options) for order in orders(received)]
    assert all(item == found[0] for item in found)
    return [(item.packet.author_id, item.counts) for item in found[0]]


@pytest.mark.req("R-258")
def test_only_the_attestor_takes_it_back() -> None:
    own = attestation()
    assert judged(own) == [(BOB.did, True)]
    assert judged(own, about(BOB, "ATTESTATION_RETRACTION")) == [(BOB.did, False)]
    assert judged(about(BOB, "ATTESTATION_RETRACTION"), own) == [(BOB.did, False)]
    assert judged(own, about(EVE, "ATTESTATION_RETRACTION")) == [(BOB.did, True)]
    assert judged(own, about(ALICE, "ATTESTATION_RETRACTION")) == [(BOB.did, True)]
    assert judged(own, about(BOB, "ATTESTATION_RETRACTION", "a2")) == [(BOB.did, True)]


@pytest.mark.req("R-258")
def test_the_latest_retraction_is_the_one() -> None:
    first, second, third = (about(BOB, "ATTESTATION_RETRACTION", reason=text) for text in "abc")
    received = [Arrival(attestation(), NOW), Arrival(first, NOW + 1)]
    received += [Arrival(second, NOW + 2), Arrival(third, NOW + 2)]
    expected = min(second, third, key=lambda item: item.packet_id)
    for order in orders(received):
        assert [item.retraction for item in attestations(order)] == [expected]


@pytest.mark.req("R-258", "R-247")
def test_a_correction_of_the_attestation_packet_takes_it_back_too() -> None:
    own = attestation()
    retract = correction(BOB, "retract", target=own)
    replace = correction(BOB, "replace", "later", target=own)
    assert judged(own, retract) == [(BOB.did, False)]
    assert judged(own, replace) == [(BOB.did, True)]
    assert judged(own, retract, replace) == [(BOB.did, True)]  # the later correction stands
    assert judged(own, correction(EVE, "retract", target=own)) == [(BOB.did, True)]


@pytest.mark.req("R-259")
def test_disputes_take_nothing_away() -> None:
    own = attestation()
    disputes = [about(author, "ATTESTATION_DISPUTE", dispute_type="X") for author in (ALICE, BOB, EVE)]
    assert judged(own, *disputes) == [(BOB.did, True)]
    received = [Arrival(item, NOW + n) for n, item in enumerate([own, *disputes])]
    assert attestations(received)[0].disputes == tuple(disputes)


@pytest.mark.req("R-256")
def test_infrastructure_is_attested_on_descriptors_alone() -> None:
    descriptor = packet(
        ALICE, "RELAY_DESCRIPTOR", relay_id=ALICE.did, descriptor_version=1, ws_endpoint="ws://h"
    )
    on_post = attestation(domain="INFRASTRUCTURE")
    on_descriptor = attestation(target=descriptor.packet_id, domain="INFRASTRUCTURE")
    assert judged(on_post, POST) == []
    assert judged(on_post) == []
    assert judged(on_descriptor, descriptor) == [(BOB.did, True)]
    assert judged(descriptor, on_descriptor) == [(BOB.did, True)]
    assert judged(on_descriptor, types_of={descriptor.packet_id: "RELAY_DESCRIPTOR"}) == [(BOB.did, True)]
    assert judged(attestation(domain="CONTENT"), POST) == [(BOB.did, True)]


@pytest.mark.req("R-254", "R-250")
def test_the_inner_signature_is_always_verified() -> None:
    assert judged(attestation(signer=EVE)) == []
    assert judged(attestation(confidence=7)) == []
    named = lambda did, at: (EVE.public_key,) if did == BOB.did and at >= NOW else ()  # noqa: E731
    assert judged(attestation(signer=EVE), keys_at=named) == [(BOB.did, True)]
    assert judged(attestation(), keys_at=lambda did, at: ()) == []


@pytest.mark.req("R-113", "R-115")
def test_the_first_of_those_that_say_the_same_counts_once() -> None:
    first, repeat = attestation(), attestation(confidence=0.1)
    received = [Arrival(first, NOW), Arrival(repeat, NOW + 1)]
    for order in orders(received):
        assert [item.packet for item in attestations(order)] == [first]
    assert judged(first, attestation(EVE)) == [(BOB.did, True), (EVE.did, True)]
    assert judged(first, attestation(attestation_id="a2")) == [(BOB.did, True), (BOB.did, True)]


@pytest.mark.req("R-255", "R-257")
def test_embedded_attestations_speak_of_their_host_or_not_at_all() -> None:
    body = attestation().content["attestation"]
    host = packets.build(
        ALICE, {"type": "POST", "attestations": [body]}, timestamp=NOW, extra={"attestations": [body]}
    )
    assert embedded_attestations(host) == []
    assert embedded_attestations(POST) == []
    assert judged(host) == []


# --- Descriptors ----------------------------------------------------------------------------------------


@pytest.mark.req("R-388")
def test_the_latest_descriptor_that_has_not_expired() -> None:
    def descriptor(label: str, expires_at: int | None, author: Identity = ALICE) -> Packet:
        content = {
            "type": "RELAY_DESCRIPTOR",
            "relay_id": author.did,
            "descriptor_version": 1,
            "ws_endpoint": f"ws://{label}",
        }
        return packets.build(author, content, timestamp=NOW, expires_at=expires_at)

    older, newer = descriptor("older", NOW + 1000), descriptor("newer", NOW + 100)
    foreign = descriptor("foreign", None, EVE)
    received = [
        Arrival(older, NOW),
        Arrival(newer, NOW + 10),
        Arrival(foreign, NOW + 20),
    ]
    for order in orders(received):
        assert current_descriptor(ALICE.did, order, NOW + 100) == newer
        assert current_descriptor(ALICE.did, order, NOW + 101) == older
        assert current_descriptor(ALICE.did, order, NOW + 1001) is None


# --- Order in general -----------------------------------------------------------------------------------

PIECES = [
    attestation(),
    attestation(EVE),
    about(BOB, "ATTESTATION_RETRACTION"),
    about(EVE, "ATTESTATION_DISPUTE"),
    correction(BOB, "retract", target=attestation()),
    correction(ALICE),
    edge(0.8, 10),
    edge(0.4, 30, context="work"),
    edge(0.9, 10, EVE),
    revocation(20),
    POST,
]


@given(st.lists(st.tuples(st.sampled_from(PIECES), st.integers(0, 3)), max_size=14), st.randoms())
def test_nothing_depends_on_the_order_of_arrival(
    made: list[tuple[Packet, int]], chooser: random.Random
) -> None:
    received = [Arrival(item, NOW + at) for item, at in made]
    shuffled = list(received)
    chooser.shuffle(shuffled)
    assert attestations(received) == attestations(shuffled)
    assert trust_graph(received) == trust_graph(shuffled)
    assert superseding_correction(POST, received) == superseding_correction(POST, shuffled)
