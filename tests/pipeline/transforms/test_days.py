"""The figures of days, each computed a second time in plain Python from its documentation."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest
from pyspark.sql import Row
from strata.protocol.sequences import day_text, first_of_day
from strata_pipeline.datasets import Packets, Quarantine
from strata_pipeline.days.cohorts import cohorts_of
from strata_pipeline.days.figures import week_of
from strata_pipeline.days.lags import added, percentile, share_below
from strata_pipeline.schemas import schema
from strata_pipeline.transforms.days import count_days, count_periods

DAY = 20_751
"""A Sunday: the days cross the ends of weeks and of a month."""
SHARES = (0.01, 0.5, 0.9, 0.99)
TYPES = {
    "POST": "POST",
    "TRUST_EDGE": "TRUST_EDGE",
    "/chat/1/room/proto": "channel",
    "/a/b\n/c/d": "channel",
    "/chat/1/room/proto/": "other",
    "/chat/1/room": "other",
    "//1/room/proto": "other",
    "post": "other",
    "POST\n": "other",
    "": "other",
}
"""Content types, and the folders that the guide assigns to them."""
CLAIMS = {
    None: None,
    "SOFTWARE": "SOFTWARE",
    "UNKNOWN": "UNKNOWN",
    "A_NEWER_ONE": "other",
}
LAGS = (0, 0, 1, 2, 2, 3, 9, 10, 61, 3600, 86_400 * 30, -1, -2, -3, -119, 2**53 - 1, -(2**53 - 1))


class Made(NamedTuple):
    """A packet, and what the pipeline must find out about it."""

    day: int
    author: str
    type: str
    lag: int
    body: bytes
    claim: str | None
    proven: bool


def packets_of(chosen: random.Random, days: Iterable[int]) -> list[Made]:
    """Some dozens for each day, from authors that come and go."""
    made = []
    for day in days:
        there = chosen.sample(range(30), chosen.randrange(1, 12))
        for number in range(chosen.randrange(1, 45)):
            claim = chosen.choice(list(CLAIMS))
            # The word alone is not a claim.
            told: dict[str, Any] = {"content": {"text": '"origin_type" ' + "é" * number}}
            if claim is not None:
                told["provenance_header"] = {"origin_type": claim}
            body = json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()
            made.append(
                Made(day, f"did:strata:{chosen.choice(there)}", chosen.choice(list(TYPES)),
                     chosen.choice(LAGS), body, claim, chosen.random() < 0.8)
            )  # fmt: skip
    return made


def rows_of(made: Iterable[Made]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for place, one in enumerate(made, 1):
        received_at = one.day * 86_400 + place
        rows.append(
            (first_of_day(one.day) + place, received_at, received_at - one.lag, None, b"%032d" % place,
             one.author, one.type, len(one.body), one.body, None if one.proven else b"{}")
        )  # fmt: skip
    return rows


def grouped(rows: Iterable[Row]) -> dict[str, dict[str, dict[str | None, Row]]]:
    """Rows by their figure, day and name."""
    found: dict[str, dict[str, dict[str | None, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        assert row["name"] not in found[row["what"]][day_text(row["day"])]
        found[row["what"]][day_text(row["day"])][row["name"]] = row
    return found


def histogram(rows: Mapping[str | None, Row]) -> dict[int, int]:
    return {int(str(name)): row["packets"] for name, row in rows.items()}


def assert_percentiles(told: Mapping[int, int], seconds: Iterable[int]) -> None:
    """Check percentiles: exact below ten seconds, and to 5 % above."""
    in_order = sorted(seconds)
    assert sum(told.values()) == len(in_order)
    for share in SHARES:
        true = in_order[max(1, math.ceil(share * len(in_order))) - 1]
        found = percentile(told, share)
        assert found == (true if abs(true) < 10 else pytest.approx(true, rel=0.05))
    ahead = sum(one < -2 for one in in_order) / len(in_order)
    assert share_below(told, -2) == pytest.approx(ahead)


def assert_days(found: Mapping[str, Mapping[str, Mapping[str | None, Row]]], made: list[Made]) -> None:
    by_day: dict[str, list[Made]] = defaultdict(list)
    for one in made:
        by_day[day_text(one.day)].append(one)
    for day, there in by_day.items():
        kinds, sizes, origins = Counter[str](), Counter[str](), Counter[str]()
        least: dict[str, int] = {}
        for one in there:
            kinds[TYPES[one.type]] += 1
            sizes[TYPES[one.type]] += len(one.body)
            origin = CLAIMS[one.claim] if one.proven else "not proven"
            if origin is not None:
                origins[origin] += 1
            least[one.author] = min(one.lag, least.get(one.author, one.lag))
        told = {name: (row["packets"], row["size"]) for name, row in found["kind"][day].items()}
        assert told == {kind: (kinds[kind], sizes[kind]) for kind in kinds}
        assert {name: row["packets"] for name, row in found["origin"].get(day, {}).items()} == origins
        assert_percentiles(histogram(found["lag"][day]), (one.lag for one in there))
        assert_percentiles(histogram(found["skew"][day]), least.values())
        assert found["author"][day][None]["packets"] == len(least)
        assert found["sample"][day][None]["packets"] == len(least)
    assert found["lag"].keys() == by_day.keys()
    assert_percentiles(added(map(histogram, found["lag"].values())), (one.lag for one in made))


def authors_by(period: Callable[[str], str], made: Iterable[Made]) -> dict[str, set[str]]:
    there: dict[str, set[str]] = defaultdict(set)
    for one in made:
        there[period(day_text(one.day))].add(one.author)
    return there


def assert_weeks(samples: list[tuple[str, bytes]], made: list[Made]) -> None:
    """Check by sets of names who is new, stays, returns and leaves."""
    weeks = sorted(authors_by(week_of, made).items())
    seen: set[str] = set()
    before: set[str] = set()
    found = cohorts_of(((week_of(day), sample) for day, sample in samples), is_over=True)
    assert found.share == 1 and [week.name for week in found.weeks] == [name for name, _ in weeks]
    for week, (_, now) in zip(found.weeks, weeks, strict=True):
        told = (week.active, week.new, week.returned, week.stayed, week.lost or 0)
        assert told == (
            len(now), len(now - seen), len((now & seen) - before), len(now & before), len(before - now)
        )  # fmt: skip
        seen |= now
        before = now
    firsts = {name: now.difference(*(there for _, there in weeks[:place]))
              for place, (name, now) in enumerate(weeks)}  # fmt: skip
    cohorts = {
        name: [len(firsts[name] & there) / len(firsts[name]) for _, there in weeks[place:]]
        for place, (name, _) in enumerate(weeks) if firsts[name]
    }  # fmt: skip
    assert {one.week: one.shares for one in found.cohorts} == cohorts


def test_each_figure_is_what_the_documents_say_whatever_the_order_and_the_parts(spark):
    chosen = random.Random(11)
    made = packets_of(chosen, [DAY + n for n in (*range(9), 12, 13, 30)])
    rows = rows_of(made)
    aside = [
        (first_of_day(DAY + n % 2) + 1_000 + n, DAY * 86_400, "bad" if n % 3 else "worse") for n in range(7)
    ]
    columns = schema("quarantine").names
    put_aside = [
        tuple({"sequence": sequence, "received_at": at, "reason": reason}.get(name) for name in columns)
        for sequence, at, reason in aside
    ]
    quarantine = Quarantine(spark.createDataFrame(put_aside, schema("quarantine")))

    def counted(parts: int) -> list[Row]:
        frame = spark.createDataFrame(rows, schema("packets")).repartition(parts)
        return sorted(count_days(Packets(frame), quarantine).collect(), key=str)

    told = counted(1)
    found = grouped(told)
    assert_days(found, made)
    reasons = Counter((sequence >> 32, reason) for sequence, _, reason in aside)
    assert {
        (row["day"], row["name"]): row["packets"] for row in told if row["what"] == "quarantine"
    } == reasons

    samples = [(day, bytes(there[None]["sketch"])) for day, there in sorted(found["sample"].items())]
    for _, sample in samples:
        hashes = struct.unpack(f">{len(sample) // 8}q", sample)
        assert list(hashes) == sorted(set(hashes)) and hashes[0] >= 0
    assert_weeks(samples, made)

    # Combined, the sketches of days know as much as one of the whole week or month; of so few, everything.
    sketches = [(period, bytes(there[None]["sketch"])) for day, there in found["author"].items()
                for period in (week_of(day), day[:7])]  # fmt: skip
    true = authors_by(week_of, made) | authors_by(lambda day: day[:7], made)
    assert count_periods(spark, sketches) == {name: len(there) for name, there in true.items()}

    chosen.shuffle(rows)
    assert [row for row in counted(5) if row["what"] != "author"] == [
        row for row in told if row["what"] != "author"
    ]
