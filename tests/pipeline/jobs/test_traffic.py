"""Who sends how much, how much at once, how often the same, and the verdicts for the relay."""

from __future__ import annotations

import asyncio
import random

import asyncpg
import pyarrow.parquet as pq
import pytest
from strata_pipeline.cli.traffic import traffic_command
from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.traffic import AuthorHours, Bursts, NearDuplicates, Seconds, Texts
from strata_pipeline.errors import LogError, UsageError
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.traffic import TrafficOptions, traffic
from strata_pipeline.log.abuse import load_abuse
from strata_pipeline.schemas import schema
from strata_pipeline.transforms.abuse import judge
from strata_pipeline.transforms.bursts import find_bursts
from strata_pipeline.transforms.near_duplicates import (
    find_clusters,
    find_meetings,
    find_near_duplicates,
    normalised,
    read_texts,
    signatures_of,
)
from strata_pipeline.transforms.thresholds import Thresholds
from strata_pipeline.transforms.traffic import (
    count_author_hours,
    count_hours,
    seconds_by_day,
    seconds_of,
    whole_seconds,
)

from tests.support import relay_logs
from tests.support.lake_rows import NOON, carry, dataset, row

_A, _B, _C = (relay_logs.author(number).did for number in range(3))
_HOUR = NOON - NOON % 3600
_WORDS = [
    f"{first}{last}" for first in ("ra", "tu", "mo", "ke", "si") for last in ("lan", "bor", "vet", "nik")
]


def _prose(seed: int, words: int = 30) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=words))


def _alike(one: str, other: str) -> float:
    pair = signatures_of([normalised(text) for text in (one, other)])
    return float((pair[0] == pair[1]).mean())


def test_signatures_are_alike_where_texts_are():
    text = _prose(1)
    assert _alike(text, text.upper().replace(" ", "\n ")) == 1
    assert _alike(f"{text} 17 of 20", f"{text} 18 of 2000") == 1
    assert _alike(text, f"{text} now") > 0.75
    assert _alike(text, _prose(2)) < 0.5
    assert normalised("é" * 10_000) == ("é" * 4096).encode()
    # The same on every machine and in every version; otherwise lakes compared twice would differ.
    assert signatures_of([b"the same text on every machine"])[0, :2].tolist() == [192119997, 48311758]


def test_signatures_do_not_depend_on_which_texts_are_hashed_together():
    drawn = random.Random(7)
    texts = [drawn.randbytes(drawn.choice((8, 9, 15, 16, 40, 300))) for _ in range(200)]
    alone = [signatures_of([text])[0].tolist() for text in texts]
    assert signatures_of(texts).tolist() == alone
    assert signatures_of([]).shape == (0, 32)


def test_near_duplicates_and_who_sent_them(spark):
    advert = _prose(3)
    packets = dataset(
        spark,
        [
            (0, relay_logs.make(0, text=_prose(4))),
            (1, relay_logs.make(1, text=f"{advert} offer 1")),
            (2, relay_logs.make(2, text=f"{advert} offer 2")),
            (3, relay_logs.make(3, who=1, type="NOTE", text=f"{advert.upper()} offer 3!")),
            (4, relay_logs.make(4, text="gm")),
            (5, relay_logs.make(5, text="gm")),  # too short to mean anything
            (6, carry(b"x" * 500)),
            (7, carry(b"x" * 500)),  # the payload of channels is not text
            (8, relay_logs.make(6, who=2, text=_prose(5))),
        ],
    )
    texts = read_texts(packets)
    texts.frame.cache()
    assert texts.frame.count() == 5
    again = find_near_duplicates(texts, find_meetings(texts))
    found = {(r.received_at - NOON, r.author_id, r.content_type) for r in again.frame.collect()}
    assert found == {(2, _A, "POST"), (3, _B, "NOTE")}
    clusters = find_clusters(texts, again).frame.collect()
    assert [(r.first_author_id, r.copies, r.authors) for r in clusters] == [(_A, 2, 2)]
    assert clusters[0].sample == f"{advert} offer 1"[:120]


def test_a_crowded_bucket_gives_the_same(spark, monkeypatch):
    monkeypatch.setattr("strata_pipeline.transforms.near_duplicates._CROWDED", 10)
    rows = []
    for place in range(60):  # half of them all alike, by one author; the rest in pairs
        text = f"{_prose(6)} number {place}" if place < 30 else _prose(100 + place // 2)
        rows.append(
            (
                place,
                NOON,
                _A if place < 30 else _B,
                "POST",
                text,
                signatures_of([normalised(text)])[0].tolist(),
            )
        )
    texts = Texts(spark.createDataFrame(rows, schema("texts")))
    found = {
        r.sequence: r.first_sequence
        for r in find_near_duplicates(texts, find_meetings(texts)).frame.collect()
    }
    assert found == {n: 0 for n in range(1, 30)} | {n: n - 1 for n in range(31, 60, 2)}


def test_hours(spark):
    packets = dataset(
        spark,
        [
            (0, relay_logs.make(0)),
            (0, relay_logs.make(1)),
            (0, relay_logs.make(2, type="NOTE")),
            (1, relay_logs.make(3)),
            (3600, relay_logs.make(4)),
            (3600, relay_logs.make(5, who=1, type="<script>")),
        ],
    )
    copies = [(4, NOON + 1, _A, "POST", 1), (5, NOON + 3600, _A, "POST", 1)]
    near = NearDuplicates(spark.createDataFrame(copies, schema("near_duplicates")))
    found = {
        tuple(r)[:3]: tuple(r)[3:]
        for r in count_hours(whole_seconds(seconds_of(packets)), near).frame.drop("size").collect()
    }
    assert found == {
        (_A, "POST", _HOUR): (3, 2, 1),
        (_A, "NOTE", _HOUR): (1, 1, 0),
        (_A, "POST", _HOUR + 3600): (1, 1, 1),
        (_B, "<script>", _HOUR + 3600): (1, 1, 0),
    }
    by_author = count_author_hours(whole_seconds(seconds_of(packets)), Texts.empty(spark), near)
    assert {tuple(r) for r in by_author.frame.collect()} == {
        (_A, _HOUR, 4, 3, 0, 1), (_A, _HOUR + 3600, 1, 1, 0, 1), (_B, _HOUR + 3600, 1, 1, 0, 0),
    }  # fmt: skip


def test_a_second_in_two_days_of_the_log_is_one_second(spark):
    made = [(0, 1), (0, 1), (1, 2), (0, 3)]  # days after the first, and seconds: the clock was set back
    rows = []
    for number, (day, at) in enumerate([*made, (1, 1), (1, 1)], 1):
        sequence, _, *others = row(relay_logs.make(number), number, NOON + day * 86_400)
        rows.append((sequence, NOON + at, *others))
    packets = Packets(spark.createDataFrame(rows, schema("packets")))
    by_day = seconds_by_day(packets)
    near = NearDuplicates.empty(spark)
    assert sorted((r.day, r.packets) for r in by_day.collect()) == [
        ("2026-09-04", 1), ("2026-09-04", 2), ("2026-09-05", 1), ("2026-09-05", 2),
    ]  # fmt: skip
    [hour] = count_hours(whole_seconds(Seconds(by_day)), near).frame.collect()
    assert (hour.packets, hour.peak_packets) == (6, 4)
    assert [hour] == count_hours(whole_seconds(seconds_of(packets)), near).frame.collect()


def _author_hours(spark, *rows):
    return AuthorHours(spark.createDataFrame(rows, schema("author_hours")))


def test_bursts_are_measured_by_ones_own_habit(spark):
    def hours(author, *peaks):
        return [(author, 3600 * n, peak, peak, 0, 0) for n, peak in enumerate(peaks)]

    found = find_bursts(
        _author_hours(
            spark,
            *hours("calm", 1, 2, 1, 3, 1, 2, 49),  # unusual, but too little to matter
            *hours("wild", 1, 2, 1, 3, 1, 2, 51),
            *hours("busy", 60, 70, 65, 60, 70, 65, 100),  # its usual peaks are above the floor
            *hours("busier", 60, 70, 65, 60, 70, 65, 400),
            *hours("flood", *[1001] * 8),  # a habit is no excuse above the ceiling
            *hours("new", 51, 10),
            ("far", 2**60, 51, 51, 0, 0),  # a clock that was years off
        )
    )
    assert {(r.author_id, r.hour_at // 3600, r.threshold) for r in found.frame.collect()} == {
        ("wild", 6, 50.0), ("busier", 6, 65 + 6 * 0.25 * 65), ("new", 0, 50.0), ("far", 2**60 // 3600, 50.0),
        *(("flood", hour, 1000.0) for hour in range(8)),
    }  # fmt: skip


def test_verdicts(spark):
    hour, now = 3600, 100 * 3600
    hours = _author_hours(
        spark,
        ("bot", 99 * hour, 700, 1, 700, 599),  # a report every six seconds
        ("quoting", 99 * hour, 9000, 1, 9000, 700),  # also much of its own
        ("copying", 90 * hour, 700, 1, 700, 650),
        ("copying", 98 * hour, 900, 1, 700, 700),
        ("flooding", 80 * hour, 7000, 9, 7000, 6500),
        ("long ago", 70 * hour, 7000, 9, 7000, 6500),
        ("worse once", 70 * hour, 7000, 9, 7000, 6500),
        ("worse once", 98 * hour, 700, 1, 700, 650),
        ("bursting", 70 * hour, 7000, 9, 7000, 6500),
        ("jumped", 10**6 * hour, 7000, 9, 7000, 6500),
    )
    bursts = [("twice", n * hour, 90, 90, 50.0) for n in (97, 98)]
    bursts += [("thrice", n * hour, 90 + n, 90 + n, 50.0) for n in (96, 97, 98)]
    bursts += [(who, n * hour, 90, 90, 50.0) for who in ("flooding", "bursting") for n in (97, 98, 99)]
    found = judge(hours, Bursts(spark.createDataFrame(bursts, schema("bursts"))), Thresholds(), now)
    assert {tuple(r) for r in found.frame.collect()} == {
        ("copying", "limit", "pipeline: 700 near-duplicates within an hour", (99 + 24) * hour),
        ("flooding", "block", "pipeline: 6500 near-duplicates within an hour", (81 + 24) * hour),
        ("jumped", "block", "pipeline: 6500 near-duplicates within an hour", now + 24 * hour),
        # Their earlier behaviour is over, and neither makes the verdict harder nor hides the present.
        ("worse once", "limit", "pipeline: 650 near-duplicates within an hour", (99 + 24) * hour),
        (
            "bursting",
            "limit",
            "pipeline: bursts in 3 hours, up to 90 packets within a second",
            (100 + 24) * hour,
        ),
        (
            "thrice",
            "limit",
            "pipeline: bursts in 3 hours, up to 188 packets within a second",
            (99 + 24) * hour,
        ),
    }


@pytest.mark.parametrize(
    "wrong",
    [{"hours": 0}, {"copies_share": 0}, {"copies_share": 1.5}, {"limit_copies": 9, "block_copies": 8}],
)
def test_thresholds_make_sense(wrong):
    with pytest.raises(UsageError):
        Thresholds(**wrong)


def _sql(url: str, query: str, *values) -> list[tuple]:
    async def run():
        connection = await asyncpg.connect(url)
        try:
            return [tuple(found) for found in await connection.fetch(query, *values)]
        finally:
            await connection.close()

    return asyncio.run(run())


def test_rows_of_an_operator_survive_the_loading(log_url):
    _sql(
        log_url,
        "INSERT INTO abuse (author_id, verdict, reason, expires_at) VALUES "
        "('spared', 'limit', 'by hand', 1), ('hand', 'block', 'spam pipeline: no', NULL), "
        "('old', 'limit', 'pipeline: x', 999), ('still', 'limit', 'pipeline: x', 1000), "
        "('again', 'limit', 'pipeline: x', 5)",
    )
    ours = [
        {"author_id": name, "verdict": "block", "reason": "pipeline: 'y'", "expires_at": 2000}
        for name in ("spared", "hand", "again", "new", "nul\0")
    ]
    for _ in range(2):
        load_abuse(log_url, ours, now=1000)
        assert _sql(log_url, "SELECT author_id, verdict, reason, expires_at FROM abuse ORDER BY 1") == [
            ("again", "block", "pipeline: 'y'", 2000),
            ("hand", "block", "spam pipeline: no", None),
            ("new", "block", "pipeline: 'y'", 2000),
            ("spared", "limit", "by hand", 1),
            ("still", "limit", "pipeline: x", 1000),
        ]
    load_abuse(log_url, [], now=3000)
    assert _sql(log_url, "SELECT author_id FROM abuse ORDER BY 1") == [("hand",), ("spared",)]
    _sql(log_url, "DROP TABLE abuse")
    with pytest.raises(LogError, match="GRANT SELECT, INSERT, UPDATE, DELETE ON abuse"):
        load_abuse(log_url, ours, now=1000)


def test_the_job_from_log_to_the_relays_table(spark, log_url, tmp_path, queries):
    lake = tmp_path / "lake"
    spam = [relay_logs.make(n, who=1, text=f"{_prose(7)} {n}") for n in range(30)]
    relay_logs.append(
        log_url, [*spam, *(relay_logs.make(n, type="x/../y", text=_prose(n)) for n in range(50, 53))], NOON
    )
    archive(spark, log_url, lake)
    options = TrafficOptions(thresholds=Thresholds(limit_copies=20, block_copies=25))
    queries.clear()
    figures = traffic(
        spark, lake, output=tmp_path / "out", load_into=log_url, options=options, now=NOON + 7200
    )
    assert queries == ["collect"] * 6 + ["toLocalIterator"], "one for each list, and one for the relay"
    totals = figures.totals
    names = ("packets", "authors", "near_duplicates", "clusters", "bursts", "abuse")
    assert [totals[name] for name in names] == [33, 2, 29, 1, 0, 1]
    assert totals["size"] == sum(row["size"] for row in figures.types)
    assert [row["packets"] for row in figures.authors] == [30, 3]
    assert pq.read_table(tmp_path / "out" / "hours").num_rows == 2
    assert figures.note.tip in (tmp_path / "out" / "traffic.html").read_text()
    # The relay's own query finds the row.
    loaded = _sql(log_url, "SELECT author_id, verdict FROM abuse WHERE expires_at >= $1", NOON + 7200)
    assert loaded == [(_B, "block")]
    with pytest.raises(UsageError, match="lies in the lake"):
        traffic(spark, lake, output=lake)


def test_loading_needs_a_database(capsys):
    with pytest.raises(BaseException) as ended:
        traffic_command("nowhere", load_abuse=True)
    assert getattr(ended.value, "exit_code", None) == 2
    assert "--load-abuse needs --database-url" in capsys.readouterr().err
