"""Section 14: checks by content type."""

from __future__ import annotations

from strata.protocol import canonical
from strata.protocol.ids import Identity

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import members, seal
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import Peer, expect_error, expect_ok
from strata_testkit.conformance.verdicts import DECISIONS, Failed, Message, expect, expect_equal, shorten

__all__ = ["CHECKS", "attestation"]

CHECKS = Group(14)

_TARGET = "0x" + "12" * 32
_OTHER = "0x" + "34" * 32
_STRONG_EDGES = 20


def _without(content: Message) -> Message:
    return {name: value for name, value in content.items() if value is not ...}


async def _each(context: Context, author: Identity, accepted: list[Message], refused: list[Message]) -> None:
    """Expect OK for each of `accepted`, `invalid_schema` for each of `refused`; `...` is an absent member."""
    async with context.connect() as peer:
        for content in accepted:
            await _expect(peer, context, author, _without(content), "OK", None)
        for content in refused:
            await _expect(peer, context, author, _without(content), "ERROR", "invalid_schema")


async def _expect(
    peer: Peer, context: Context, author: Identity, content: Message, kind: str, code: str | None
) -> None:
    answer = await peer.publish(context.build(author, content))
    if (answer.get("type"), answer.get("code")) != (kind, code):
        raise Failed(f"{kind} {code or ''} for {shorten(content)}", shorten(answer))


def _edge(author: Identity, to: str, **changes: object) -> Message:
    return {
        "type": "TRUST_EDGE",
        "from": author.did,
        "to": to,
        "strength": 0.25,
        "context": "CONFORMANCE",
        "created_at": 1_760_000_000,
        **changes,
    }


@CHECKS("R-238", source="RFC-0001 §7.1–7.3")
async def edges_are_their_authors(context: Context) -> None:
    """TRUST_EDGE and TRUST_REVOCATION whose `from` is not the author are `invalid_schema`"""
    author, other = context.identity(), context.identity()
    revocation = {
        "type": "TRUST_REVOCATION",
        "from": author.did,
        "to": other.did,
        "created_at": 1_760_000_000,
    }
    await _each(
        context,
        author,
        [_edge(author, other.did), revocation],
        [_edge(author, other.did, **{"from": other.did}), {**revocation, "from": other.did}],
    )


@CHECKS("R-239", source="RFC-0001 §7.1")
async def edges_have_a_strength(context: Context) -> None:
    """A TRUST_EDGE has a strength from 0 to 1 and goes to a DID"""
    author, to = context.identity(), context.identity().did
    good = [_edge(author, to, strength=strength) for strength in (0, 1, 0.5)]
    bad = [_edge(author, to, strength=strength) for strength in (1.5, -0.1, "1", None, ...)]
    await _each(context, author, good, [*bad, _edge(author, "alice"), {**_edge(author, to), "to": 7}])


@CHECKS("R-240", source="RFC-0001 §7.1; decision A-031")
async def edge_signatures_match(context: Context) -> None:
    """A wrong `edge_signature` is refused, and one over the packet without it is accepted"""
    author, to = context.identity(), context.identity().did
    plain = context.build(author, _edge(author, to))
    body = members(plain, packet_id=..., signature=...)
    right = "0x" + author.sign(canonical.encode(body)).hex()
    async with context.connect() as peer:
        for signature, kind in ((right, "OK"), ("0x" + "00" * 64, "ERROR")):
            content = {**plain.content, "edge_signature": signature}
            answer = await peer.publish(seal(author, {**body, "content": content}))
            expect(answer.get("type") == kind, f"{kind} for edge_signature {signature[:10]}…", answer)


@CHECKS("R-241", "R-242", "R-320", source="RFC-0001 §7.4; RFC-0005 §5.2", level=Keyword.SHOULD)
async def strong_edges_are_budgeted(context: Context) -> None:
    """The 21st TRUST_EDGE above 0.5 in a day is `rate_limited`; a revocation refunds nothing"""
    author = context.identity()
    targets = [context.identity().did for _ in range(_STRONG_EDGES + 1)]
    edges = [context.build(author, _edge(author, to, strength=0.9)) for to in targets]
    revocation = {
        "type": "TRUST_REVOCATION",
        "from": author.did,
        "to": targets[0],
        "created_at": 1_760_000_000,
    }
    async with context.connect(expects_limit="trust_budget") as peer:
        await peer.store(*edges[:-1])
        await peer.store(context.build(author, revocation))
        answer = expect_error(await peer.publish(edges[-1]), "rate_limited")
        pause = answer.get("retry_after")
        expect(type(pause) is int and pause >= 1, "retry_after of 1 s or more", answer)
        await peer.store(context.build(author, _edge(author, targets[0], strength=0.5)))


@CHECKS("R-246", source="RFC-0002 §3.4; decision A-092")
async def corrections_are_whole(context: Context) -> None:
    """A CORRECTION has a well-formed target and the action `replace` or `retract`"""
    good = {"type": "CORRECTION", "target_packet": _TARGET, "action": "replace", "text": "better"}
    wrong = ({"target_packet": ...}, {"target_packet": "0x12"}, {"action": ...}, {"action": "burn"})
    await _each(
        context,
        context.identity(),
        [good, {**good, "action": "retract"}],
        [{**good, **change} for change in wrong],
    )


@CHECKS("R-247", "R-249", source="RFC-0002 §3.4; decision A-093")
async def corrections_hide_nothing(context: Context) -> None:
    """After a CORRECTION, by the author or by another, the original is served and so is the correction"""
    author, other = context.identity(), context.identity()
    original = context.packet(author)
    content = {"type": "CORRECTION", "target_packet": original.packet_id, "action": "retract"}
    corrections = [context.build(signer, content) for signer in (other, author)]
    async with context.connect() as peer:
        await peer.store(original)
        await peer.store(*corrections)
        history = await peer.subscribe("s", {"authors": [author.did, other.did]})
        wanted = [packet.packet_id for packet in (original, *corrections)]
        expect_equal(history.ids, wanted, "the original and both corrections")


def attestation(author: Identity, context: Context, **changes: object) -> Message:
    """The content of a sound ATTESTATION; `changes` apply to the inner object before it is signed."""
    inner = {
        "attestation_id": context.type("ATTESTATION"),
        "attestor_id": author.did,
        "attestor_type": "LAB",
        "target_packet": _TARGET,
        "domain": "CONTENT",
        "subject": "SPAM",
        "confidence": 0.95,
        "method": "manual",
        "issued_at": context.now(),
        "metadata": {},
    }
    inner = _without({**inner, **changes})
    inner["signature"] = "0x" + author.sign(canonical.encode(inner)).hex()
    return {"type": "ATTESTATION", "target_packet": _TARGET, "attestation": inner}


@CHECKS("R-250", "R-251", "R-252", "R-253", source="RFC-0003 §3.1–3.4; decision A-090")
async def attestations_are_whole(context: Context) -> None:
    """An ATTESTATION is whole, is by its attestor, and its targets agree; an unknown target is no error"""
    author = context.identity()
    good = attestation(author, context)
    changes: list[Message] = [
        {"attestation_id": ...},
        {"attestor_id": ...},
        {"subject": ...},
        {"confidence": ...},
        {"confidence": 1.5},
        {"confidence": "high"},
        {"issued_at": ...},
        {"attestor_id": context.identity().did},
        {"target_packet": ...},
        {"target_packet": _OTHER},
    ]
    unsigned = {name: value for name, value in good["attestation"].items() if name != "signature"}
    await _each(
        context,
        author,
        [good],
        [
            *(attestation(author, context, **change) for change in changes),
            {**good, "target_packet": ...},
            {**good, "target_packet": "0x12"},
            {**good, "attestation": ...},
            {**good, "attestation": unsigned},
        ],
    )


@CHECKS("R-007", "R-008", source="RFC-0000 §7")
async def new_kinds_of_attestation_are_taken(context: Context) -> None:
    """Unknown `attestor_type`, `attestation_tier`, `domain` and `subject` are not errors"""
    author = context.identity()
    unknown = dict.fromkeys(("attestor_type", "attestation_tier", "domain", "subject"), "NEW_KIND")
    await _each(context, author, [attestation(author, context, **unknown)], [])


@CHECKS("R-254", source="RFC-0003 §3.2, §3.4", level=Keyword.SHOULD)
async def inner_signatures_are_verified(context: Context) -> None:
    """An ATTESTATION whose inner signature does not verify is refused"""
    author = context.identity()
    content = attestation(author, context)
    content["attestation"]["signature"] = "0x" + author.sign(b"something else").hex()
    async with context.connect() as peer:
        expect_error(await peer.publish(context.build(author, content)))


@CHECKS("R-256", "R-257", "R-258", "R-259", source="RFC-0003 §3.1, §3.3, §3.6, §10")
async def what_has_no_effect_is_stored(context: Context) -> None:
    """Odd targets, retractions and disputes by others, and `content.attestations` are stored"""
    author, other = context.identity(), context.identity()
    content = attestation(author, context, domain="INFRASTRUCTURE")
    identifier = content["attestation"]["attestation_id"]
    about = {"target_packet": _TARGET, "attestation_id": identifier, "reason": "conformance"}
    await _each(context, author, [content, {"type": "POST", "attestations": [{"confidence": 9}]}], [])
    dispute = {"type": "ATTESTATION_DISPUTE", "dispute_type": "OTHER", "created_at": context.now(), **about}
    await _each(context, other, [{"type": "ATTESTATION_RETRACTION", **about}, dispute], [])


@CHECKS("R-113", "R-115", source="RFC-0002 §8; decision A-037")
async def attestations_count_once_for_each_author(context: Context) -> None:
    """The same attestation in a new packet is a duplicate; the same id by another author is not"""
    author, other = context.identity(), context.identity()
    content = attestation(author, context)
    identifier = content["attestation"]["attestation_id"]
    first, again = context.build(author, content), context.build(author, content)
    foreign = context.build(other, attestation(other, context, attestation_id=identifier))
    async with context.connect() as peer:
        await peer.store(first)
        answer = expect_ok(await peer.publish(again))
        if context.subject.announces(DECISIONS):
            seen = (answer.get("duplicate"), answer.get("duplicate_of"))
            expect_equal(seen, (True, first.packet_id), "duplicate and duplicate_of")
        await peer.store(foreign)
        history = await peer.subscribe("s", {"authors": [author.did, other.did]})
        expect_equal(history.ids, [first.packet_id, foreign.packet_id], "one attestation of each author")


@CHECKS("R-114", source="RFC-0002 §8; decision A-037")
async def metrics_count_once_for_each_moment(context: Context) -> None:
    """A CONSENSUS_METRIC for another moment is new; one for the same moment is a duplicate"""
    author = context.identity()
    first, again, later = (
        context.build(author, _metric(author, observed_at=at))
        for at in (1_760_000_000, 1_760_000_000, 1_760_000_001)
    )
    async with context.connect() as peer:
        for packet in (first, again, later):
            expect_ok(await peer.publish(packet))
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect_equal(history.ids, [first.packet_id, later.packet_id], "one metric for each moment")


def _metric(author: Identity, **changes: object) -> Message:
    return {
        "type": "CONSENSUS_METRIC",
        "target_packet": _TARGET,
        "metrics": {"human_votes": 1},
        "source_id": author.did,
        "observed_at": 1_760_000_000,
        **changes,
    }


@CHECKS("R-260", source="RFC-0002 §7; decision A-094")
async def metrics_are_their_sources(context: Context) -> None:
    """A CONSENSUS_METRIC is by its source, and has a target and an object of metrics"""
    author = context.identity()
    wrong: list[Message] = [
        {"source_id": context.identity().did},
        {"source_id": ...},
        {"target_packet": "0x12"},
        {"metrics": [1]},
        {"metrics": ...},
    ]
    await _each(context, author, [_metric(author)], [_metric(author, **change) for change in wrong])


@CHECKS("R-261", "R-262", source="RFC-0007 §9; RFC-0006 §5.1, §5.3; RFC-0011 §5")
async def configurations_are_their_authors(context: Context) -> None:
    """A CONFIG of a known kind names its author; a snapshot ends after it begins; other scopes are opaque"""
    author, other = context.identity(), context.identity().did
    now = context.now()
    policy = {"type": "CONFIG", "config_type": "REPLICATION_POLICY_V1", "relay_id": author.did}
    snapshot: Message = {
        "type": "CONFIG",
        "scope": "BOOTSTRAP_SNAPSHOT",
        "source_id": author.did,
        "issued_at": now,
        "expires_at": now + 60,
    }
    service = {"type": "CONFIG", "scope": "SERVICE_CONFIG", "provider_id": author.did}
    await _each(
        context,
        author,
        [policy, snapshot, service, {"type": "CONFIG", "scope": "ANYTHING", "source_id": other}],
        [
            {**policy, "relay_id": other},
            {**snapshot, "source_id": other},
            {**snapshot, "issued_at": "now"},
            {**snapshot, "expires_at": now},
            {**service, "provider_id": other},
        ],
    )


@CHECKS("R-263", "R-384", "R-385", "R-386", source="RFC-0007 §10")
async def descriptors_are_their_relays(context: Context) -> None:
    """A RELAY_DESCRIPTOR is by its relay, of version 1, and has a ws or wss endpoint"""
    author = context.identity()
    good: Message = {
        "type": "RELAY_DESCRIPTOR",
        "descriptor_version": 1,
        "relay_id": author.did,
        "ws_endpoint": "wss://relay.example.net/strata",
    }
    wrong: list[Message] = [
        {"relay_id": context.identity().did},
        {"descriptor_version": 2},
        {"descriptor_version": ...},
        {"ws_endpoint": "https://relay.example.net"},
        {"ws_endpoint": 7},
    ]
    await _each(context, author, [good], [{**good, **change} for change in wrong])


@CHECKS("R-264", "R-265", source="RFC-0002 §3.2; RFC-0001 §9", level=Keyword.MAY)
async def other_types_are_opaque(context: Context) -> None:
    """Social types and identity-gate attestations are stored as they are"""
    author = context.identity()
    contents = [
        {"type": kind, "x": [1, {"y": None}]} for kind in ("PROFILE", "REACTION", "SOCIAL_EDGE", "GROUP")
    ]
    async with context.connect() as peer:
        packets = [context.build(author, content) for content in contents]
        await peer.store(*packets)
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect_equal([event["packet"]["content"] for event in history.events], contents, "each as it was")
