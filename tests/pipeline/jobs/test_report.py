"""The report site: figures of days that add up, self-contained pages, days that are read once."""

from __future__ import annotations

import datetime
import html
import math
import os
import random
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from strata_pipeline.days.cohorts import HASHES, SAMPLED, Cohort, Week, cohorts_of
from strata_pipeline.days.figures import (
    DayFigures,
    KindTotals,
    calendar,
    forget_changed,
    keep_days,
    kept,
    week_of,
)
from strata_pipeline.days.forecast import forecast
from strata_pipeline.days.lags import GROWTH, added, percentile, seconds_of, share_below
from strata_pipeline.errors import UsageError
from strata_pipeline.jobs.report import report
from strata_pipeline.lake.lake import Lake
from strata_pipeline.reports.page import LakeNote
from strata_pipeline.reports.site import RelayScore, SiteFigures, render_site
from strata_pipeline.transforms.emptying import emptied

from tests.support.toy_lakes import DAY, place, rows_table, write_batch


def bucket(seconds: int) -> int:
    size = math.ceil(math.log1p(abs(seconds)) / math.log(GROWTH))
    return int(math.copysign(size, seconds)) if seconds else 0


def hashes(*authors: int) -> bytes:
    return struct.pack(f">{len(authors)}q", *sorted(authors))


def figures(day: str, number: int = 1, **others: object) -> DayFigures:
    members = {
        "kinds": {"POST": KindTotals(100 * number, 50_000 * number), "NOTE": KindTotals(10, 900)},
        "origins": {"SOFTWARE": 5, "not proven": 1},
        "lags": {bucket(-3): 1, bucket(0): 50, bucket(2): 40, bucket(90): 9},
        "skews": {bucket(-3): 1, bucket(0): 4},
        "quarantined": {"columns_differ": 2},
        "sample": hashes(1, 2 + number),
    } | others
    return DayFigures(day=day, tip="ab" * 32, authors=5 * number, sketch=b"\x01", **members)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0, 1, 2, 7, 59, 3600, 86_400, 10**8])
def test_a_bucket_stands_for_its_seconds_to_five_percent_of_them_and_a_second(seconds):
    for sign in (1, -1):
        assert abs(seconds_of(bucket(sign * seconds)) - sign * seconds) <= 0.05 * (1 + seconds)


def test_histograms_add_up_and_tell_percentiles():
    one, other = {bucket(1): 90, bucket(60): 9}, {bucket(3600): 1, bucket(-10): 100}
    both = added([one, other])
    assert sum(both.values()) == 200
    assert percentile(both, 0.25) == pytest.approx(-10, rel=0.06)
    assert percentile(both, 0.94) == pytest.approx(1, rel=0.11)
    assert percentile(both, 1) == pytest.approx(3600, rel=0.06)
    assert share_below(both, -2) == 0.5
    assert percentile({}, 0.5) is None and share_below({}, 0) is None


def test_a_line_through_days_goes_on_and_says_how_sure_it_is():
    assert forecast([1.0] * 6, 30) is None
    steady = forecast([100.0] * 10, 30)
    assert steady is not None and (steady.expected, steady.low, steady.high) == (3000, 3000, 3000)
    rising = forecast([float(10 * n) for n in range(10)], 2)
    assert rising is not None and rising.expected == pytest.approx(100 + 110)
    shaky = forecast([100.0, 0.0] * 5, 30)
    assert shaky is not None and shaky.low < shaky.expected == 1500 < shaky.high
    falling = forecast([float(90 - 10 * n) for n in range(10)], 365)
    assert falling is not None and falling.expected == 0
    sinking = [forecast([float(1000 - 10 * n) for n in range(28)], days) for days in (30, 90, 365)]
    # 720, 710, …, 10 is 26,280 after 72 days, and nothing follows.
    assert [one and round(one.expected) for one in sinking] == [17_250, 26_280, 26_280]


def test_what_is_to_come_is_what_least_squares_say():
    chosen = random.Random(5)
    for _ in range(300):
        count, days = chosen.randrange(7, 29), chosen.choice([1, 30, 365])
        base, step = chosen.choice([0, 1_000, 2**53]), chosen.choice([-0.1, 0, 0.03])
        values = [
            max(0.0, base * (1 + step * n + chosen.choice([0, 0.3]) * chosen.gauss(0, 1)))
            for n in range(count)
        ]
        known, coming = np.arange(count), np.arange(count, count + days)
        found = forecast(values, days)
        for degree in (1, 0):  # the line, unless chance alone makes such a slope; otherwise the mean
            drawn = np.vander(known, degree + 1)
            line, _, _, _ = np.linalg.lstsq(drawn, np.array(values), rcond=None)
            variance = float(np.sum((values - drawn @ line) ** 2)) / (count - 2)
            doubt = variance * np.linalg.inv(drawn.T @ drawn)
            if degree and abs(line[0]) > 2 * math.sqrt(doubt[0][0]):
                break
        # Each day varies by itself, and all days share the uncertainty of the line.
        to_come = np.vander(coming, degree + 1)
        shared = to_come.sum(axis=0)
        spread = 1.28 * math.sqrt(days * variance + float(shared @ doubt @ shared))
        expected = float(np.maximum(0, to_come @ line).sum())
        wanted = (expected, max(0.0, expected - spread), expected + spread)
        assert found is not None
        assert (found.expected, found.low, found.high) == pytest.approx(wanted, rel=1e-6, abs=1e-3)


def test_days_without_packets_count_in_what_is_to_come():
    mondays = calendar("2026-08-03", "2026-11-09")[::7]
    days = [figures(day, kinds={"POST": KindTotals(1, 7 * 2**20)}) for day in mondays]
    note = LakeNote("ab" * 32, days[0].day, days[-1].day, len(days))
    kinds = render_site(SiteFigures(note, days, {}))["kinds.html"]
    # A mebibyte a day, not seven.
    for row in ("30 days</bdi></td><td><bdi>30 MiB<", "365 days</bdi></td><td><bdi>365 MiB<"):
        assert row in kinds


def test_a_day_is_kept_for_as_long_as_it_does_not_grow(tmp_path):
    day = figures("2026-11-21")
    keep_days(tmp_path / "days", [day])
    assert kept(tmp_path / "days", "2026-11-21", day.tip) == day
    assert kept(tmp_path / "days", "2026-11-21", "cd" * 32) is None
    assert kept(tmp_path / "days", "2026-11-20", day.tip) is None
    for name in ("_2026-11-20.json.78", "_notes.79"):
        (tmp_path / "days" / name).write_text("half")
        os.utime(tmp_path / "days" / name, (0, 0))
    forget_changed(tmp_path / "days", lambda _: day.tip)
    assert kept(tmp_path / "days", "2026-11-21", day.tip) == day
    assert sorted(one.name for one in (tmp_path / "days").iterdir()) == ["2026-11-21.json", "_notes.79"]
    (tmp_path / "days" / "_notes.79").unlink()
    forget_changed(tmp_path / "days", lambda _: "cd" * 32)
    assert list((tmp_path / "days").iterdir()) == []
    (tmp_path / "days" / "2026-11-21.json").write_text('{"format": 9}')
    assert kept(tmp_path / "days", "2026-11-21", day.tip) is None
    with pytest.raises(UsageError, match="cannot be written"):
        keep_days(Path("/dev/null/days"), [day])
    assert (day.packets, day.size) == (110, 50_900)
    assert calendar("2026-12-30", "2027-01-01") == ["2026-12-30", "2026-12-31", "2027-01-01"]
    assert (week_of("2026-11-21"), week_of("2027-01-01")) == ("2026-W47", "2026-W53")


def test_weeks_tell_who_is_new_who_stays_returns_and_leaves():
    days = [
        ("W1", hashes(1, 2)), ("W1", hashes(2, 3)),  # 1, 2 and 3 begin
        ("W2", hashes(1, 4)),  # 1 stays, 4 begins, 2 and 3 leave
        ("W3", hashes(2)),  # 2 returns, 1 and 4 leave
        ("W4", b""),
    ]  # fmt: skip
    found = cohorts_of(days, is_over=True)
    assert found.share == 1
    assert found.weeks == [
        Week("W1", 3, 3, 0, None), Week("W2", 2, 1, 0, 2), Week("W3", 1, 0, 1, 2), Week("W4", 0, 0, 0, 1)
    ]  # fmt: skip
    assert [week.stayed for week in found.weeks] == [0, 1, 0, 0]
    assert found.cohorts == [Cohort("W1", 3, 3, [1, 1 / 3, 1 / 3, 0]), Cohort("W2", 1, 1, [1, 0, 0])]
    assert cohorts_of(days, is_over=False).weeks[-1].lost is None
    assert cohorts_of([], is_over=True).weeks == []


def test_of_more_authors_than_a_sample_holds_a_fair_part_is_followed():
    step = HASHES // (4 * SAMPLED)
    crowd = [step * n for n in range(4 * SAMPLED)]
    # The second week has every other author again, few enough to be known individually.
    days = [("W1", hashes(*crowd[:SAMPLED])), ("W2", hashes(*crowd[::2][: SAMPLED - 1]))]
    found = cohorts_of(days, is_over=True)
    assert found.share == pytest.approx(0.25, rel=0.01)
    assert found.weeks[0].active == pytest.approx(4 * SAMPLED, rel=0.01)
    assert found.weeks[1].lost == pytest.approx(2 * SAMPLED, rel=0.01) and found.weeks[1].new == 0
    assert found.cohorts[0].shares == [1, pytest.approx(0.5, rel=0.01)]


def test_in_a_sample_nobody_stays_who_was_not_there_before():
    # A crowded day between two quiet weeks, which leaves two thirds of all authors in the sample.
    crowd = [2 * HASHES // 3 - 1 - n for n in range(SAMPLED)]
    days = [("W1", hashes(1)), ("W2", hashes(*crowd)), ("W3", hashes(1, 5))]
    last = cohorts_of(days, is_over=True).weeks[-1]
    assert (last.active, last.new, last.returned, last.stayed) == (4, 2, 2, 0)


class Page(HTMLParser):
    """The references of a page, and whether its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "path", "circle", "rect", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_pages_link_only_each_other_and_hold_what_they_say():
    days = [figures(f"2026-11-{n:02}", n) for n in range(1, 12)]
    days.append(figures("2026-11-12", kinds={}, origins={}, lags={}, skews={}, quarantined={}))
    evil = "wss://<script>alert(1)</script>"
    scores = [RelayScore(at, url, at / 10, "active") for at in (1, 2) for url in ("wss://a", evil)]
    note = LakeNote("ab" * 32, "2026-11-01", "2026-11-12", 12)
    periods = {"2026-W45": 40, "2026-11": 77}
    shown = SiteFigures(note, days, periods, scores, [("Traffic", "traffic.html")])
    site = render_site(shown)
    assert set(site) == {
        "index.html", "lag.html", "authors.html", "cohorts.html", "kinds.html", "provenance.html",
        "quarantine.html", "relays.html",
    }  # fmt: skip
    for text in site.values():
        page = Page(text)
        assert page.open == [] and set(page.links) == {*site, "traffic.html"}
        assert "<script" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "2026-W45" in site["authors.html"] and ">77<" in site["authors.html"]
    assert "2026-W44 +1: 50%" in site["cohorts.html"] and "All authors" in site["cohorts.html"]
    assert "365 days" in site["kinds.html"]
    assert re.search(r"wss://a</bdi></td>.*?\+0\.10", site["relays.html"])
    assert ">1.0 %<" in site["lag.html"]  # from the future
    # A lake of one day has no trend, and a lake without scores has no page of them.
    small = render_site(SiteFigures(note, days[:1], {}))
    assert "relays.html" not in small and "seven finished days" in small["kinds.html"]


def test_relays_are_told_as_they_were_last_and_as_they_were_first():
    chosen = random.Random(9)
    for _ in range(20):
        times = chosen.sample(range(1_760_000_000, 1_790_000_000), chosen.randrange(1, 6))
        told = {
            (f"wss://{number}.example", at): (chosen.random(), chosen.choice(["active", "degraded"]))
            for at in times for number in range(6) if not number or chosen.random() < 0.6
        }  # fmt: skip
        scores = [RelayScore(at, url, *said) for (url, at), said in told.items()]
        chosen.shuffle(scores)
        note = LakeNote("ab" * 32, "2026-11-01", "2026-11-01", 1)
        shown = render_site(SiteFigures(note, [figures("2026-11-01")], {}, scores))["relays.html"]
        expected = []
        for (url, at), (score, standing) in told.items():
            if at == max(times):
                first = min(one for other, one in told if other == url)
                change = score - told[url, first][0]
                since = datetime.datetime.fromtimestamp(first, datetime.UTC).strftime("%Y-%m-%d %H:%M")
                expected.append([url, standing, f"{score:.2f}", f"{change:+.2f}", since])
        expected.sort(key=lambda row: (-told[row[0], max(times)][0], row[0]))
        body = shown.partition("<h2>Scores</h2>")[2]
        cells = [html.unescape(cell) for cell in re.findall(r"<td[^>]*><bdi>([^<]*)</bdi>", body)]
        assert [cells[place : place + 5] for place in range(0, len(cells), 5)] == expected


def test_a_day_of_a_clock_that_was_decades_wrong_makes_no_thousand_weeks():
    days = ["1970-01-02", "2026-10-05", "2026-10-12", "2026-11-02", "7711-10-21"]
    note = LakeNote("ab" * 32, days[0], days[-1], 1)
    shown = render_site(SiteFigures(note, [figures(day, number) for number, day in enumerate(days)], {}))
    page = shown["cohorts.html"]
    weeks = re.findall(r"<bdi>((?:… )?\d{4}-W\d\d)</bdi>", page.partition("Who stays")[0])
    assert weeks == ["7711-W43", "… 7711-W43", "2026-W45", "2026-W44", "2026-W43", "2026-W42", "2026-W41",
                     "… 2026-W41", "1970-W01"]  # fmt: skip
    # The week after the gap was not a week later.
    assert "2026-W41 +4: 0%" in page and "2026-W41 +5" not in page
    assert "1970-W01 +0: 100%" in page and "1970-W01 +1" not in page


def test_what_an_erasure_leaves_is_not_called_damage():
    [reason] = emptied(rows_table([1]))["reason"].to_pylist()
    note = LakeNote("ab" * 32, "2026-11-01", "2026-11-01", 1)
    shown = render_site(SiteFigures(note, [figures("2026-11-01", quarantined={reason: 1})], {}))
    assert f"an erasure has left of a packet, which is {reason}" in shown["quarantine.html"]


@pytest.mark.timeout(600)
def test_a_report_reads_each_day_once_and_adds_up_what_the_lake_has(spark, tmp_path):
    lake, output = tmp_path / "lake", tmp_path / "site"
    write_batch(lake, [1, 2, 3], [4])
    write_batch(lake, [1, 2], day=DAY + 1)
    done = report(spark, lake, output)
    assert (done.days, done.counted, done.packets) == (2, 2, 5)
    assert done.pages[0] == "index.html" and all((output / name).stat().st_size for name in done.pages)

    [first, second] = sorted((output / "days").iterdir())
    tips = [manifest.hash for manifest in Lake.open(lake).manifests]
    day = kept(output / "days", first.stem, tips[0])
    assert day is not None
    files = (lake / "packets" / "day=2024-10-04").rglob("*.parquet")
    rows = pa.concat_tables([pq.ParquetFile(file).read() for file in files])
    times = (rows[name].to_pylist() for name in ("received_at", "timestamp"))
    lags = [received - dated for received, dated in zip(*times, strict=True)]
    assert sum(day.lags.values()) == 3 and set(day.lags) == set(map(bucket, lags))
    assert day.skews == {bucket(min(lags)): 1} and day.authors == 1 and len(day.sketch) > 4
    assert {name: (kind.packets, kind.size) for name, kind in day.kinds.items()} == {
        "NOTE": (1, len(b'{"text":"%d"}' % place(2))), "POST": (2, 2 * len(b'{"text":"%d"}' % place(1))),
    }  # fmt: skip
    # Annotated packets are those whose claim did not hold.
    assert day.origins == {"not proven": sum(one is not None for one in rows["annotation"].to_pylist())}
    assert day.quarantined == {"malformed_json": 1}
    [author] = struct.unpack(">q", day.sample)
    assert 0 <= author < HASHES
    # The days share their one author, as their sketches show.
    assert "2024-10</bdi></td><td><bdi>1</bdi>" in (output / "authors.html").read_text()

    # Kept results are not computed again: only the day that has grown is read.
    (lake / "packets" / "day=2024-10-04").rename(lake / "_gone")
    write_batch(lake, [3], day=DAY + 1)
    first.with_stem("2024-09-01").write_bytes(first.read_bytes())  # of a day that has changed, or is missing
    again = report(spark, lake, output, days=2)
    assert sorted((output / "days").iterdir()) == [first, second]
    assert (again.days, again.counted, again.packets) == (2, 1, 6)
    assert second.stem in (output / "lag.html").read_text()
    with pytest.raises(UsageError, match="lies in the lake"):
        report(spark, lake, lake / "site")
    # The remains of a killed run of `reputation` show nothing, and block nothing else.
    history = tmp_path / "relay_score_history"
    (history / "at=20" / "_temporary").mkdir(parents=True)
    with pytest.raises(UsageError, match="relay_score_history"):
        report(spark, lake, output, scores=tmp_path)
    (history / "at=10").mkdir()
    scores = pa.table({"url": ["wss://a.example"], "score": [0.5], "standing": ["active"]})
    pq.write_table(scores, history / "at=10" / "part-0.parquet")
    assert "relays.html" in report(spark, lake, output, scores=tmp_path).pages
    (history / "at=10" / "part-0.parquet").write_bytes(b"torn")
    with pytest.raises(UsageError, match=r"at=10 cannot be read: .*Remove it"):
        report(spark, lake, output, scores=tmp_path)
