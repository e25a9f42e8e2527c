"""The trust graph: the edges that stand after newer edges and revocations."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq
import pytest
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata_pipeline.cli.trust import trust_command
from strata_pipeline.datasets.trust import TrustEdges, TrustStatements
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.compact import compact
from strata_pipeline.jobs.erase import erase
from strata_pipeline.jobs.report import report
from strata_pipeline.jobs.trust import trust
from strata_pipeline.lake.lake import Lake
from strata_pipeline.reports.page import LakeNote
from strata_pipeline.reports.trust import TrustFigures, render_trust
from strata_pipeline.transforms.trust import count_authors, standing_edges, statements_by_day

from relayd.moderation import SubjectKind
from relayd.store.erasing import Eraser
from tests.support import relay_logs
from tests.support.lake_rows import dataset
from tests.support.lakes import DAY, NOON
from tests.support.toy_lakes import write_batch

A, B, C, D = (relay_logs.author(n).did for n in range(4))


def edge(who: int, to: str, strength: object = 0.5, **others: object):
    members: dict[str, Any] = {
        "from": relay_logs.author(who).did,
        "to": to,
        "strength": strength,
        "context": "work",
    } | others
    return relay_logs.make(next(NUMBERS), who=who, type="TRUST_EDGE", **members)


def revocation(who: int, to: str, **others: object):
    members: dict[str, Any] = {"from": relay_logs.author(who).did, "to": to} | others
    return relay_logs.make(next(NUMBERS), who=who, type="TRUST_REVOCATION", **members)


NUMBERS = iter(range(10**6))


@pytest.fixture(scope="module")
def edges(spark) -> TrustEdges:
    named, kept = edge(2, B, 0.25), edge(2, D, 1)
    made = [
        edge(0, B, 0.1), edge(0, B, 0.9),  # the newer one counts
        edge(1, A, 0.4),  # and in the other direction
        edge(0, C), revocation(0, C),  # revoked
        revocation(0, D), edge(0, D, 0),  # revoked before it existed: stands
        named, revocation(2, B, revokes=[named.packet_id]),  # revoked by its name
        kept, revocation(2, D, revokes=["0x" + "00" * 32]),  # a different one was
        edge(3, A, **{"from": B}),  # in the name of another
        edge(3, B, 1.5), edge(3, C, "much"),  # no strengths
        edge(3, D),  # of oneself
        revocation(2, D, revokes=["nothing"]),  # names no packet at all
        relay_logs.make(next(NUMBERS), who=3, text="no edge"),
    ]  # fmt: skip
    return standing_edges(TrustStatements(statements_by_day(dataset(spark, enumerate(made)))))


def test_the_newest_edge_of_a_pair_stands_until_it_is_revoked(edges):
    rows = sorted((row.from_id, row.to_id, row.strength) for row in edges.frame.collect())
    assert rows == sorted([(A, B, 0.9), (B, A, 0.4), (A, D, 0.0), (C, D, 1.0)])


def test_authors_are_counted_from_both_ends(edges):
    rows = {row.author_id: tuple(row)[1:] for row in count_authors(edges).frame.collect()}
    assert rows == {A: (1, 0.4, 2, 1), B: (1, 0.9, 1, 1), C: (0, 0.0, 1, 0), D: (2, 1.0, 0, 0)}


def test_a_page_shows_what_strangers_wrote_as_text():
    row = {"author_id": "<b>", "trusted_by": 2, "trusts": 0, "mutual": 0, "strength": 1.5}
    newest = {"received_at": 0, "from_id": A, "to_id": "<b>", "strength": 1.0, "context": None}
    note = LakeNote("ab" * 32, "2026-11-01", "2026-11-01", 1)
    text = render_trust(TrustFigures(note, 1, 2, 3, 0, {0: 1, 9: 1}, [row], [newest]))
    assert "<b>" not in text and "&lt;b&gt;" in text and ">1.50<" in text
    assert "None." in render_trust(TrustFigures(note, 1, 0, 0, 0, {}, [], []))


def test_a_lake_without_edges_has_an_empty_graph(spark, tmp_path, capsys, queries):
    write_batch(tmp_path / "lake", [1, 2])
    trust_command(str(tmp_path / "lake"), output=str(tmp_path / "out"))
    assert "0 edges between 0 authors" in capsys.readouterr().out
    assert queries == ["collect"] * 3
    assert pq.read_table(tmp_path / "out" / "trust_edges").num_rows == 0
    assert (tmp_path / "out" / "trust.html").exists()


def naively(received: Sequence[Packet]) -> set[tuple[str, str, float]]:
    """The edges that stand after all these, processed one by one."""
    standing: dict[tuple[str, str], Packet] = {}
    named: set[tuple[str, str, str]] = set()
    for packet in received:
        said: dict[str, Any] = packet.content
        pair = said["from"], said["to"]
        if packet.content_type == "TRUST_EDGE":
            standing[pair] = packet
        elif said.get("revokes"):
            named |= {(*pair, one) for one in said["revokes"]}
        elif pair in standing:
            named.add((*pair, standing[pair].packet_id))
    return {
        (*pair, float(str(one.content["strength"])))
        for pair, one in standing.items()
        if (*pair, one.packet_id) not in named
    }


def test_days_that_are_put_together_say_what_the_whole_says(spark):
    chosen = random.Random(7)
    said: list[Packet] = []
    for _ in range(300):
        who, to = chosen.sample(range(5), 2)
        did, of = (relay_logs.author(one).did for one in (who, to))
        mine = [one for one in said if (one.author_id, one.content["to"]) == (did, of)]
        if chosen.random() < 0.6:
            said.append(edge(who, of, chosen.randrange(11) / 10))
        elif mine and chosen.random() < 0.6:
            said.append(revocation(who, of, revokes=[chosen.choice(mine).packet_id]))
        else:
            said.append(revocation(who, of))
    # Noon of the first day, and of each of the four after it.
    rows = dataset(spark, [(number // 60 * DAY, packet) for number, packet in enumerate(said)])
    by_day = statements_by_day(rows).persist()
    try:
        days = sorted(row["day"] for row in by_day.select("day").distinct().collect())
        assert len(days) == 5
        for count in (2, 5):
            edges = standing_edges(TrustStatements(by_day.where(by_day.day.isin(days[:count])))).frame
            found = {(row.from_id, row.to_id, row.strength) for row in edges.collect()}
            assert found == naively(said[: 60 * count]) and found
    finally:
        by_day.unpersist()


@pytest.mark.timeout(600)
def test_a_day_is_read_once_and_again_when_it_has_changed(spark, log_url, tmp_path):
    lake, output = tmp_path / "lake", tmp_path / "out"
    revoked = revocation(0, B)
    days = [[edge(0, B, 0.1), edge(0, B, 0.9), edge(2, D), edge(1, A, 0.4)], [revoked], []]
    for number, said in enumerate(days):
        at = NOON + number * DAY
        relay_logs.append(log_url, [*said, *relay_logs.make_many(3, first=1000 + number * 3, at=at)], at)
    archive(spark, log_url, lake, batch_rows=3)

    def counted() -> tuple[int, set[tuple[str, str]]]:
        """The number of days read, and who trusts whom."""
        figures, whole = trust(spark, lake, output=output), trust(spark, lake)
        assert figures.newest == whole.newest and figures.trusted == whole.trusted
        assert (figures.edges, whole.counted) == (whole.edges, whole.note.days)
        assert pq.read_table(output / "trust_edges").num_rows == whole.edges
        return figures.counted, {(row["from_id"], row["to_id"]) for row in figures.newest}

    assert counted() == (3, {(C, D), (B, A)})
    report(spark, lake, tmp_path / "site")
    # A compaction changes files but no day; a day that nobody reads need not be there.
    assert compact(spark, lake).days == 2 and counted() == (0, {(C, D), (B, A)})
    first = lake / "packets" / "day=2024-10-04"
    away = first.rename(lake / "_away")
    assert trust(spark, lake, output=output).counted == 0
    away.rename(first)

    relay_logs.append(log_url, [edge(3, A), revocation(2, D)], NOON + 3 * DAY)
    archive(spark, log_url, lake)
    assert counted() == (1, {(B, A), (D, A)})
    relay_logs.append(log_url, [edge(3, B)], NOON + 3 * DAY + 60)  # the last day grows
    archive(spark, log_url, lake)
    assert counted() == (1, {(B, A), (D, A), (D, B)})

    eraser = Eraser(log_url, Identity(bytes(32)))
    ids = [revoked.packet_id, days[0][3].packet_id]
    now = NOON + 9 * DAY
    asyncio.run(
        eraser.erase(SubjectKind.PACKET, ids, reason="asked for", actor="operator", via="test", now=now)
    )
    tip = Lake.open(lake).tip
    assert erase(spark, log_url, lake).days == 2 and Lake.open(lake).tip == tip
    assert counted() == (2, {(A, B), (D, A), (D, B)})
    assert report(spark, lake, tmp_path / "site").counted == 3  # the two, and the new one

    # Results that are damaged, or of another lake, are computed again.
    kept = sorted((output / "trust_days").glob("day=*"))
    (kept[0] / "_kept.json").write_text("{}")
    shutil.rmtree(kept[1])
    assert counted()[0] == 2 and not list(output.glob("**/_writing*"))
