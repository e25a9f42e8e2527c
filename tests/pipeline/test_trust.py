"""The trust graph: what stands after edges, newer edges and revocations."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import pytest
from strata_pipeline.cli.trust import trust_command
from strata_pipeline.datasets.trust import TrustEdges
from strata_pipeline.reports.page import LakeNote
from strata_pipeline.reports.trust import TrustFigures, render_trust
from strata_pipeline.transforms.trust import count_authors, standing_edges

from tests.support import relay_logs
from tests.support.lake_rows import dataset
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
        edge(1, A, 0.4),  # and back
        edge(0, C), revocation(0, C),  # revoked
        revocation(0, D), edge(0, D, 0),  # revoked before it was there: stands
        named, revocation(2, B, revokes=[named.packet_id]),  # revoked by its name
        kept, revocation(2, D, revokes=["0x" + "00" * 32]),  # another one was
        edge(3, A, **{"from": B}),  # in the name of another
        edge(3, B, 1.5), edge(3, C, "much"),  # no strengths
        edge(3, D),  # of oneself
        relay_logs.make(next(NUMBERS), who=3, text="no edge"),
    ]  # fmt: skip
    return standing_edges(dataset(spark, enumerate(made)))


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
    text = render_trust(TrustFigures(note, 2, 3, 0, {0: 1, 9: 1}, [row], [newest]))
    assert "<b>" not in text and "&lt;b&gt;" in text and ">1.50<" in text
    assert "None." in render_trust(TrustFigures(note, 0, 0, 0, {}, [], []))


def test_a_lake_without_edges_has_an_empty_graph(spark, tmp_path, capsys):
    write_batch(tmp_path / "lake", [1, 2])
    trust_command(str(tmp_path / "lake"), output=str(tmp_path / "out"))
    assert "0 edges between 0 authors" in capsys.readouterr().out
    assert pq.read_table(tmp_path / "out" / "trust_edges").num_rows == 0
    assert (tmp_path / "out" / "trust.html").exists()
