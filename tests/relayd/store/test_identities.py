"""What the log has about identities: who has packets, which, and that no process appends unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import json

import msgspec
import pytest
from strata.protocol.sequences import DAY_SECONDS

from relayd.store.types import IdentitiesMoved, NewPacket

NOW = 1_790_000_000
KEYS = ("KEY_EVENT", "RECOVERY_APPROVAL")


@pytest.mark.req("R-074")
async def test_nothing_is_appended_behind_an_identity_packet(store, second_store, packet):
    first = (await store.append([packet(1)], NOW, 0)).dispositions[0].sequence
    event = (await second_store.append([packet(2, type="KEY_EVENT"), packet(3)], NOW, first)).dispositions
    with pytest.raises(IdentitiesMoved) as moved:
        await store.append([packet(4)], NOW, first)
    assert moved.value.sequence == event[1].sequence == await store.head()
    assert await store.find([packet(4).packet_id]) == {}
    # A process that has followed may append, and one that does not depend on keys always may.
    await store.append([packet(4)], NOW, moved.value.sequence)
    await store.append([packet(5)], NOW)


@pytest.mark.parametrize("type", ["KEY_EVENT", "RECOVERY_APPROVAL", "DID_DOCUMENT"])
async def test_each_kind_of_identity_packet_moves_them(store, packet, type):
    await store.append([packet(1, type=type)], NOW)
    with pytest.raises(IdentitiesMoved):
        await store.append([packet(2)], NOW, 0)


async def test_ordinary_packets_and_repeats_move_nothing(store, packet):
    await store.append([packet(1), packet(2, type="CLIENT_MANIFEST")], NOW, 0)
    event = (await store.append([packet(3, type="KEY_EVENT")], NOW, 0)).dispositions[0].sequence
    assert (await store.append([packet(3, type="KEY_EVENT")], NOW, event)).previous == event
    await store.append([packet(4)], NOW, event)


async def test_an_annotation_is_stored_beside_the_signed_bytes(store, packet, sql):
    annotated = msgspec.structs.replace(packet(2), annotation=b'{"x":1}')
    await store.append([packet(1), annotated, packet(3)], NOW)
    rows = await sql.fetch("SELECT body, annotation FROM packets ORDER BY sequence")
    assert [tuple(row) for row in rows] == [
        (packet(1).body, None),
        (packet(2).body, b'{"x":1}'),
        (packet(3).body, None),
    ]


async def test_authors_with_identity_packets_are_found(store, packet):
    long_name = "did:strata:" + "n" * 900
    body = json.dumps({"author_id": long_name}).encode()
    await store.append(
        [
            packet(1, author="did:strata:a", type="KEY_EVENT"),
            packet(2, author="did:strata:a", type="KEY_EVENT"),
            packet(3, author="did:strata:b", type="RECOVERY_APPROVAL"),
            packet(4, author="did:strata:c"),
            packet(5, author="did:strata:d", type="CLIENT_MANIFEST"),
            msgspec.structs.replace(packet(6, author=long_name, type="KEY_EVENT"), body=body),
        ],
        NOW,
    )
    page = await store.identities.authors("KEY_EVENT")
    assert page.names == {"did:strata:a", long_name}
    assert (await store.identities.authors("RECOVERY_APPROVAL")).names == {"did:strata:b"}
    assert (await store.identities.authors("CLIENT_MANIFEST")).names == {"did:strata:d"}
    assert page.next is not None
    assert await store.identities.authors("KEY_EVENT", page.next) == (set(), None)


async def test_authors_are_read_by_pages_whatever_one_of_them_has_published(store, packet, monkeypatch):
    monkeypatch.setattr("relayd.store.identities._AUTHORS_PAGE_ROWS", 3)
    busy = [packet(n, author="did:strata:busy", type="KEY_EVENT") for n in range(10)]
    others = [packet(20 + n, author=f"did:strata:{n}", type="CLIENT_MANIFEST") for n in range(4)]
    edges = [packet(30 + n, author="did:strata:edges", type="TRUST_EDGE") for n in range(5)]
    await store.append([*busy[:5], *others, *edges], NOW)
    await store.append(busy[5:], NOW + DAY_SECONDS)
    for type_, rows, names in (
        ("KEY_EVENT", 10, {"did:strata:busy"}),
        ("CLIENT_MANIFEST", 4, {f"did:strata:{n}" for n in range(4)}),
    ):
        found, pages = set(), 0
        place = 0
        while (page := await store.identities.authors(type_, place)).next is not None:
            pages += 1
            found |= page.names
            place = page.next
        assert (found, pages) == (names, -(-rows // 3))


@pytest.mark.req("R-236")
async def test_only_the_manifest_that_counts_is_read(store, packet):
    def manifest(number: int, author: str = "did:strata:a") -> NewPacket:
        made: NewPacket = packet(number, author=author, type="CLIENT_MANIFEST")
        return made

    await store.append([manifest(1), manifest(2, "did:strata:b")], NOW)
    await store.append([manifest(3)], NOW + DAY_SECONDS)
    tied = [manifest(n) for n in (4, 5, 6, 7)]
    await store.append(tied[:2], NOW + DAY_SECONDS + 5)
    await store.append([*tied[2:], packet(9, author="did:strata:a", type="KEY_EVENT")], NOW + DAY_SECONDS + 5)
    both = ["did:strata:a", "did:strata:b"]
    rows = await store.identities.packets_of(both, ["CLIENT_MANIFEST"])
    counts = min(tied, key=lambda one: one.packet_id)
    assert [row.body for row in rows] == [manifest(2, "did:strata:b").body, counts.body]
    with_keys = await store.identities.packets_of(both, ["CLIENT_MANIFEST", "KEY_EVENT"])
    assert [row.sequence for row in with_keys] == sorted(row.sequence for row in with_keys)
    assert len(with_keys) == 3
    assert await store.identities.packets_of(["did:strata:c"], ["CLIENT_MANIFEST"]) == []


@pytest.mark.req("R-236", "R-367")
async def test_a_manifest_that_a_peer_had_before_the_newest_one_does_not_replace_it(store, packet):
    def manifest(number: int, witnessed_at: int | None = None) -> NewPacket:
        made: NewPacket = packet(number, author="did:strata:a", type="CLIENT_MANIFEST")
        return msgspec.structs.replace(
            made, witnessed_at=witnessed_at, ingest_peer=None if witnessed_at is None else 1
        )

    async def counts() -> list[tuple[int, bytes]]:
        rows = await store.identities.packets_of(["did:strata:a"], ["CLIENT_MANIFEST"])
        return [(row.received_at, row.body) for row in rows]

    await store.append([manifest(1)], NOW)
    newest = manifest(2, NOW + 2 * DAY_SECONDS)
    await store.append([newest], NOW + 2 * DAY_SECONDS + 9)
    late = [manifest(3, NOW - 9 * DAY_SECONDS), manifest(4, NOW + DAY_SECONDS), manifest(5, NOW + 5)]
    for n, one in enumerate(late):
        await store.append([one], NOW + (3 + n) * DAY_SECONDS)
        assert await counts() == [(NOW + 2 * DAY_SECONDS, newest.body)]
    tied = manifest(6, NOW + 2 * DAY_SECONDS)
    await store.append([tied], NOW + 6 * DAY_SECONDS)
    first = min(newest, tied, key=lambda one: one.packet_id)
    assert await counts() == [(NOW + 2 * DAY_SECONDS, first.body)]
    await store.append([manifest(7)], NOW + 7 * DAY_SECONDS)
    assert await counts() == [(NOW + 7 * DAY_SECONDS, manifest(7).body)]


async def test_the_packets_of_authors_come_in_log_order(store, packet):
    mine = [packet(n, author="did:strata:a", type=KEYS[n % 2]) for n in range(4)]
    theirs = [packet(n, author="did:strata:b", type="KEY_EVENT") for n in (10, 11)]
    await store.append([mine[0], theirs[0], mine[1], packet(20, author="did:strata:a")], NOW)
    await store.append([mine[2], theirs[1], mine[3]], NOW + 1)
    rows = await store.identities.packets_of(["did:strata:a"], KEYS)
    assert [row.body for row in rows] == [packet.body for packet in mine]
    assert [row.received_at for row in rows] == [NOW, NOW, NOW + 1, NOW + 1]
    both = await store.identities.packets_of(["did:strata:a", "did:strata:b"], ["KEY_EVENT"])
    assert [row.body for row in both] == [p.body for p in (mine[0], theirs[0], mine[2], theirs[1])]
    later = await store.identities.packets_of(["did:strata:a"], KEYS, after=rows[1].sequence)
    assert [row.body for row in later] == [mine[2].body, mine[3].body]


@pytest.mark.req("R-073")
async def test_they_are_read_through_the_index_of_identity_packets(store, packet, sql):
    """However much else an author has published: none of their other packets is read."""
    await store.append([packet(n, author="did:strata:a") for n in range(500)], NOW)
    await store.append([packet(1000, author="did:strata:a", type="KEY_EVENT")], NOW)
    await sql.execute("ANALYZE packets")
    from relayd.store import identities

    plan = await sql.fetch(
        "EXPLAIN (ANALYZE, FORMAT JSON) " + identities._PACKETS, [b"did:strata:a"], [b"KEY_EVENT"], 0
    )
    scans = [node for node in _nodes(json.loads(plan[0][0])[0]["Plan"]) if node["Actual Rows"]]
    assert sum(node["Actual Rows"] for node in scans if "Relation Name" in node) == 1
    assert all("Rows Removed by Filter" not in node or not node["Rows Removed by Filter"] for node in scans)


def _nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


async def test_a_packet_is_found_by_its_equivalence_key(store, packet):
    keyed = msgspec.structs.replace(packet(1), equivalence_key=b"k" * 32)
    sequence = (await store.append([keyed], NOW)).dispositions[0].sequence
    assert await store.identities.by_key(b"k" * 32) == (sequence, NOW, keyed.body, None)
    assert await store.identities.by_key(b"x" * 32) is None


@pytest.mark.req("R-241", "R-242")
@pytest.mark.parametrize(
    ("strength", "read"),
    [
        (0.9, 0.9),
        (1, 1.0),
        (1e-9, 1e-9),
        ("x", None),
        ("nan", None),
        ("\0" * 40, None),
        (True, None),
        (None, None),
        ({"strength": 1}, None),
        ([0.9] * 40, None),
    ],
    ids=repr,
)
async def test_of_a_trust_packet_the_strength_alone_is_read(store, packet, strength, read):
    def edge(number: int, type: str, **more):
        content = {"note": '"strength":0.1 \0 \u2028', "type": type, "x": {"strength": 0.2}, **more}
        body = json.dumps({"content": content, "z": "x" * 100_000}).encode()
        return msgspec.structs.replace(packet(number, author="did:strata:a", type=type), body=body)

    rows = [edge(1, "TRUST_EDGE", strength=strength), edge(2, "TRUST_REVOCATION", strength=strength)]
    await store.append([*rows, packet(3, author="did:strata:a"), packet(4, author="did:strata:b")], NOW)
    await store.append([edge(5, "TRUST_EDGE")], NOW + 1)
    types = ("TRUST_EDGE", "TRUST_REVOCATION")
    found = await store.identities.trust_acts("did:strata:a", types, after=0, most=9)
    assert [(row.packet_id, row.received_at, row.content_type, row.strength) for row in found] == [
        (packet(5).packet_id, NOW + 1, "TRUST_EDGE", None),
        (rows[1].packet_id, NOW, "TRUST_REVOCATION", None),
        (rows[0].packet_id, NOW, "TRUST_EDGE", read),
    ]
    assert await store.identities.trust_acts("did:strata:a", types, after=0, most=1) == found[:1]


async def test_trust_packets_are_read_over_a_connection_of_their_own(store, packet):
    """However long that takes, the feed, AUTH and packets by id do not wait for it."""
    reader = store.identities
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(reader._budgets.lease())
        waiting = asyncio.create_task(reader.trust_acts("did:strata:a", ["TRUST_EDGE"], after=0, most=1))
        assert await store.head() == 0
        assert await store.tail(0, None, 9) == [] and await reader.packets_of(["did:strata:a"], KEYS) == []
        assert not waiting.done()
    assert await waiting == []
