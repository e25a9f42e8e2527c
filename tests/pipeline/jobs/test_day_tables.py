"""Results kept by day: each day is read once, and the answers are those of reading them all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as pads
import pytest
from pyspark.sql import DataFrame
from strata.protocol.packets import Packet
from strata.protocol.sequences import day_text
from strata_pipeline.datasets.channels import ChannelPackets
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.day_tables import DayTables, bring_up
from strata_pipeline.jobs.erase import erase
from strata_pipeline.jobs.reliability import reliability
from strata_pipeline.jobs.traffic import traffic
from strata_pipeline.lake.lake import Lake

from tests.support import relay_logs
from tests.support.lake_rows import carry, sds
from tests.support.lakes import DAY, NOON
from tests.support.toy_lakes import DAY as TOY_DAY
from tests.support.toy_lakes import write_batch

ADVERT = "buy the finest hats of the whole harbour, cheaper than anywhere else: offer "
SECRET = "the words of somebody who will not have said them, once the relay has erased them "
EARLIER, LOST = "named long after it was sent", "never sent"


def _packets(day: int) -> list[Packet]:
    """A day's texts, similar to those of other days, and messages that follow those of the day before."""
    at = NOON + day * DAY
    texts = [relay_logs.make(100 * day + n, who=n % 2, text=f"{ADVERT}{n}", at=at) for n in range(6)]
    secret = relay_logs.make(100 * day + 50, who=2, text=f"{SECRET}{day}", at=at)
    before = [*([f"a{day - 1}"] if day else []), *([EARLIER, LOST] if day == 2 else [])]
    said = [
        sds("alice", f"a{day}"),
        sds("bob", f"b{day}", before),
        *([sds("bob", EARLIER)] if not day else []),
    ]
    return [*texts, secret, *(carry(one, who=5 + n, at=at) for n, one in enumerate(said))]


def _plain(figures: Any) -> Any:
    """The figures without the number of days read."""
    return replace(figures, totals={**figures.totals, "counted": None})


@pytest.mark.timeout(600)
def test_traffic_and_reliability_read_a_day_once(spark, log_url, tmp_path: Path):
    lake, output = tmp_path / "lake", tmp_path / "out"
    days = [_packets(day) for day in range(3)]
    relay_logs.append(log_url, days[0], NOON)
    relay_logs.append(log_url, days[1], NOON + DAY)
    relay_logs.append(log_url, days[2], NOON + 2 * DAY)
    archive(spark, log_url, lake)

    def counted(job: Callable[..., Any], days: int | None = None) -> int:
        kept = job(spark, lake, days=days, output=output, **_NOW[job])
        assert _plain(kept) == _plain(job(spark, lake, days=days, **_NOW[job]))
        return int(kept.totals["counted"])

    assert [counted(traffic), counted(reliability)] == [3, 3]
    assert sum(row["near_duplicates"] for row in _rows(output / "hours")) == 5 + 7 + 7
    assert [row["message_id"] for row in _rows(output / "gaps")] == [LOST]

    # Days that need not be read need not be there. Earlier days record what was sent on them.
    (lake / "packets").rename(lake / "_away")
    assert traffic(spark, lake, output=output, now=NOON).totals["counted"] == 0
    assert reliability(spark, lake, days=1, output=output).totals["counted"] == 0
    assert [row["message_id"] for row in _rows(output / "gaps")] == [LOST]
    (lake / "_away").rename(lake / "packets")

    # A day grows, another is added, and a packet is erased from one: its words are no longer kept.
    relay_logs.append(log_url, [relay_logs.make(990, text=f"{ADVERT}x")], NOON + 2 * DAY + 60)
    relay_logs.append(log_url, _packets(3), NOON + 3 * DAY)
    archive(spark, log_url, lake)
    relay_logs.erase(log_url, days[1][6].packet_id, now=NOON + 9 * DAY)
    assert erase(spark, log_url, lake).days == 1
    assert [counted(traffic), counted(reliability)] == [3, 3]
    said = {row["sample"] for row in _rows(output / "traffic_days" / "texts")}
    assert sum(one.startswith(SECRET) for one in said) == 3

    # Texts of days that are not shown are not kept.
    assert [counted(traffic, days=2), counted(reliability, days=2)] == [0, 0]
    kept = {one.name for one in (output / "traffic_days" / "texts").glob("day=*")}
    assert kept == {"day=2024-10-06", "day=2024-10-07"}
    assert len([*(output / "reliability_days").glob("day=*")]) == 4


def test_what_is_kept_of_a_day_that_has_changed_goes_though_nobody_asks_for_the_day(tmp_path):
    for day in (TOY_DAY, TOY_DAY + 1, TOY_DAY + 2):
        write_batch(tmp_path / "lake", [1, 2], day=day)
    lake = Lake.open(tmp_path / "lake")
    kept = tmp_path / "out"
    for day, mark in [*((day, lake.mark_of(day)) for day in lake.days()), (TOY_DAY + 9, "of another lake")]:
        folder = kept / f"day={day_text(day)}"
        folder.mkdir(parents=True)
        (folder / "_kept.json").write_text(json.dumps({"format": 1, "mark": mark}))
    changed = kept / f"day={day_text(TOY_DAY)}" / "_kept.json"
    changed.write_text(changed.read_text().replace(lake.mark_of(TOY_DAY), "before an erasure"))
    tables = DayTables(kept, ChannelPackets, 1)
    assert bring_up([(tables, _unread)], lake, [TOY_DAY + 2], lambda step: None) == []
    assert {one.name for one in kept.iterdir()} == {f"day={day_text(TOY_DAY + n)}" for n in (1, 2)}


def _unread(days: list[int]) -> DataFrame:
    raise AssertionError(f"{days} are not read")


_NOW: dict[Callable[..., Any], dict[str, int]] = {traffic: {"now": NOON + 3 * DAY}, reliability: {}}


def _rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pads.dataset(folder, format="parquet").to_table().to_pylist()
    return found
