"""Reports: complete, self-contained, and safe to open whatever strangers wrote."""

from __future__ import annotations

import datetime
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from strata_pipeline.reports import series, svg, text
from strata_pipeline.reports.page import LakeNote
from strata_pipeline.reports.reliability import ReliabilityFigures, render_reliability
from strata_pipeline.reports.traffic import TrafficFigures, render_traffic

_EVIL = "/chat/<script>alert(1)</script>/\"'><img src=x onerror=y>/\u202e&amp;\x1b\n"
_NOTE = LakeNote("ab" * 32, "2026-11-20", "2026-11-21", 2)
_VOID = {"meta", "path", "rect", "circle"}


class _Reader(HTMLParser):
    """The page as a browser would read it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in _VOID or self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def _read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def _channel_day(**changed):
    return {
        "day": datetime.date(2026, 11, 21), "content_topic": _EVIL, "channel_id": "room", "readable": True,
        "packets": 12, "bytes": 5000, "authors": 2, "first_at": 10**9, "last_at": 2**62, "unreadable": 0,
        "malformed": 0, "messages": 9, "retransmissions": 1, "syncs": 1, "ephemerals": 1, "participants": 2,
        "ack_delay_p50": 1.0, "ack_delay_p95": 700.0, "unacknowledged": 0.125, "gaps": 1, "silences": None,
    } | changed  # fmt: skip


def _reliability(**changed) -> ReliabilityFigures:
    told: dict[str, Any] = {
        "note": _NOTE,
        "totals": {"channels": 1, "messages": 9, "retransmissions": 1, "unacknowledged": 1, "gaps": 1,
                   "silences": 400, "unreadable": 3, "channel_days": 3,
                   "readable_days": 1},
        "daily": [{"day": datetime.date(2026, 11, 21), "messages": 9, "retransmissions": 1, "unreadable": 3}],
        "channel_days": [
            _channel_day(),
            _channel_day(channel_id=None, readable=False, unreadable=12, malformed=1, ack_delay_p50=None),
        ],
        "gaps": [{"named_at": 10**9, "content_topic": _EVIL, "channel_id": "r", "message_id": _EVIL,
                  "named_by": 2}],
        "silences": [{"day": "d", "content_topic": _EVIL, "channel_id": "r", "sender_id": _EVIL,
                      "participant_id": _EVIL, "messages": 3}],
    }  # fmt: skip
    return ReliabilityFigures(**(told | changed))


def _traffic(**changed) -> TrafficFigures:
    told: dict[str, Any] = {
        "note": _NOTE,
        "totals": {"packets": 10, "size": 9999, "authors": 1, "near_duplicates": 1, "bursts": 1,
                   "clusters": 1, "abuse": 1},
        "hourly": [{"hour_at": 10**9, "packets": 10, "near_duplicates": 1},
                   {"hour_at": 2**62, "packets": 1, "near_duplicates": 0}],
        "authors": [{"author_id": _EVIL, "packets": 10, "size": 9999, "near_duplicates": 1,
                     "peak_packets": 3}],
        "types": [{"content_type": _EVIL, "packets": 10, "size": 9999}],
        "bursts": [{"author_id": _EVIL, "hour_at": 0, "packets": 9, "peak_packets": 9, "threshold": 5.5}],
        "clusters": [{"copies": 1, "authors": 1, "sample": _EVIL, "first_author_id": _EVIL}],
        "abuse": [{"author_id": _EVIL, "verdict": "limit", "reason": _EVIL, "expires_at": 10**9}],
    }  # fmt: skip
    return TrafficFigures(**(told | changed))


@pytest.mark.parametrize("page", [render_reliability(_reliability()), render_traffic(_traffic())])
def test_what_strangers_wrote_is_text(page):
    reader = _read(page)
    tags = {tag for tag, _ in reader.tags}
    assert not tags & {"script", "img", "iframe", "link", "object", "a"}
    assert not any(
        name.startswith("on") or name in ("src", "href") for _, told in reader.tags for name in told
    )
    assert any("<script>alert(1)</script>" in data for data in reader.texts)
    assert not re.search("[\u202e\x00-\x09\x0b-\x1f]", page)
    # Nothing is fetched, and the page forbids it to the browser.
    assert "default-src 'none'" in page
    assert set(re.findall(r"https?://[^\"\s]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in page and "@import" not in page
    assert "ab" * 32 in page and "2026-11-20 to 2026-11-21" in page
    page.encode("utf-8")


def test_the_report_says_what_it_cannot_know():
    reader = _read(render_reliability(_reliability()))
    assert any("encrypted, in an encoding of their own, or garbage" in data for data in reader.texts)
    assert "1 of 400 rows" in "".join(reader.texts) and "1 of 2 rows" in "".join(reader.texts)
    assert "12.5 %" in reader.texts and "–" in reader.texts
    assert "11.7 min" in "".join(reader.texts)


def test_nothing_to_report():
    none = {name: 0 for name in _reliability().totals}
    page = render_reliability(_reliability(totals=none, daily=[], channel_days=[], gaps=[], silences=[]))
    assert _read(page).texts.count("None.") == 4 and "No message was acknowledged." in page
    none = {name: 0 for name in _traffic().totals}
    page = render_traffic(
        _traffic(totals=none, hourly=[], authors=[], types=[], bursts=[], clusters=[], abuse=[])
    )
    assert _read(page).texts.count("None.") == 4


def test_columns_are_stacked_to_scale():
    drawn = svg.columns([("one", [30.0, 10.0]), ("two", [0.0, 0.0])], ("a", "b"), text.count_text)
    heights = [float(found) for found in re.findall(r'<rect class="s\d"[^>]* height="([\d.]+)"', drawn)]
    # The axis ends at 40: thirty is three quarters of its 200 points.
    assert heights == [150.0, 50.0, 0.0, 0.0]
    assert "<title>one: a 30, b 10</title>" in drawn
    _read(drawn)


def test_no_time_is_left_out_of_a_series():
    days = series.by_day({"2026-02-27": [1.0], "2026-03-02": [2.0], "2026-03-03": [3.0]}, [0.0])
    assert days == [
        ("2026-02-27", [1.0]), ("2026-02-28", [0.0]), ("2026-03-01", [0.0]), ("2026-03-02", [2.0]),
        ("2026-03-03", [3.0]),
    ]  # fmt: skip
    weeks = series.by_week({"2027-W01": 3, "2026-W52": 1}, 0)
    assert weeks == [("2026-W52", 1), ("2026-W53", 0), ("2027-W01", 3)]
    months = series.by_month({"2027-02": 3, "2026-11": 1}, 0)
    assert months == [("2026-11", 1), ("2026-12", 0), ("2027-01", 0), ("2027-02", 3)]
    assert series.by_day({}, 0) == series.by_week({}, 0) == series.by_month({}, 0) == []


def test_one_place_stands_for_a_long_time_without_anything():
    assert series.by_day({"1970-01-01": 1, "2026-11-26": 2}, 0) == [
        ("1970-01-01", 1),
        ("…", 0),
        ("2026-11-26", 2),
    ]
    assert len(series.by_number({0: 1, 32: 1}, 0, str)) == 33
    assert series.by_number({0: 1, 33: 1}, 0, str) == [("0", 1), ("…", 0), ("33", 1)]


def test_traffic_over_more_than_two_weeks_is_told_by_day():
    def labels(*hours: int) -> list[str]:
        rows = [{"hour_at": hour * 3_600, "packets": 1, "near_duplicates": 0} for hour in hours]
        return re.findall(r"<title>([^<]*): packets", render_traffic(_traffic(hourly=rows)))

    assert labels(0, 2) == ["1970-01-01 00:00", "1970-01-01 01:00", "1970-01-01 02:00"]
    assert len(labels(0, 20, 40, 60, 335)) == 63
    assert labels(0, 20, 40, 60, 336)[:4] == ["1970-01-01", "1970-01-02", "1970-01-03", "1970-01-04"]
    assert labels(2**60)[0].endswith(" s")


def test_the_hours_of_a_week_are_told_on_average_as_often_as_they_came():
    monday = 4 * 24  # in 1970
    rows = [
        {"hour_at": (monday + hour) * 3_600, "packets": packets, "near_duplicates": 0}
        for hour, packets in ((3, 5), (7 * 24 + 27, 2))
    ]
    page = render_traffic(_traffic(hourly=rows))
    told = dict(re.findall(r"<title>((?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d\d): ([^<]*)</title>", page))
    assert len(told) == 7 * 24 and next(iter(told)) == "Mon 00"
    assert {hour: mean for hour, mean in told.items() if mean != "0"} == {"Mon 03": "2.5", "Tue 03": "1"}


def test_bars_and_ranges():
    drawn = svg.bars([("x" * 100, 8.0), ("y", 4.0)], text.count_text)
    widths = [float(found) for found in re.findall(r'width="([\d.]+)" height', drawn)]
    assert widths[0] == 2 * widths[1]
    # A label that is too long is shortened, and complete when pointed at.
    assert "x" * 34 not in drawn.replace(f"<title>{'x' * 100}</title>", "", 1)
    drawn = svg.ranges([("near", 0.0, 9.0), ("far", 9.0, 99.0), ("beyond", 1.0, 1e10)], text.seconds_text)
    near, near_high, far, far_high, *beyond = (float(found) for found in re.findall(r'cx="([\d.]+)"', drawn))
    # Tenfold (after one is added) is one step, at any value.
    assert near < near_high == far and near_high - near == pytest.approx(far_high - far, abs=0.2)
    assert far_high < max(beyond) <= 640


@pytest.mark.parametrize(
    ("highest", "top", "step"), [(0, 1, 1), (1, 1, 0.2), (39, 40, 10), (100, 100, 20), (1234, 1500, 500)]
)
def test_axes_are_round(highest, top, step):
    assert svg._scale(highest) == pytest.approx((top, step))


def test_words_for_numbers():
    assert [text.seconds_text(value) for value in (None, 0, 1.25, 119, 120, 7200, 200_000)] == [
        "–", "0 s", "1.25 s", "119 s", "2 min", "2 h", "2.31 d",
    ]  # fmt: skip
    assert [text.size_text(value) for value in (None, 0, 1023, 1536, 2**50)] == [
        "–", "0 B", "1023 B", "1.5 KiB", "1,024 TiB",
    ]  # fmt: skip
    assert text.hour_text(1_795_262_400) == "2026-11-21 12:00" and text.hour_text(2**62) == f"{2**62} s"
    assert text.shortened("did:strata:z6Mk" + "a" * 50 + "end", 20).startswith("did:strata:z6")
    assert len(text.shortened("a" * 99, 20)) == 20 and text.shortened("short", 20) == "short"
    assert text.count_text(1234567) == "1,234,567" and text.count_text(None) == "–"
